"""A bounded memory of prefixes that stopped being cached, and why. `explain` uses it.

Prefixes are remembered by their digests, which are good enough for an explanation, since no hit depends on them. Time
is counted in blocks taken from the pool. Where tiers are watched too, a prefix's last removal counts, wherever it was.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

from kvblocks.core.block import Epoch, Run
from kvblocks.core.hooks import RemovalCause, Watcher
from kvblocks.hashing.scheme import HashScheme

if TYPE_CHECKING:
    from kvblocks.tiers.pool import TierPool


class Removal(NamedTuple):
    """Why a prefix stopped being cached.

    - cause: "evicted" (its block was taken for something else), "aborted" (its KV was never written), "reset" or
      "dropped" (`evict_blocks`, `forget_salt`).
    - num_taken_blocks: how many blocks had been taken from the pool by then.
    - sequence_id: the sequence for which the block was evicted from the device; None for other causes and places.
    - tier: where it was removed; None: on the device.
    - salt: that of the prefix for which a tier evicted it.
    """

    cause: RemovalCause
    num_taken_blocks: int
    sequence_id: Hashable | None
    tier: str | None = None
    salt: str | None = None


class RemovalHistory(Watcher):
    """Remembers the last `max_blocks` prefixes that stopped being cached, with about 250 bytes each."""

    needs_digests: bool = True
    needs_takers: bool = True

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_taken_blocks = 0
        """How many blocks have been taken from the pool so far."""
        self._taker_id: Hashable | None = None
        """The sequence for which blocks were taken last."""
        self._removals: OrderedDict[bytes, Removal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._removals)

    def note_taking(self, num_blocks: int, sequence_id: Hashable) -> None:
        """Count the blocks, and remember for which sequence evictions happen from now on. O(1)."""
        self.num_taken_blocks += num_blocks
        self._taker_id = sequence_id

    def note_clearing(self, runs: Iterable[Run]) -> None:
        """Remember all cached prefixes as reset. O(cached blocks)."""
        for run in runs:
            self.note_removed([run.digest(index) for index in range(len(run.blocks))], "reset")

    def note_removed(self, digests: Items[bytes], cause: RemovalCause) -> None:
        """Remember these prefixes, and forget the oldest beyond `max_blocks`. O(their number)."""
        self.remember(digests, Removal(cause, self.num_taken_blocks, self._taker_id if cause == "evicted" else None))

    def remember(self, digests: Items[bytes], removal: Removal) -> None:
        """Remember one removal of several prefixes. O(their number)."""
        removals = self._removals
        for digest in digests:
            removals[digest] = removal
            removals.move_to_end(digest)
        while len(removals) > self.max_blocks:
            removals.popitem(last=False)

    def find(self, digest: bytes) -> Removal | None:
        """Return the last removal of the prefix with this digest; None if not remembered. Changes nothing. O(1)."""
        return self._removals.get(digest)


class TierRemovals(Watcher):
    """Watches a tier for a history: prefixes that it evicts, or that are dropped there on request or by a reset.

    The tier has the device's names. Bytes that turned out to be bad or not written aren't recorded here, because the
    device's record says more.
    """

    needs_digests: bool = True

    def __init__(self, history: RemovalHistory, tier: str) -> None:
        self._history = history
        self._tier = tier
        self._salt: str | None = None  # of the prefix for which slots were taken last

    def note_taking(self, num_blocks: int, sequence_id: Hashable) -> None:  # noqa: ARG002  # as `Watcher`
        """Remember for whose prefix evictions happen from now on. sequence_id: here, that prefix's salt. O(1)."""
        assert sequence_id is None or isinstance(sequence_id, str), f"{sequence_id!r}: not a salt"
        self._salt = sequence_id

    def note_removed(self, digests: Items[bytes], cause: RemovalCause) -> None:
        """As `RemovalHistory.note_removed`."""
        if cause != "aborted":
            salt = self._salt if cause == "evicted" else None
            removal = Removal(cause, self._history.num_taken_blocks, None, self._tier, salt)
            self._history.remember(digests, removal)

    def note_clearing(self, runs: Iterable[Run]) -> None:
        """As `RemovalHistory.note_clearing`."""
        for run in runs:
            self.note_removed([run.digest(index) for index in range(len(run.blocks))], "reset")


def watch_tiers(history: RemovalHistory, pools: "list[TierPool]", hash_scheme: HashScheme) -> None:
    """Have a history told of what tiers evict and drop. What leaves a shared store isn't known here.

    hash_scheme: the device's. The tiers must be empty.
    """
    for pool in pools:
        if not pool.is_shared:
            pool.index.epoch = Epoch(hash_scheme, 4 * pool.index.block_size)
            pool.removals = TierRemovals(history, pool.name)
            pool.index.watch(pool.removals)
