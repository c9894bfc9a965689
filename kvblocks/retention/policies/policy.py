"""The interface of eviction policies: what a policy is told, what it may ask, and what it answers.

A policy is a plain class that derives from nothing here. docs/policies.md shows how to write one.
"""

from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, Protocol

MAX_SESSIONS: Final = 8
"""How many sessions, the latest ones, are remembered for a block. More would tell a policy nothing new."""


class FreeBlock(NamedTuple):
    """What a policy is told about a free cached block.

    - block_id: the block's id, by which the policy names it.
    - depth: how many blocks come before it in its prefix.
    - tenant: the salt; None for no salt.
    - session: that of the sequence that released the block last, even if a pin or a transfer held it after that; None:
      no session.
    - num_hits: how often sequences have hit it since it was cached.
    - others: up to 7 other sessions whose sequences released it since it was cached, the latest last. An entry None
      stands for sequences without a session.
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
        """How many blocks the pool has; for a tenant's own policy, its quota, at least 1."""

    @property
    def now(self) -> float:
        """The caller's clock, as last set; 0 before that. It need not advance regularly, and may even go back."""

    def digest(self, block_id: int) -> bytes | None:
        """Return the digest that names a block's prefix. It is the same each time that this prefix is cached.

        It works for blocks that the policy knows and, in `remove`, for blocks that are evicted or reset, but not for
        those that are forgotten (`abort`, `evict_blocks`, `forget_salt`). For other blocks it returns None. The first
        call for a block costs a hash, later ones O(1).
        """


class EvictionPolicy(Protocol):
    """Says which of the free cached blocks is evicted next. An exception in it does no harm: see docs/policies.md.

    A policy knows a block from `free` until the `use` or `remove` that follows. A later block with the same id may hold
    another prefix.
    """

    def free(self, blocks: list[FreeBlock]) -> None:
        """Cached blocks became free. They come in the order of the queue: usually one prefix, with its end first."""

    def use(self, block_ids: list[int]) -> None:
        """Blocks have an owner again, because they were hit or pinned, or a transfer holds them."""

    def remove(self, block_ids: list[int]) -> None:
        """Blocks stopped being cached: they were evicted, whether or not this policy named them, or detached."""

    # A policy may also have three more methods: `begin(session, tenant)` when a session's request begins (`use` tells
    # what it hits), `pause(session, tenant, reason)` when the request has ended, and `end(session, tenant)` when the
    # session will have no more requests. See docs/policies.md.

    def victim(self, num_blocks: int) -> int | None:
        """Return the id of the block to evict next, which the policy must know; None: the least recently used one.

        The blocks below it are evicted before it, last first. num_blocks: how many blocks are wanted. If the victim and
        the blocks below it are fewer than that, the policy is asked again.
        """


PolicyFactory = Callable[[CacheView], EvictionPolicy]
"""Makes a policy; usually its class. Called once for a pool, and once for each tenant that is over its quota."""
