"""Where other packages plug in: base classes whose methods do nothing, or are abstract.

The core imports only the packages below it. It calls objects in attributes of these types. An attribute is None, or
empty, until another package sets it:

- `PrefixIndex.watchers`: told what happens to blocks and to cached prefixes (removal history, metrics, quotas);
- `PrefixIndex.accounts`: who is charged for cached blocks (quotas);
- `BlockPool.chooser`: which blocks are taken first (eviction policies, quotas);
- `PrefixIndex.events`: where changes of the cached set are recorded;
- `SlotAllocator.soft_holds`: owners of blocks other than sequences, which may give blocks up for sequences (pins).

One more base class is in the module that uses it: `Account` in `block`. All are native classes rather than Protocols,
so that in the compiled build their methods cost no more than any other call.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from typing import Any, Literal

from kvblocks.core.block import Account, KVCacheBlock, Run
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.sequence import Sequence
from kvblocks.events import CacheEvent
from kvblocks.stats import Refusal

RemovalCause = Literal["evicted", "aborted", "reset", "dropped"]
"""Why a prefix stopped being cached: its block was taken, its KV was never written, a reset, or a request."""


class Watcher:
    """Told what happens to blocks and cached prefixes. This base class does nothing, in O(1).

    No method may change what it is told about. needs_digests: whether it needs the digests of removed prefixes, which
    are then computed as blocks are cached. needs_takers: whether `note_taking` must be called for each sequence
    separately.
    """

    needs_digests: bool = False
    needs_takers: bool = False

    def note_taking(self, num_blocks: int, sequence_id: Hashable) -> None:
        """`num_blocks` blocks are about to be taken from the pool for this sequence."""

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """These blocks were taken for reuse. They are still marked as cached."""

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Each of these blocks got one more owner."""

    def note_released(self, blocks: Items[KVCacheBlock], giver: Sequence | None = None) -> None:
        """Each of these blocks lost an owner, in this order. Blocks that were renewed for their duplicates are among
        them.

        giver: the sequence that released them because it ended or went back; None: something else did.
        """

    def note_passed(self, blocks: Items[KVCacheBlock]) -> None:
        """Each of these cached blocks left a window and lost an owner; it is reused before other cached blocks."""
        self.note_released(blocks)

    def note_renewed(self, blocks: Items[KVCacheBlock]) -> None:
        """These free blocks are queued again, in place of duplicates that were released. `note_released` follows."""

    def note_removed(self, digests: Items[bytes], cause: RemovalCause) -> None:
        """The prefixes with these digests stopped being cached."""

    def note_clearing(self, runs: Iterable[Run]) -> None:
        """The cache is about to be reset. `runs` are all its runs."""


class Digests:
    """The digests of blocks that are about to be cached. packed: one after the other.

    sequence_id: of the sequence whose blocks they are, for events; None if there is no sequence.
    """

    __slots__ = ("packed", "sequence_id")

    def __init__(self, packed: bytearray, sequence_id: Hashable = None) -> None:
        self.packed = packed
        self.sequence_id = sequence_id


class EventLog:
    """Records what gets cached and what is removed on one medium."""

    def __init__(self, medium: str) -> None:
        self.medium = medium

    @abstractmethod
    def of_tier(self, medium: str) -> "EventLog | None":
        """Return the log of a tier; None if that tier's changes aren't recorded."""

    @abstractmethod
    def append(self, record: CacheEvent) -> None:
        """Add a record about a side group."""

    @abstractmethod
    def note_stored(self, run: Run, base: int, sequence_id: Hashable = None) -> None:
        """`run` has grown from `base` blocks to its present length. sequence_id: as in `Digests`."""

    @abstractmethod
    def note_removed(self, names: Items[bytes]) -> None:
        """Prefixes stopped being cached; a child comes before its parent."""

    @abstractmethod
    def note_cleared(self) -> None:
        """The cache was reset."""


class Accounts(Watcher):
    """Who is charged for cached blocks."""

    @abstractmethod
    def account_of(self, extra_keys: bytes | None) -> Account | None:
        """Return who is charged for prefixes whose first block has these encoded keys; None if nobody is."""


class Chooser(Watcher):
    """Decides which blocks are taken first. To be told what happens, it must also be a watcher of the index."""

    @property
    @abstractmethod
    def is_choosing(self) -> bool:
        """Whether it chooses the next block to be taken. If not, the first block of the queue is taken. O(1)."""

    @abstractmethod
    def take_next(self, queue: FreeBlockQueue, max_blocks: int) -> list[KVCacheBlock]:
        """Take at least one and at most `max_blocks` blocks off the queue, which isn't empty: those to be reused next.

        Blocks that hold nothing must go before any other. The pool then calls `note_taken` and evicts what they hold.
        """

    def set_time(self, now: Any) -> None:
        """The caller's clock was set."""

    def note_detached(self, blocks: Items[KVCacheBlock]) -> None:
        """These blocks were detached: they stopped being cached although nobody took them."""

    def note_starting(self, sequence: Sequence) -> None:
        """This sequence of a session starts, and is about to touch and take blocks."""


class SoftHolds:
    """Owners of cached prefixes, other than sequences, that may give blocks up for sequences."""

    @abstractmethod
    def find_refusal(self, num_blocks: int, touched: list[KVCacheBlock]) -> Refusal | None:
        """Return why `num_blocks` can't be had once `touched` are owned; None if they can, perhaps after `give_up`."""

    @abstractmethod
    def give_up(self, num_blocks: int) -> None:
        """Free this many blocks. `find_refusal` must have returned None."""

    @abstractmethod
    def extend(self, sequence: Sequence) -> None:
        """Become an owner of those blocks of this sequence that holds lack. The sequence is about to release blocks."""

    @abstractmethod
    def ends_in(self, sequence: Sequence) -> list[int]:
        """Return the ends, in tokens, of held prefixes that lack blocks and that `sequence` begins with."""

    @abstractmethod
    def drop_uncached(self) -> None:
        """Release blocks that are no longer cached."""

    @abstractmethod
    def tables(self) -> list[list[KVCacheBlock]]:
        """Return the owned blocks, each as many times as it is owned."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError unless the state is consistent."""
