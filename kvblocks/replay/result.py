"""The results of a replay, as plain dataclasses. `to_json` converts them to JSON values.

A block here is a block of the trace: `TraceFacts.block_size` tokens. A reference is one block of one request's prompt.
Shares are from 0.0 to 1.0. Times are in seconds of the modelled clock.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """The trace as it was replayed, after --block-size and --arrivals were applied."""

    name: str
    """The file's name, without its folders."""
    source_format: str
    """One of "mooncake", "sessions" and "kvblocks"."""
    num_requests: int
    num_sessions: int
    """The number of different sessions. A request without one counts as a session."""
    num_references: int
    """Blocks of all prompts together."""
    num_unique_blocks: int
    """The number of different blocks, which an infinite cache would hold at the end."""
    block_size: int
    """Tokens in a block."""
    duration_s: float
    """From the first arrival to the last, by the trace and --arrivals."""
    infinite_hit_rate: float
    """Share of references to a block that an earlier request had. An infinite cache would hit these."""
    num_other_tokens: int = 0
    """Prompt tokens outside full blocks, such as those of partial last blocks. No cache can save them."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The options of a replay. The same options and version give the same numbers."""

    version: str
    """The version of kvblocks."""
    compiled: bool
    """Whether kvblocks was compiled, which changes the replay's speed but no other number."""
    python: str
    """The version of Python, such as "3.12.4"."""
    arrivals: str
    """By --arrivals: "recorded", or "poisson", where sessions begin at random and keep their inner times."""
    mean_arrival_s: float | None
    """Mean time between the beginnings of two sessions; None for recorded arrivals."""
    seed: int
    """The seed of the arrivals."""
    closed_loop: bool
    """Whether a session sends each request one think time after the previous one *ended*, not when the trace says."""
    groups: str | None
    """The model's groups of layers, such as "gemma3-4b"; None: full attention only."""
    host_blocks: int | None
    """Blocks of the host tier; None: no host tier."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens of the requests that ran: prompt = computed + saved."""

    prompt: int
    computed: int
    saved: int
    """Tokens that were not computed: found on the device or loaded from the host."""
    loaded: int = 0
    """Of the saved tokens, those loaded from the host tier."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The waits of requests that did not fit when they came."""

    count: int
    """The number of requests that waited at all."""
    mean_s: float
    """The mean wait over all requests that ran, where a request that did not wait counts as 0."""
    p99_s: float
    """The 99th percentile over the same requests."""
    max_s: float
    refused: int
    """The number of requests larger than the whole pool. They never ran, and their references are misses."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bar of a histogram: `count` values above the previous bar's `upto` and up to this `upto` (None: no limit)."""

    upto: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Misses:
    """The causes of missed references: references = hits + the sum of the seven counts here."""

    first_time: int
    """Blocks that no request had before. No cache can hit them."""
    own_session: int
    """Cached before, and evicted to make room for a request of the same session."""
    other_session: int
    """Cached before, and evicted for another session of the same tenant."""
    other_tenant: int
    """Cached before, and evicted for another tenant."""
    dropped: int
    """Cached before, and dropped by the policy without an eviction, such as superseded blocks."""
    refused: int
    """References of requests that are larger than the pool, or to blocks that only such requests had before."""
    window: int
    """Cached for layers with full attention, while layers with windows had lost what the next token sees."""
    ages: list[Bucket]
    """For the three evicted kinds together: seconds from the eviction to the miss."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state at the end of a bucket of time."""

    time_s: float
    """The end of the bucket."""
    live_sessions: int
    """Sessions whose first request has come and whose last one has not ended."""
    running_requests: int
    waiting_requests: int
    held_blocks: int
    """Blocks that running requests own."""
    cached_blocks: int
    """Blocks that hold a prefix, owned or not."""
    used_blocks: int
    """Cached blocks that were hit since they were cached."""
    references: int
    """References of the requests admitted within the bucket."""
    hits: int
    """Those of the references that were hit."""


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """The same run without waiting: all requests are admitted when they come, by the trace and --arrivals.

    A request that doesn't fit is served outside the pool. It reads what is cached, leaves as many of its leading blocks
    in the pool as fit, and holds none. The order is the same for all policies and sizes, so these numbers compare only
    policies.
    """

    hit_rate: float
    bound: float
    """As `Row.bound`, for this order."""
    attainable: float | None
    """As `Row.attainable`, for this order."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run: one policy, one size."""

    policy: str
    num_blocks: int
    """Blocks of the device's pool."""
    share: float
    """num_blocks as a share of the trace's unique blocks."""
    hit_rate: float
    """The share of references that were hit. Those loaded from a host tier count as hits; see `device_hit_rate`."""
    device_hit_rate: float
    """The share of references that were hit on the device."""
    bound: float
    """An upper bound for any policy, given this run's order of requests: MIN with bypass on single blocks."""
    attainable: float | None
    """The hit rate of the best schedule found that knows the future (leaves first, with holds) at this size; the same
    for all policies.

    It is the better of two, in which requests that don't fit wait, or are served outside the pool (see `FixedOrder`).
    It is not a bound: another schedule may be better. None if it was not asked for.
    """
    tokens: Tokens
    waits: Waits
    misses: Misses
    moments: list[Moment]
    """The run over time, in at most 120 buckets of equal length."""
    fixed_order: FixedOrder | None
    """None if it was not asked for."""
    num_evicted: int
    num_policy_failures: int
    """How often the policy raised or named no usable block."""
    wall_s: float
    """Real seconds that the replay took, without the optima. Only this number varies between runs."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A node of the tree of all prompts, for an icicle picture: a run of blocks that the same requests have."""

    depth: int
    """The number of blocks above it."""
    num_blocks: int
    """Blocks in the run. 0 for the root."""
    num_requests: int
    """Requests that have this run. It has num_blocks * num_requests references."""
    num_sessions: int
    """The number of different sessions among them."""
    label: str
    """A readable name: the only session that it belongs to, or else the number of sessions."""
    num_hidden_blocks: int = 0
    """Unique blocks below it that are in no child, because the tree's size is limited."""
    num_hidden_references: int = 0
    """The references to those blocks."""
    children: list["PrefixNode"] = field(default_factory=list)
    """The children, by the references in the whole subtree, the largest first."""


@dataclass(frozen=True, slots=True)
class Result:
    """A sweep over policies and sizes."""

    trace: TraceFacts
    conditions: Conditions
    rows: list[Row]
    """One row per size and policy, in the order asked for."""
    prefixes: PrefixNode
    """The root of the prefix structure: at most 2,000 nodes, at most 64 deep."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as dicts, lists and numbers."""
        return asdict(self)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each row, as `--json` writes them: the row's fields, then `trace` and `conditions`."""
        trace, conditions = asdict(self.trace), asdict(self.conditions)
        return [asdict(row) | {"trace": trace, "conditions": conditions} for row in self.rows]
