"""`Tier`: the description of a place below the device."""

from collections.abc import Iterable
from typing import Any, Literal, SupportsFloat, SupportsIndex, final, get_args

from kvblocks.arguments import (
    Flag,
    Text,
    check_count,
    check_flag,
    check_name,
    check_number,
    check_text,
    counted,
    is_a,
    listed,
    plain_text,
    wrong,
)
from kvblocks.closed import check_subclass
from kvblocks.core.kinds import Group
from kvblocks.errors import InvalidArgumentError
from kvblocks.stats import TierStats
from kvblocks.tiers.rates import MOST_NUMBER

__all__ = ["StoreWhen", "Tier", "TierStats", "check_tiers"]

StoreWhen = Literal["computed", "freed", "reused"]
"""When a block is stored: once it is written, when its sequence ends, or when a second sequence hits it."""


@final
class Tier:
    """A place that holds copies of cached blocks, in slots 0 to num_blocks - 1.

    List a manager's tiers in the order of preference, the fastest first. Raises InvalidArgumentError.

    - name: any non-empty text; a manager's tiers need different names.
    - num_blocks: slots, each for one block's keys and values in all layers of its group.
    - num_block_bytes: bytes of a slot, in which the cost of a load is counted.
    - store: when blocks are stored, see `StoreWhen`. "freed" writes a block once, "reused" writes least to a disk.
    - min_store_tokens: prefixes of at least this many tokens are stored when they are freed, whatever `store` says.
      None: no such length.
    - window_store_tokens: which blocks of windows are stored. None: those that a hit at the end of the stored prefix
      needs. A number: also those that a hit at each multiple of it needs.
    - bytes_per_second: the expected speed of loads, used until it is measured; None: not known.
    - max_transfer_blocks: the most blocks of one transfer. A transfer that fails loses all of its blocks.
    - is_persistent: whether the tier outlives the manager. `tiers.take_changes` then says what to remember, and
      `tiers.restore` takes it back.
    - is_shared: whether others also store in the tier and delete from it. `tiers.note_found` then reports what it has.
      A shared tier isn't persistent: its slots are only what this manager knows about it. What others have found there
      can't be taken back, so complete a store to it only when the step that wrote its blocks has ended.
    - medium: its name in events. None: "EXTERNAL" if shared, as in SGLang; "STORAGE" if persistent, otherwise "CPU", as
      in vLLM.
    """

    def __init_subclass__(cls) -> None:
        """Raise TypeError."""
        check_subclass(cls, Tier)

    def __init__(
        self,
        name: str,
        num_blocks: SupportsIndex,
        num_block_bytes: SupportsIndex,
        *,
        store: StoreWhen = "freed",
        min_store_tokens: SupportsIndex | None = None,
        window_store_tokens: SupportsIndex | None = None,
        bytes_per_second: SupportsFloat | None = None,
        max_transfer_blocks: SupportsIndex = 32,
        is_persistent: Flag = False,
        is_shared: Flag = False,
        medium: Text | None = None,
    ) -> None:
        given = plain_text(name) if is_a(name, str) else ""
        if not given:
            raise wrong("Tier: name", "a non-empty str", name)
        self.name = check_text("Tier: name", given)
        self.num_blocks = check_count("Tier: num_blocks", num_blocks, 1)
        self.num_block_bytes = check_count("Tier: num_block_bytes", num_block_bytes, 1)
        kinds = {kind: kind for kind in get_args(StoreWhen)}
        when = plain_text(store) if is_a(store, str) else ""
        if when not in kinds:
            raise wrong("Tier: store", f"one of {', '.join(map(repr, kinds))}", store)
        self.store: StoreWhen = kinds[when]
        least = None if min_store_tokens is None else check_count("Tier: min_store_tokens", min_store_tokens, 0)
        self.min_store_tokens = least
        every = window_store_tokens
        self.window_store_tokens = None if every is None else check_count("Tier: window_store_tokens", every, 1)
        self.bytes_per_second: float | None = None
        if bytes_per_second is not None:
            rate = check_number("Tier: bytes_per_second", bytes_per_second)
            if not 1 / MOST_NUMBER < rate < MOST_NUMBER:
                raise wrong("Tier: bytes_per_second", "a number above 0, or None", bytes_per_second)
            self.bytes_per_second = float(rate)
        self.max_transfer_blocks = check_count("Tier: max_transfer_blocks", max_transfer_blocks, 1)
        self.is_persistent = check_flag("Tier: is_persistent", is_persistent)
        self.is_shared = check_flag("Tier: is_shared", is_shared)
        if self.is_shared and self.is_persistent:
            raise InvalidArgumentError("Tier: expected is_persistent or is_shared, got both")
        place = check_name("Tier: medium", medium)
        self.medium = place or ("EXTERNAL" if self.is_shared else "STORAGE" if self.is_persistent else "CPU")

    def __repr__(self) -> str:
        return f"Tier({self.name!r}, {counted(self.num_blocks, 'block')})"

    @staticmethod
    def check_groups(groups: Iterable[Group]) -> None:
        """Raise InvalidArgumentError unless tiers can serve these groups of layers. A manager checks them, too."""
        items = listed("groups", "Group items", groups, in_order=True)
        if not all(is_a(item, Group) for item in items):
            raise wrong("groups", "Group items", items)
        if items and not any(group.sees_all for group in items):
            raise InvalidArgumentError(f"tiers: expected a group of full attention, got {items}")
        if any(group.has_gaps for group in items):
            raise InvalidArgumentError(f"tiers: expected groups with KV for each token, got {items}")
        if not all(group.is_cached for group in items):
            raise InvalidArgumentError(f"tiers: expected groups that are all cached (is_cached=True), got {items}")


def check_tiers(tiers: Iterable[Tier], groups: Iterable[Any], *, enable_caching: bool) -> tuple[Tier, ...]:
    """Return a manager's tiers. groups: its groups; empty: one with full attention. Raises InvalidArgumentError."""
    given = tuple(listed("tiers", "an iterable of Tier", tiers, in_order=True))
    for tier in given:
        if not is_a(tier, Tier):
            raise wrong("tiers", "an iterable of Tier", tier)
    if not given:
        return given
    names = [tier.name for tier in given]
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"tiers: expected different names, got {names}")
    if not enable_caching:
        raise InvalidArgumentError("tiers: expected enable_caching=True, since they hold what is cached; got False")
    Tier.check_groups(groups)
    return given
