"""The interface of eviction policies: what a policy is told, what it may ask, and what it answers.

A policy is a plain class of the caller's; it derives from nothing here. docs/policies.md shows how to write one.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol


class FreeBlock(NamedTuple):
    """What a policy is told of a free cached block.

    depth: how many blocks come before it in its prefix. tenant: the salt, None for no salt. session: of the sequence
    that gave the block back last, even if a pin or a transfer held it after that; None: no session. num_hits: how often
    sequences have hit it since it was cached. others: the other sessions whose sequences gave it back since it was
    cached: the last 7, the latest last; None stands for sequences without a session.
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
        """The caller's clock, as last set; 0 before that. It need not be regular, and may even go back."""

    def digest(self, block_id: int) -> bytes | None:
        """Return the digest that names a block's prefix. It is the same each time that this prefix is cached.

        For blocks that the policy knows. In `remove` also for blocks that are evicted or reset, but not for those that
        are forgotten (`abort`, `evict_blocks`, `forget_salt`). None for other blocks. The first call for a block costs
        a hash, later ones O(1).
        """


class EvictionPolicy(Protocol):
    """Says which of the free cached blocks is evicted next. An exception in it does no harm: see docs/policies.md.

    It knows a block from `free` until the `use` or `remove` that follows. A later block with the same id may hold
    another prefix.
    """

    def free(self, blocks: list[FreeBlock]) -> None:
        """Cached blocks became free. They come in the queue's order: mostly one prefix, with its end first."""

    def use(self, block_ids: list[int]) -> None:
        """Blocks have an owner again: they were hit or pinned, or a transfer holds them."""

    def remove(self, block_ids: list[int]) -> None:
        """Blocks stopped being cached: they were evicted, whether or not this policy named them, or detached."""

    # A policy may also have these three calls: `begin(session, tenant)` when a session's request begins (`use` tells
    # what it hits), `pause(session, tenant, reason)` when the request has ended, and `end(session, tenant)` when the
    # session will have no more requests. docs/policies.md has more.

    def victim(self, num_blocks: int) -> int | None:
        """Return the id of the block to evict next, one that it knows; None: the least recently used.

        Blocks below it are evicted before it, last first. num_blocks: how many blocks are wanted. If the victim and the
        blocks below it are fewer, the policy is asked again.
        """


PolicyFactory = Callable[[CacheView], EvictionPolicy]
"""Makes a policy, such as its class. Called once for a pool, and once for each tenant that is over its quota."""
