"""Counters of a manager, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot; counts are since the manager was made.

    num_queries, num_hits: sequences that were allocated from the start, and those of them that came with a hit.
    num_queried_tokens, num_hit_tokens: their tokens, and those that needed no computing. num_taken_blocks: blocks
    handed out. num_evicted_blocks: blocks that stopped being cached because they were handed out. num_blocks,
    num_free_blocks, num_cached_blocks: of the pool, now; free and cached overlap.
    """

    num_queries: int
    num_hits: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_taken_blocks: int
    num_evicted_blocks: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that needed no computing, 0.0 to 1.0; 0.0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """What sequences of one salt have cached, and how much of it they may keep while others want the space."""

    salt: str | None
    max_cached_blocks: int
    num_cached_blocks: int
