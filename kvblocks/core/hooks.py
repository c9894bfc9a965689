"""Where the other rooms plug in: base classes whose methods do nothing, or are abstract.

The core never imports them. It asks an attribute of one of these types, which is None until somebody wants more than
the core does:

- `PrefixIndex.watcher`: told what happens to blocks and to cached prefixes (history, metrics, quotas);
- `PrefixIndex.accounts`: who is charged for cached blocks, and which are evicted first (quotas, eviction policies);
- `PrefixIndex.events`: where changes of the cached set are recorded;
- `SlotAllocator.soft_holds`: owners of blocks that aren't sequences, and that may give way to them (pins).

Two more stand beside what they belong to: `Account` in `block`, and `SideTables` in `sequence`. They are native
classes, not Protocols: a call of a method of theirs is as cheap as any in the compiled build.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from typing import Literal

from kvblocks.core.block import Account, KVCacheBlock, Run
from kvblocks.core.free_queue import FreeBlockQueue
from kvblocks.core.sequence import Sequence
from kvblocks.events import CacheEvent
from kvblocks.stats import Refusal

RemovalCause = Literal["evicted", "aborted", "reset", "dropped"]
"""Why a prefix is cached no more: its block was taken, or was never computed; the cache was reset; or on request."""


class Watcher:
    """Whoever wants to be told. Each call is O(1) here, and changes nothing of the caller's.

    needs_digests: whether it wants the digests of what is removed, so that they are computed as blocks are cached.
    needs_takers: whether it wants to be told for whom blocks are taken; only then `note_taking` comes.
    """

    needs_digests: bool = False
    needs_takers: bool = False

    def note_taking(self, num_blocks: int, sequence_id: Hashable) -> None:
        """That many blocks are about to be taken from the pool for a sequence."""

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """These blocks were taken, to be reused; what they held isn't forgotten yet."""

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Each of these blocks got one more owner."""

    def note_released(self, blocks: Items[KVCacheBlock]) -> None:
        """Each of these blocks lost an owner, in this order."""

    def note_removed(self, digests: Items[bytes], cause: RemovalCause) -> None:
        """The prefixes of these digests are cached no more."""

    def note_clearing(self, runs: Iterable[Run]) -> None:
        """All that is cached, these runs, is about to be forgotten."""


class Watchers(Watcher):
    """Several watchers as one: each is told everything, in the order in which they began."""

    def __init__(self, watchers: list[Watcher]) -> None:
        self._watchers = watchers
        self.needs_takers = any(watcher.needs_takers for watcher in watchers)

    def note_taking(self, num_blocks: int, sequence_id: Hashable) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.note_taking(num_blocks, sequence_id)

    def note_taken(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.note_taken(blocks)

    def note_touched(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.note_touched(blocks)

    def note_released(self, blocks: Items[KVCacheBlock]) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.note_released(blocks)

    def note_removed(self, digests: Items[bytes], cause: RemovalCause) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.note_removed(digests, cause)

    def note_clearing(self, runs: Iterable[Run]) -> None:
        """Tell all."""
        for watcher in self._watchers:
            watcher.note_clearing(runs)


class EventLog:
    """Where it is recorded what gets cached in one place, and what is removed.

    medium: the place. storing: the id of the sequence whose blocks are getting cached, None: nobody's.
    """

    def __init__(self, medium: str) -> None:
        self.medium = medium
        self.storing: Hashable | None = None

    @abstractmethod
    def of_tier(self, medium: str) -> "EventLog | None":
        """Return the log of a tier, None: what happens there isn't recorded."""

    @abstractmethod
    def append(self, record: CacheEvent) -> None:
        """Add a record of a group beside the primary one."""

    @abstractmethod
    def note_stored(self, run: Run, base: int) -> None:
        """`run` has grown from `base` blocks to what it has now."""

    @abstractmethod
    def note_removed(self, names: Items[bytes]) -> None:
        """Prefixes are cached no more, a child before its parent."""

    @abstractmethod
    def note_cleared(self) -> None:
        """Nothing is cached any more."""


class Accounts(Watcher):
    """Who is charged for what is cached, and which blocks go first."""

    @property
    @abstractmethod
    def is_choosing(self) -> bool:
        """Whether it chooses what is taken next; else that is the first of the queue. O(1)."""

    @abstractmethod
    def account_of(self, extra_keys: bytes | None) -> Account | None:
        """Return who is charged for a prefix whose first block has these encoded keys, None if nobody is."""

    @abstractmethod
    def take_next(self, queue: FreeBlockQueue, max_blocks: int) -> list[KVCacheBlock]:
        """Take at least one and at most so many blocks off the queue, which isn't empty: those that are to go next.

        Blocks that hold nothing go before any other. `note_taken` follows, and what they hold is forgotten.
        """

    def note_detached(self, blocks: Items[KVCacheBlock]) -> None:
        """What these blocks held is cached no more, though nobody took them."""

    def note_passed(self, blocks: Items[KVCacheBlock]) -> None:
        """These blocks, of which `note_released` comes next, left a window: they go before other cached ones."""


class SoftHolds:
    """Owners of cached prefixes that aren't sequences."""

    @abstractmethod
    def find_refusal(self, num_blocks: int, touched: list[KVCacheBlock]) -> Refusal | None:
        """Return why `num_blocks` can't be had after `touched` are taken, None if they can: holds may give them up."""

    @abstractmethod
    def give_up(self, num_blocks: int) -> None:
        """Free so many blocks. `find_refusal` must have returned None."""

    @abstractmethod
    def extend(self, sequence: Sequence) -> None:
        """Hold what is lacking and this sequence, which is about to let go of blocks, may have."""

    @abstractmethod
    def drop_uncached(self) -> None:
        """Let go of what is cached no more."""

    @abstractmethod
    def tables(self) -> list[list[KVCacheBlock]]:
        """Return all that is held, each block as often as it is."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError unless all here agrees."""
