"""What an eviction policy is: what it is told, what it may ask, and the one answer that it gives.

A policy is the caller's plain class; it derives from nothing here. docs/policies.md shows how to write one.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol


class FreeBlock(NamedTuple):
    """A cached block that nobody owns, as a policy is told of it.

    depth: how many blocks come before it in its prefix. tenant: the salt, None for none. session: of the sequence that
    gave it back last, whoever held it after that; None if it has none. num_hits: how often sequences have hit it since
    it was cached. others: the other sessions whose sequences gave it back since it was cached, the last 7 of them, the
    last one last; None among them stands for those without a session.
    """

    block_id: int
    depth: int
    tenant: str | None
    session: Hashable | None
    num_hits: int
    others: tuple[Hashable, ...] = ()


class CacheView(Protocol):
    """What a policy may ask of the cache that it serves, at any time."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; for a tenant's own policy those of its quota, at least 1."""

    @property
    def now(self) -> float:
        """The time as the caller told it last, 0 before that. Nothing is promised of its steps, nor that it rises."""

    def digest(self, block_id: int) -> bytes | None:
        """Return the digest that names a block's prefix, the same each time that this prefix is cached.

        Of a block that `free` told of, and in `remove` still; None where nothing is known of it, or nothing any more.
        O(1) once it is known, which the first call for a block costs a hash.
        """


class EvictionPolicy(Protocol):
    """Says which of the free cached blocks is to go next. Its own exceptions harm nobody: see docs/policies.md.

    It knows a block between `free` and the `use` or `remove` that follows, and no longer: what comes with the same id
    later may hold something else.
    """

    def free(self, blocks: list[FreeBlock]) -> None:
        """Take note of cached blocks that nobody owns any more, in the order in which the queue has them.

        Of one prefix mostly, its end first.
        """

    def use(self, block_ids: list[int]) -> None:
        """Take note of blocks that somebody owns again: they were hit, pinned, or are held by a transfer."""

    def remove(self, block_ids: list[int]) -> None:
        """Take note of blocks that are cached no more: evicted, whoever named them, or forgotten."""

    # A policy may have these three as well, or leave them out: `begin(session, tenant)`, when a request of a session
    # begins (what it hits comes by `use`), `pause(session, tenant, reason)`, when that has come to its end, and
    # `end(session, tenant)`, when no other will come. docs/policies.md has more.

    def victim(self, num_blocks: int) -> int | None:
        """Return the id of the block that is to go next, of those that it knows; None: the least recently used.

        What is cached below it goes first, from the end. num_blocks: how many are wanted; it is asked again when fewer
        are below it.
        """


PolicyFactory = Callable[[CacheView], EvictionPolicy]
"""What makes a policy: its class, say. Called once for a pool, and once for each tenant that is over its quota."""
