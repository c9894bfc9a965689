"""A manager's counters, as frozen records of plain values."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A manager's counters at one moment, counted since the manager was made.

    - num_queries: allocations of sequences that held no blocks.
    - num_hits: those of them that had a hit.
    - num_queried_tokens: the tokens of all these sequences.
    - num_hit_tokens: the tokens among them that needed no computing.
    - num_taken_blocks: blocks handed out.
    - num_evicted_blocks: blocks that stopped being cached because they were handed out.
    - num_blocks, num_free_blocks, num_cached_blocks: blocks in the pool now; a block may be both free and cached.
    - num_limited_tokens: tokens that were computed although the primary group had them cached, because another group
      hadn't; 0 with one group.
    - num_eviction_failures: how often an eviction policy raised, or named a block that it had not been told of.
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
    num_limited_tokens: int = 0
    num_eviction_failures: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that needed no computing, 0.0 to 1.0; 0.0 before the first query."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0

    @property
    def request_hit_rate(self) -> float:
        """Share of the queries that had a hit, 0.0 to 1.0; 0.0 before the first query."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0

    @property
    def usage(self) -> float:
        """Share of the pool that has an owner, 0.0 to 1.0."""
        return 1.0 - self.num_free_blocks / self.num_blocks


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """How many blocks the sequences of one salt have cached, and how many they may keep while others want the space."""

    salt: str | None
    max_cached_blocks: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class TierPart:
    """A part of a prompt that a tier has: the KV of tokens first_token to end_token - 1.

    num_blocks_ahead: how many other slots the tier would reuse, as things stand, before the first slot of this part.
    """

    tier: str
    first_token: int
    end_token: int
    num_blocks_ahead: int

    def __str__(self) -> str:
        until = f"until about {self.num_blocks_ahead} more blocks are stored there"
        return f"tokens {self.first_token} to {self.end_token - 1} are on {self.tier!r} {until}"


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """What a KV-cache group uses: blocks that sequences own, each counted once, and cached blocks, owned or free."""

    group: int
    num_owned_blocks: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the pool could not serve a call, which needed `num_blocks` blocks when `num_free_blocks` were free.

    num_given_blocks: blocks that pins would have given up. num_kept_blocks: blocks that only pins own and that they
    would not have given up. reason: "blocks", or "slots" if there was no free slot for a recurrent state, however many
    blocks were free.
    """

    num_blocks: int
    num_free_blocks: int
    num_given_blocks: int
    num_kept_blocks: int
    reason: Literal["blocks", "slots"] = "blocks"

    @property
    def is_due_to_pins(self) -> bool:
        """Whether the call could have been served without pins."""
        most = self.num_free_blocks + self.num_given_blocks + self.num_kept_blocks
        return self.reason == "blocks" and self.num_blocks <= most


@dataclass(frozen=True, slots=True)
class StateStats:
    """What happened to recurrent states since the manager was made.

    Copies to slots that the engine took: num_cleared (for new sequences), num_restored (from checkpoints) and
    num_forked (for forks).

    num_saved: checkpoints that later hits could find. The other counters are saves that were wanted but skipped:

    - num_without_room: too few blocks were free.
    - num_present: another sequence had already saved that state.
    - num_taken_back: the prefix was no longer cached, for example after another sequence's abort or a reset.
    - num_passed: a chunk ran past the place instead of ending there, as `manager.states.next_cut` proposed.
    """

    num_cleared: int
    num_restored: int
    num_forked: int
    num_saved: int
    num_without_room: int
    num_present: int
    num_taken_back: int
    num_passed: int


@dataclass(frozen=True, slots=True)
class PinUsage:
    """All pins together.

    num_pins: pins that haven't ended. num_wanted_blocks: blocks of the prefixes that they are for, which the budget
    limits. num_held_blocks: blocks that they hold now; a block in two pins counts twice. num_pinned_blocks: the same,
    with each block counted once.
    """

    num_pins: int
    num_wanted_blocks: int
    num_held_blocks: int
    num_pinned_blocks: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what was moved since the manager was made.

    - num_blocks: slots of the tier. num_cached_blocks: slots whose contents lookups can find.
    - num_stored_blocks, num_loaded_blocks: blocks whose bytes arrived.
    - num_failed_blocks: blocks of transfers that failed.
    - num_dropped_blocks: blocks that were not stored as intended, because their KV had left the device or the cache
      before, or the tier had no room. A request that was dropped for a newer one counts as one block.
    - num_evicted_blocks: blocks that made room for others.
    - num_moving_blocks: slots that transfers own now, including slots of the prefixes that these transfers extend.
    """

    name: str
    num_blocks: int
    num_cached_blocks: int
    num_stored_blocks: int
    num_loaded_blocks: int
    num_failed_blocks: int
    num_dropped_blocks: int
    num_evicted_blocks: int
    num_moving_blocks: int


