"""The results of a replay: plain dataclasses. `to_json` turns them into what JSON can hold.

A block here is a block of the trace: `TraceFacts.block_size` tokens. A reference is one block of one request's prompt.
Shares are between 0.0 and 1.0. Times are seconds of the modelled clock.
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
    """Different sessions. A request without one counts as a session."""
    num_references: int
    """Blocks of all prompts together."""
    num_unique_blocks: int
    """Different blocks: what an infinite cache would hold at the end."""
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
    """The options of a replay. With the same options, the same version finds the same numbers."""

    version: str
    """Of kvblocks."""
    compiled: bool
    """Whether kvblocks was compiled. That changes the replay's speed, and no other number."""
    python: str
    """The version of Python, such as "3.12.4"."""
    arrivals: str
    """As --arrivals says: "recorded", or "poisson": sessions begin at random, and keep the times inside them."""
    mean_arrival_s: float | None
    """Mean time between the beginnings of two sessions; None for recorded arrivals."""
    seed: int
    """Of the arrivals."""
    closed_loop: bool
    """Whether a session sends its next request one think time after the last one *ended*, not when the trace says."""
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
    """Requests that did not fit when they came."""

    count: int
    """Requests that waited at all."""
    mean_s: float
    """Mean wait over all requests that ran; a request that did not wait counts as 0."""
    p99_s: float
    """99th percentile over the same requests."""
    max_s: float
    refused: int
    """Requests that are larger than the whole pool: they never ran, and their references are misses."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bar of a histogram: `count` values up to `upto` (None: no limit), and above the `upto` of the bar before."""

    upto: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Misses:
    """Where missed references come from: references = hits + the sum of the seven counts here."""

    first_time: int
    """Blocks that no request had before. No cache can hit them."""
    own_session: int
    """Cached before, and evicted to make room for a request of the same session."""
    other_session: int
    """Cached before, and evicted for another session of the same tenant."""
    other_tenant: int
    """Cached before, and evicted for another tenant."""
    dropped: int
    """Cached before, and given up without being evicted: dropped by the policy, such as superseded blocks."""
    refused: int
    """References of requests that are larger than the pool, and to blocks that only such a request had before."""
    window: int
    """Cached for layers with full attention, but layers with windows had lost what the next token sees."""
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
    """The same run, except that no request waits: all are admitted when they come, by the trace and --arrivals.

    A request that doesn't fit is served outside the pool. It reads what is cached, leaves as many of its first blocks
    in the pool as fit, and holds none. The order is the same for all policies and sizes. So these numbers compare
    policies and nothing else.
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
    """Hit references as a share of all. Those loaded from a host tier count as hits; see `device_hit_rate`."""
    device_hit_rate: float
    """Hit on the device."""
    bound: float
    """MIN with bypass on single blocks: an upper bound for any policy, for this run's order of requests."""
    attainable: float | None
    """The best schedule found that knows the future: leaf-first, with holds, at this size; the same for all policies.
    It is the better of two: requests that don't fit wait, or are served outside the pool (see `FixedOrder`). None: it
    was not asked for. It is not a bound: another schedule may be better."""
    tokens: Tokens
    waits: Waits
    misses: Misses
    moments: list[Moment]
    """The run over time, in at most 120 buckets of equal length."""
    fixed_order: FixedOrder | None
    """None: it was not asked for."""
    num_evicted: int
    num_policy_failures: int
    """How often the policy raised, or named no usable block."""
    wall_s: float
    """Seconds that the replay took by the machine's clock, without the optima. Only this number varies between runs."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of blocks that the same requests have, in the tree of all prompts; a node of an icicle picture."""

    depth: int
    """Blocks above it."""
    num_blocks: int
    """Blocks in the run. 0 for the root."""
    num_requests: int
    """Requests that have this run. It has num_blocks * num_requests references."""
    num_sessions: int
    """Different sessions among them."""
    label: str
    """A name for people: of the only session that it belongs to, else the number of sessions."""
    num_hidden_blocks: int = 0
    """Unique blocks below it that are in no child, since the tree's size is limited."""
    num_hidden_references: int = 0
    """The references to those blocks."""
    children: list["PrefixNode"] = field(default_factory=list)
    """The largest first, by the references in the whole subtree."""


@dataclass(frozen=True, slots=True)
class Result:
    """A sweep over policies and sizes."""

    trace: TraceFacts
    conditions: Conditions
    rows: list[Row]
    """By size, then by policy, in the order asked for."""
    prefixes: PrefixNode
    """The root of the prefix structure: at most 2,000 nodes, at most 64 deep."""

    def to_json(self) -> dict[str, Any]:
        """Return all of it as dicts, lists and numbers."""
        return asdict(self)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each row, as `--json` writes them: the row's fields, then `trace` and `conditions`."""
        trace, conditions = asdict(self.trace), asdict(self.conditions)
        return [asdict(row) | {"trace": trace, "conditions": conditions} for row in self.rows]
