"""Counters of a manager, as plain values: frozen records of a moment."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot; counts are since the manager was made.

    num_queries, num_hits: sequences that were allocated from the start, and those of them that came with a hit.
    num_queried_tokens, num_hit_tokens: their tokens, and those that needed no computing. num_taken_blocks: blocks
    handed out. num_evicted_blocks: blocks that stopped being cached because they were handed out. num_blocks,
    num_free_blocks, num_cached_blocks: of the pool, now; free and cached overlap. num_limited_tokens: that were
    computed although the primary group had them cached, since another group hadn't; 0 with one group.
    num_eviction_failures: how often an eviction policy raised, or named no block that it had been told of.
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
        """Share of the queries that came with a hit, 0.0 to 1.0; 0.0 before the first one."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0

    @property
    def usage(self) -> float:
        """Share of the pool that sequences and pins hold, 0.0 to 1.0."""
        return 1.0 - self.num_free_blocks / self.num_blocks


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """What sequences of one salt have cached, and how much of it they may keep while others want the space."""

    salt: str | None
    max_cached_blocks: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class TierPart:
    """Tokens first_token to end_token - 1 of a prompt, which a tier has behind what comes before them.

    num_blocks_ahead: slots of the tier that are reused before the first of those that this takes, as things stand.
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
    """What a KV-cache group uses: blocks that sequences hold, each once, and blocks that are cached, free or not."""

    group: int
    num_owned_blocks: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the pool could not serve a call: it needed `num_blocks`, and had `num_free_blocks` free ones.

    num_given_blocks: those that pins would have given up. num_kept_blocks: those that only pins hold and would not.
    """

    num_blocks: int
    num_free_blocks: int
    num_given_blocks: int
    num_kept_blocks: int

    @property
    def is_due_to_pins(self) -> bool:
        """Whether it could have been served without pins."""
        return self.num_blocks <= self.num_free_blocks + self.num_given_blocks + self.num_kept_blocks


@dataclass(frozen=True, slots=True)
class PinUsage:
    """All pins together.

    num_pins: those that haven't ended. num_wanted_blocks: what they are for, and what the budget counts.
    num_held_blocks: what they protect now, counted once for each pin. num_pinned_blocks: blocks that any protects.
    """

    num_pins: int
    num_wanted_blocks: int
    num_held_blocks: int
    num_pinned_blocks: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what was moved since the manager was made.

    num_stored_blocks, num_loaded_blocks: whose bytes arrived. num_failed_blocks: of transfers that failed.
    num_dropped_blocks: that were to be stored, and were not: their KV had left the device or the cache before, or the
    tier had no room; a wish that was dropped for a newer one counts as one block. num_evicted_blocks: that made room
    for others. num_moving_blocks: slots that transfers own now, with those of the prefixes that they extend.
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
    """Queries, hits and their tokens, as in `CacheStats`, over some stretch of time."""

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
        """Share of the queries that came with a hit, 0.0 to 1.0; 0.0 if there are none."""
        return self.num_hits / self.num_queries if self.num_queries else 0.0

    @property
    def mean_match_length(self) -> float:
        """Mean number of tokens a query that needed no computing, queries without a hit included; 0.0 without any."""
        return self.num_hit_tokens / self.num_queries if self.num_queries else 0.0

    @property
    def mean_hit_length(self) -> float:
        """The same of the queries that came with a hit; 0.0 without any."""
        return self.num_hit_tokens / self.num_hits if self.num_hits else 0.0

    def plus(self, other: "HitCounts", sign: int = 1) -> "HitCounts":
        """Return the sum, or with sign -1 the difference."""
        return HitCounts(
            self.num_queries + sign * other.num_queries,
            self.num_hits + sign * other.num_hits,
            self.num_queried_tokens + sign * other.num_queried_tokens,
            self.num_hit_tokens + sign * other.num_hit_tokens,
        )


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """Counts of values by upper bounds, and their sum.

    bounds: ascending; a value counts for the first one that isn't below it. counts: one more than bounds, the last for
    values above them all; not cumulative.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        """Values recorded."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Their mean, None if there are none."""
        return self.total / self.num_values if self.num_values else None


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """What `CacheMetrics` knows at a moment.

    time: of the snapshot; like all ages and durations here, in `time_unit`: blocks taken from the pool, or seconds.
    stats: since the manager was made. window: the last requests. quotas: as `manager.quotas()`.
    num_sampled_blocks: blocks whose lives are watched; the rest is about them. lifetimes, idle_times, reuse_gaps: see
    `BlockSampler`. last_idle_time: of the block that was evicted last, None before the first. queue_age: how long the
    block has been free that was released first of those that still are, None if there is none. tiers: as
    `manager.tiers`, the quickest first.
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
        """Return it as nested dicts, lists and numbers, with the rates, for JSON. Salts are in it as they are."""
        values = asdict(self)
        values["quotas"], values["tiers"] = list(values["quotas"]), list(values["tiers"])
        for name in ("lifetimes", "idle_times", "reuse_gaps"):
            values[name] |= {key: list(values[name][key]) for key in ("bounds", "counts")}
        values["stats"] |= {"hit_rate": self.stats.hit_rate, "request_hit_rate": self.stats.request_hit_rate}
        values["stats"]["usage"] = self.stats.usage
        values["window"] |= {"hit_rate": self.window.hit_rate, "request_hit_rate": self.window.request_hit_rate}
        return values