@dataclass(frozen=True, slots=True)
class HitCounts:
    """Queries, hits and their tokens, as in `CacheStats`, over a period of time."""

    num_queries: int = 0
    num_hits: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that needed no computing, 0.0 to 1.0; 0.0 if there are none."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0

    @property
    def request_hit_rate(self) -> float:
        """Share of the queries that had a hit, 0.0 to 1.0; 0.0 if there are none."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0

    @property
    def mean_match_length(self) -> float:
        """Mean number of hit tokens per query, including queries without a hit; 0.0 if there are none."""
        return self.num_hit_tokens / self.num_queries if self.num_queries else 0.0

    @property
    def mean_hit_length(self) -> float:
        """Mean number of hit tokens per query that had a hit; 0.0 if there are none."""
        return self.num_hit_tokens / self.num_hits if self.num_hits else 0.0

    def plus(self, other: "HitCounts", sign: int = 1) -> "HitCounts":
        """Return the sum, or the difference with sign -1."""
        return HitCounts(
            self.num_queries + sign * other.num_queries,
            self.num_hits + sign * other.num_hits,
            self.num_queried_tokens + sign * other.num_queried_tokens,
            self.num_hit_tokens + sign * other.num_hit_tokens,
        )


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """A histogram: counts of values by upper bounds, and the sum of the values.

    bounds: ascending; a value counts for the smallest bound that isn't less than it. counts: one for each bound, and a
    last one for larger values; not cumulative. total: the sum.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        """How many values were recorded."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The mean of the values; None if there are none."""
        return self.total / self.num_values if self.num_values else None


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """What `CacheMetrics` knows at one moment.

    - time: when the snapshot was taken. It is in `time_unit`, like all ages and durations here: blocks taken from the
      pool, or seconds.
    - stats: counters since the manager was made.
    - window: hits of the latest requests.
    - quotas: as `manager.quotas`. tiers: as `manager.tiers`, the fastest first.
    - num_sampled_blocks: blocks whose lives are recorded. The following fields are about these blocks.
    - lifetimes, idle_times, reuse_gaps: see `BlockSampler`.
    - last_idle_time: that of the block evicted last; None before the first eviction.
    - queue_age: how long the free block that was released first has been free; None if no sampled block is free.
    """

    time: float
    time_unit: Literal["blocks", "seconds"]
    stats: CacheStats
    window: HitCounts
    pins: PinUsage
    quotas: tuple[QuotaUsage, ...]
    num_sampled_blocks: int
    lifetimes: HistogramValues
    idle_times: HistogramValues
    reuse_gaps: HistogramValues
    last_idle_time: float | None
    queue_age: float | None
    tiers: tuple[TierStats, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the snapshot as nested dicts, lists and numbers for JSON, with the rates. Salts are not hidden."""
        values = asdict(self)
        values["quotas"], values["tiers"] = list(values["quotas"]), list(values["tiers"])
        for name in ("lifetimes", "idle_times", "reuse_gaps"):
            values[name] |= {key: list(values[name][key]) for key in ("bounds", "counts")}
        values["stats"] |= {"hit_rate": self.stats.hit_rate, "request_hit_rate": self.stats.request_hit_rate}
        values["stats"]["usage"] = self.stats.usage
        values["window"] |= {"hit_rate": self.window.hit_rate, "request_hit_rate": self.window.request_hit_rate}
        return values
