"""What hints may take, and counters of what they did."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from sys import float_info

from kvblocks.arguments import check_count, check_flag, check_number, wrong


@dataclass(frozen=True, slots=True)
class HintLimits:
    """Bounds of a `HintExecutor`. Raises InvalidArgumentError.

    max_actions: in an envelope. max_tokens: that it names, as token ids or hashes, each counting one, and again in the
    blocks that each span of extra_keys touches, as often as its key has 256 characters, begun ones. max_tenants: that
    are remembered. max_pins, max_deferred, max_remembered: of each tenant: its pins, its prefetches that wait or load,
    and the actions whose answers are kept. max_ttl_s: how long a pin stands at most, or a prefetch waits, on the
    caller's clock. max_priority: of pins, below 100, whose blocks nothing could have. max_prefetch_share: of the pool,
    what all prefetches hold at once. reserved_share: of the pool, what a prefetch leaves free. may_evict: whether
    prefetches take least recently used blocks of anybody's, as requests do, or only those that hold nothing.
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
    """A snapshot; what is not of now counts since the executor was made.

    num_answers: by outcome, later answers to what was deferred included. num_repeated: actions that came again, and
    were answered as before; they are not in num_answers. num_dropped_answers: later answers that `step` did not return,
    since nobody called it in time. num_loaded_blocks: that prefetches brought. num_failed_prefetches: whose load did
    not bring all. num_pins, num_pinned_blocks (what they are for), num_waiting and num_loading prefetches: now.
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
