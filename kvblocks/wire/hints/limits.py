"""The limits of hints, and counters of what hints did."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from sys import float_info

from kvblocks.arguments import check_count, check_flag, check_number, wrong


@dataclass(frozen=True, slots=True)
class HintLimits:
    """Limits of a `HintExecutor`. Raises InvalidArgumentError.

    - max_actions: the most actions in an envelope.
    - max_tokens: the most tokens that an envelope names. A token id or a hash counts as one. A span of extra_keys
      counts as the tokens of the blocks that it touches, and once more for each 256 characters of its key.
    - max_tenants: how many tenants are remembered.
    - max_pins: the most pins of a tenant.
    - max_deferred: the most prefetches of a tenant that wait or load.
    - max_remembered: how many of a tenant's answers are kept.
    - max_ttl_s: the longest time that a pin stays, or a prefetch waits, in seconds of the caller's clock.
    - max_priority: the highest priority of pins. It is below 100, since pins of priority 100 never give up blocks.
    - max_prefetch_share: the share of the pool that all prefetches together may hold.
    - reserved_share: the share of the pool that a prefetch leaves free.
    - may_evict: whether prefetches evict least recently used blocks of any tenant, as requests do. If not, they take
      only blocks that hold nothing.
    """

    max_actions: int = 64
    max_tokens: int = 1 << 20
    max_tenants: int = 1024
    max_pins: int = 256
    max_deferred: int = 16
    max_remembered: int = 1024
    max_ttl_s: float = 3600.0
    max_priority: int = 99
    max_prefetch_share: float = 0.125
    reserved_share: float = 0.125
    may_evict: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "may_evict":
                check_flag(item.name, value)
            elif item.name == "max_ttl_s":
                if not 0 < check_number(item.name, value) <= float_info.max:
                    raise wrong(item.name, "a number of seconds, more than 0", value)
            elif item.name.endswith("_share"):
                if not 0 <= check_number(item.name, value) <= 1:
                    raise wrong(item.name, "a share of the pool from 0.0 to 1.0", value)
            else:
                check_count(item.name, value, 0 if item.name == "max_priority" else 1, _most(item.name))


def _most(name: str) -> int | None:
    return 99 if name == "max_priority" else None


@dataclass(frozen=True, slots=True)
class HintStats:
    """A snapshot. Counters start when the executor is made.

    - num_answers: by outcome, including later answers to deferred actions.
    - num_repeated: actions that came again and were answered as before; they are not in num_answers.
    - num_dropped_answers: later answers that were dropped because `step` was not called in time.
    - num_loaded_blocks: blocks that prefetches brought.
    - num_failed_prefetches: prefetches whose load didn't bring everything.
    - num_pins, num_pinned_blocks (blocks that pins are for), num_waiting and num_loading (prefetches): as of now.
    """

    num_answers: Mapping[str, int] = field(default_factory=dict)
    num_repeated: int = 0
    num_dropped_answers: int = 0
    num_loaded_blocks: int = 0
    num_failed_prefetches: int = 0
    num_pins: int = 0
    num_pinned_blocks: int = 0
    num_waiting: int = 0
    num_loading: int = 0
