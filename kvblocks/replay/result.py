"""What a replay finds out: plain dataclasses, which `to_json` turns into what JSON holds.

A block here is a block of the trace: `TraceFacts.block_size` tokens. A reference is one block of one request's prompt.
Shares are between 0.0 and 1.0 and times are seconds of the modelled clock.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What was replayed, after --block-size and --arrivals were applied."""

    name: str
    """The file's name, without its folders."""
    source_format: str
    """One of "mooncake", "sessions" and "kvblocks"."""
    num_requests: int
    num_sessions: int
    """Different sessions; requests without one count as a session each."""
    num_references: int
    """Blocks of all prompts together."""
    num_unique_blocks: int
    """Different blocks: what an infinite cache would hold at the end."""
    block_size: int
    """Tokens in a block."""
    duration_s: float
    """From the first arrival to the last, as the trace and --arrivals say."""
    infinite_hit_rate: float
    """Share of the references that are to a block that an earlier request had: what an infinite cache would hit."""
    num_other_tokens: int = 0
    """Prompt tokens outside full blocks, such as those of partial last blocks. No cache can save them."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """How it was replayed: with these options the same version finds the same numbers."""

    version: str
    """Of kvblocks."""
    compiled: bool
    """Whether kvblocks was compiled. The numbers are the same either way; the time that they take isn't."""
    python: str
    """The version of Python, such as "3.12.4"."""
    arrivals: str
    """What --arrivals said: "recorded", or "poisson": sessions begin at random, each keeps the times inside it."""
    mean_arrival_s: float | None
    """Mean time between two sessions' beginnings; None for recorded arrivals."""
    seed: int
    """Of the arrivals."""
    closed_loop: bool
    """Whether a session's next request comes its think time after the last one *ended*, not when the trace says."""
    groups: str | None
    """The model's groups of layers, such as "gemma3-4b"; None: full attention only."""
    host_blocks: int | None
    """Blocks of the host tier; None: there is none."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens of the requests that ran: prompt = computed + saved."""

    prompt: int
    computed: int
    saved: int
    """Not computed: found on the device or loaded from the host."""
    loaded: int = 0
    """Of those saved, loaded from the host tier."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Requests that did not fit when they came."""

    count: int
    """Requests that waited at all."""
    mean_s: float
    """Mean wait over all requests that ran, those that did not wait included."""
    p99_s: float
    """99th percentile, over the same."""
    max_s: float
    refused: int
    """Requests that are larger than the whole pool: they never ran, and their references are misses."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bar of a histogram: `count` values above the bucket before it, up to `upto`; None: without end."""

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
    """Cached before, and forgotten without anybody's need: what a policy drops, such as superseded blocks."""
    refused: int
    """Of requests that are larger than the pool, and blocks that only such a request had before."""
    window: int
    """Cached for layers of full attention, where the layers with windows had lost what the next token sees."""
    ages: list[Bucket]
    """For the three evicted kinds together: seconds from the eviction to the miss."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A bucket of time, as it was at its end."""

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
    """Of those cached, blocks that were hit since they were cached."""
    references: int
    """References of the requests admitted within the bucket."""
    hits: int
    """Those that were hit."""


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """The same run, but that no request waits: all are admitted when they come, as the trace and --arrivals say.

    One that doesn't fit is served outside the pool: it reads what is cached, leaves its first blocks in the pool, as
    many as fit, and holds none. The order is the same for all policies and sizes, so these numbers compare policies and
    nothing else.
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
    """Hit references of all references. Those loaded from a host tier count as hits too; see `device_hit_rate`."""
    device_hit_rate: float
    """Hit on the device."""
    bound: float
    """MIN with bypass on single blocks, for the order that this run realised: no policy can hit more in that order."""
    attainable: float | None
    """The best leaf-first schedule with holds that was found with the future known, at this size; the same for all
    policies. The better of two: requests that don't fit wait, or are served outside the pool (see `FixedOrder`).
    None: it was not asked for. Not a bound: another schedule may be better still."""
    tokens: Tokens
    waits: Waits
    misses: Misses
    moments: list[Moment]
    """The run over time, in at most 120 buckets of equal length."""
    fixed_order: FixedOrder | None
    """None: it was not asked for."""
    num_evicted: int
    num_policy_failures: int
    """How often the policy raised or named nothing of use."""
    wall_s: float
    """Seconds that the replay took, on the machine's clock, without the optima. The one number that varies."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of blocks that the same requests have, in the tree of all prompts; a node of an icicle picture."""

    depth: int
    """Blocks above it."""
    num_blocks: int
    """Blocks in the run. 0 for the root."""
    num_requests: int
    """Requests that have this run. Its references are num_blocks * num_requests."""
    num_sessions: int
    """Different sessions among them."""
    label: str
    """A name for people: the session that it belongs to if there is one only, else the number of sessions."""
    num_hidden_blocks: int = 0
    """Unique blocks below it that are in none of `children`, since the tree is bounded."""
    num_hidden_references: int = 0
    """The references to those."""
    children: list["PrefixNode"] = field(default_factory=list)
    """The largest first, by references in all of the subtree."""


@dataclass(frozen=True, slots=True)
class Result:
    """A sweep over policies and sizes."""

    trace: TraceFacts
    conditions: Conditions
    rows: list[Row]
    """By size, then by policy, as they were asked for."""
    prefixes: PrefixNode
    """The root of the prefix structure: at most 2,000 nodes in all, and at most 64 below one another."""

    def to_json(self) -> dict[str, Any]:
        """Return all of it as dicts, lists and numbers."""
        return asdict(self)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each row, as `--json` writes them: the row's fields, then `trace` and `conditions`."""
        trace, conditions = asdict(self.trace), asdict(self.conditions)
        return [asdict(row) | {"trace": trace, "conditions": conditions} for row in self.rows]
