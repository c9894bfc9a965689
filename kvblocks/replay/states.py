"""How recurrent states affect the hit rate: a trace with several ways to keep them in the same memory.

This is for models whose layers keep one state per sequence (see docs/states.md). A state takes as much memory as
thousands of tokens of K and V, and a hit can end only where one was saved. So two things decide the hit rate: where
states are saved, and how memory is shared. `DESIGNS` has the combinations to compare.

Requests come one after another, in the order of their times, and hold nothing once their prompt is computed. Answers
take no room. The managers are the production ones, with the trace's lengths in tokens: each block of the trace becomes
as many equal tokens as it has, and the tokens after the last full block belong to their request alone.
"""

import platform
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any, NamedTuple

import numpy as np

import kvblocks
from kvblocks import CacheHit, FullAttention, KVCacheManager, RecurrentState, Sequence, __version__
from kvblocks.errors import InvalidArgumentError
from kvblocks.replay.result import TraceFacts
from kvblocks.replay.sweep import Progress, do_all
from kvblocks.replay.trace import Numbers, Trace, arrival_times

MAX_BLOCK_SIZE = 16
"""The most tokens in a block. The block size divides that of the trace."""

LARGER_BLOCK = 64
"""Tokens in a block that also has room for a small state."""

CHUNK_TOKENS = 8192
"""The number of tokens after which "dense" saves another state."""

SPLITS = {"split 5 %": 0.05, "split 15 %": 0.15, "split 47 %": 0.9 / 1.9}
"""The shares of memory that separate pools give to states. The last is SGLang's default: 0.9 parts to 1."""

IN_EACH = "in each "

DESIGNS: dict[str, str] = {
    "free states": "a state at each block, in no memory: the most that any design can hit, with this order of reuse",
    "kvblocks": "one pool; near the prompt's end and where prompts part, both rounded down",
    "exact": "one pool; exactly at the prompt's last full block and where prompts part",
    "dense": f"as kvblocks, and every {CHUNK_TOKENS:,} tokens",
    "large blocks": "one pool; blocks so large that a layer's state fits into one",
    "in each block": "no checkpoints: each block has room for the state at its end, and so fewer tokens fit",
    f"in each {LARGER_BLOCK}": f"the same with blocks of {LARGER_BLOCK} tokens",
    **dict.fromkeys(SPLITS, "two pools, of which states have this share; saved as by exact"),
}
"""The designs to compare: their names, and where states are and when they are saved."""


@dataclass(frozen=True, slots=True)
class StateModel:
    """A model's sizes. kv_bytes: the bytes of K and V of a token in all layers.

    state_bytes: those of a state in all layers. large_block: the tokens in a block of the design "large blocks", which
    is left out if this is None. Raises InvalidArgumentError.
    """

    kv_bytes: int
    state_bytes: int
    large_block: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("kv_bytes", self.kv_bytes), ("state_bytes", self.state_bytes)):
            if not 0 < value < 2**50:
                raise InvalidArgumentError(f"{name}: expected 1 to 2**50 bytes, got {value}")
        if self.large_block is not None and not 0 < self.large_block < 2**31:
            raise InvalidArgumentError(f"large_block: expected 1 to 2**31 tokens, got {self.large_block}")

    def state_blocks(self, block_size: int) -> int:
        """Return how many blocks a state takes."""
        return -(-self.state_bytes // (self.kv_bytes * block_size))

    def designs(self) -> list[str]:
        """Return the names of the designs that this model is replayed with.

        Designs with a state in each block are only included for states smaller than a block of 64 tokens.
        """
        is_small = self.state_bytes < self.kv_bytes * LARGER_BLOCK
        left_out = {"large blocks"} if self.large_block is None else set()
        return [name for name in DESIGNS if name not in left_out and (is_small or not name.startswith(IN_EACH))]


@dataclass(frozen=True, slots=True)
class StateOptions:
    """What to replay. sizes: bytes for K, V and saved states. mean_arrival_s, seed: as in `sweep.SweepOptions`."""

    model: StateModel
    sizes: tuple[int, ...]
    mean_arrival_s: float | None = None
    seed: int = 1


@dataclass(frozen=True, slots=True)
class StateJob:
    """A run: one design, one size."""

    design: str
    num_bytes: int

    @property
    def title(self) -> str:
        """The text of a progress bar."""
        return f"{self.design}, {self.num_bytes / 1e9:g} GB"


@dataclass(frozen=True, slots=True)
class StateRow:
    """The results of one run."""

    design: str
    num_bytes: int
    """The memory for K, V and saved states. Live states are in slots of their own, and don't count."""
    num_blocks: int
    """The blocks of the pool, or of the pool of K and V if states have a separate one."""
    block_size: int
    """Tokens in a block."""
    num_tokens: int
    """The tokens of all prompts."""
    num_hit: int
    """How many of them needn't be computed."""
    num_cached: int
    """How many of them had cached K and V, which are of no use after the last saved state."""
    hit_rate: float
    """num_hit as a share of num_tokens."""
    num_saved: int
    """The number of saved states."""
    num_without_room: int
    """The number of states that weren't saved, because too few blocks were free."""
    wall_s: float
    """The real seconds that the run took."""


@dataclass(frozen=True, slots=True)
class StateConditions:
    """The options of a replay. The same options give the same numbers, except for times."""

    version: str
    compiled: bool
    python: str
    mean_arrival_s: float | None
    seed: int
    kv_bytes: int
    state_bytes: int
    large_block: int | None


@dataclass(frozen=True, slots=True)
class StateResult:
    """A comparison of designs. rows: in the order of sizes, then of designs."""

    trace: TraceFacts
    conditions: StateConditions
    rows: list[StateRow]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dict for each row, as `--json` writes them: the row's fields, then `trace` and `conditions`."""
        trace, conditions = asdict(self.trace), asdict(self.conditions)
        return [asdict(row) | {"trace": trace, "conditions": conditions} for row in self.rows]


class StateWorkload:
    """A trace, and the order of its requests."""

    def __init__(self, trace: Trace, options: StateOptions) -> None:
        self.trace, self.options = trace, options
        self.arrivals = arrival_times(trace, options.mean_arrival_s, options.seed)
        self.order: list[int] = np.argsort(self.arrivals, kind="stable").tolist()
        self.block_size = gcd(trace.block_size, MAX_BLOCK_SIZE)
        self.first_own = trace.num_unique_blocks

    def do(self, job: StateJob, progress: Callable[[float], object]) -> StateRow:
        """Replay the trace with a design. O(tokens)."""
        cache = make_cache(job, self.options.model, self.block_size)
        begin = time.perf_counter()
        num_hit = num_cached = 0
        num_tokens = int(self.trace.tokens.sum())
        for number, request in enumerate(self.order):
            tokens, salt = self.tokens_of(request), self.trace.tenants[self.trace.sessions[request]]
            if len(tokens):
                hit, cached = cache.serve(request, tokens, salt)
                num_hit += hit
                num_cached += cached
            if number % 64 == 0:
                progress(number / len(self.order))
        return StateRow(
            design=job.design,
            num_bytes=job.num_bytes,
            num_blocks=cache.manager.num_blocks,
            block_size=cache.block_size,
            num_tokens=num_tokens,
            num_hit=num_hit,
            num_cached=num_cached,
            hit_rate=num_hit / max(1, num_tokens),
            num_saved=cache.num_saved,
            num_without_room=cache.num_without_room,
            wall_s=time.perf_counter() - begin,
        )

    def tokens_of(self, request: int) -> Numbers:
        """Return the tokens of a request's prompt: repeated numbers of its blocks, then its own number for the rest."""
        trace = self.trace
        blocks = np.repeat(trace.blocks_of(request), trace.block_size)
        own = [self.first_own + request] * (int(trace.tokens[request]) > len(blocks))
        return np.append(blocks, np.array(own, np.uint32))


class Prompt(NamedTuple):
    """A prompt to serve. found: the number of tokens with cached K and V. last: where its last full block ends.

    Both are before the prompt's last token, which is always computed, for its logits.
    """

    sequence: Sequence
    hit: CacheHit
    found: int
    last: int


class FreeStates:
    """The design "free states": a manager without states. room: how many of its blocks a prompt may take."""

    def __init__(self, manager: KVCacheManager, block_size: int, room: int) -> None:
        self.manager, self.block_size, self.room = manager, block_size, room
        self.num_saved = self.num_without_room = 0

    def serve(self, request: int, tokens: Numbers, salt: str | None) -> tuple[int, int]:
        """Compute a prompt. Return how many of its tokens are hit, and how many have cached K and V.

        If a prompt is larger than the pool, its beginning is cached.
        """
        sequence = Sequence(request, tokens[: self.room * self.block_size], salt=salt)
        hit = self.manager.get_computed_blocks(sequence)
        last = (min(len(tokens) - 1, sequence.num_tokens)) // self.block_size * self.block_size
        prompt = Prompt(sequence, hit, min(hit.num_matched_tokens, last), last)
        num_hit = self.compute(prompt)
        self.manager.free(sequence)
        return num_hit, prompt.found

    def compute(self, prompt: Prompt) -> int:
        """Give a prompt its blocks, and save states. Returns how many tokens are hit."""
        self.allocate(prompt, prompt.hit.num_tokens, prompt.sequence.num_tokens)
        return prompt.found

    def allocate(self, prompt: Prompt, start: int, end: int) -> None:
        """Make room for the tokens `start` to `end` - 1. There is enough, since nothing else runs."""
        hit = None if prompt.sequence.is_allocated else prompt.hit
        if self.manager.allocate_slots(prompt.sequence, end - start, hit) is None:
            raise AssertionError(f"{prompt.sequence}: expected room for it, got {self.manager.last_refusal}")


class OnePool(FreeStates):
    """The designs with states in the pool, saved where the manager says."""

    def compute(self, prompt: Prompt) -> int:
        """As in `FreeStates`."""
        states, start = self.manager.states, prompt.hit.num_tokens
        while start < prompt.sequence.num_tokens:
            end = self.next_cut(prompt, start)
            self.allocate(prompt, start, end)
            states.take_copies()
            start = end
        self.num_saved, self.num_without_room = states.stats.num_saved, states.stats.num_without_room
        return prompt.hit.num_tokens

    def next_cut(self, prompt: Prompt, start: int) -> int:
        """Return where the chunk that begins at `start` ends."""
        hit = prompt.hit if start == prompt.hit.num_tokens else None
        return self.manager.states.next_cut(prompt.sequence, prompt.sequence.num_tokens, hit)


class Exact(OnePool):
    """The designs "exact" and "large blocks": chunks end exactly where states are wanted, not at rounded positions."""

    def next_cut(self, prompt: Prompt, start: int) -> int:
        """As in `OnePool`."""
        behind = sorted([place for place in (prompt.found, prompt.last) if place > start])
        for place in behind:
            self.manager.states.mark(prompt.sequence, place)
        return behind[0] if behind else prompt.sequence.num_tokens


class TwoPools(FreeStates):
    """The designs with two pools: a manager for K and V, and a separate LRU pool for states."""

    def __init__(self, manager: KVCacheManager, block_size: int, room: int, num_states: int) -> None:
        super().__init__(manager, block_size, room)
        self.num_states = num_states
        self.states: OrderedDict[tuple[str | None, int, int], None] = OrderedDict()

    def compute(self, prompt: Prompt) -> int:
        """As in `FreeStates`."""
        num_hit, states = super().compute(prompt), self.states
        while num_hit and self.name(prompt, num_hit) not in states:
            num_hit -= self.block_size
        if num_hit:
            states.move_to_end(self.name(prompt, num_hit))
        for place in sorted({prompt.found, prompt.last}):
            if place > num_hit:
                states[self.name(prompt, place)] = None
                states.move_to_end(self.name(prompt, place))
                self.num_saved += 1
        while len(states) > self.num_states:
            states.popitem(last=False)
        return num_hit

    def name(self, prompt: Prompt, place: int) -> tuple[str | None, int, int]:
        """Return the name of the state at `place`. A trace's block number identifies everything before it."""
        tokens: Any = prompt.sequence.tokens
        return prompt.sequence.salt, tokens[place - 1], place


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """How a design divides memory between blocks of `block_size` tokens, of which a prompt may take `room`, and states.

    num_state_blocks: the blocks that a state takes in the pool, 0 if states aren't there. num_states: how many states a
    separate pool has.
    """

    block_size: int
    num_blocks: int
    num_state_blocks: int = 0
    num_states: int = 0

    @property
    def room(self) -> int:
        """The blocks that a prompt may take, which leaves room for the state that it hits."""
        return self.num_blocks - self.num_state_blocks


def shares_of(job: StateJob, model: StateModel, block_size: int) -> MemoryShares:
    """Return how a design divides memory. Raises InvalidArgumentError if one state and one block don't fit."""
    if job.design == "large blocks" and model.large_block is not None:
        block_size = model.large_block
    if job.design == f"{IN_EACH}{LARGER_BLOCK}":
        block_size = LARGER_BLOCK
    has_states = job.design.startswith(IN_EACH)
    block_bytes, part = model.kv_bytes * block_size + has_states * model.state_bytes, SPLITS.get(job.design, 0.0)
    num_blocks, num_states = (
        int(job.num_bytes * (1 - part) / block_bytes),
        int(job.num_bytes * part / model.state_bytes),
    )
    is_one_pool = not part and not has_states and job.design != "free states"
    shares = MemoryShares(block_size, num_blocks, model.state_blocks(block_size) if is_one_pool else 0, num_states)
    if shares.room < 1 or (part and not num_states):
        raise InvalidArgumentError(
            f"sizes: expected room for a block and a state by {job.design!r}, got {job.num_bytes:,} bytes"
        )
    return shares


def make_cache(job: StateJob, model: StateModel, block_size: int) -> FreeStates:
    """Make an empty cache of a design. Raises InvalidArgumentError as `shares_of` does."""
    shares = shares_of(job, model, block_size)
    size, room = shares.block_size, shares.room
    if not shares.num_state_blocks:
        manager = KVCacheManager(shares.num_blocks, size)
        return (
            TwoPools(manager, size, room, shares.num_states) if shares.num_states else FreeStates(manager, size, room)
        )
    every = CHUNK_TOKENS // size * size if job.design == "dense" and size <= CHUNK_TOKENS else None
    kinds = [FullAttention(size), RecurrentState(size, 1, shares.num_state_blocks, every=every)]
    kind = OnePool if job.design in ("kvblocks", "dense") else Exact
    return kind(KVCacheManager(shares.num_blocks, groups=kinds), size, room)


def compare_states(
    trace: Trace, options: StateOptions, num_processes: int | None = None, progress: Progress | None = None
) -> StateResult:
    """Replay a trace with all designs and sizes. num_processes: None: one per core.

    Raises InvalidArgumentError before anything runs. Ctrl-C ends all processes, and raises KeyboardInterrupt.
    """
    workload, model = StateWorkload(trace, options), options.model
    jobs = [StateJob(design, size) for size in options.sizes for design in model.designs()]
    if not jobs:
        raise InvalidArgumentError("sizes: expected some, got none")
    for job in jobs:
        shares_of(job, model, workload.block_size)
    found = do_all(workload, jobs, num_processes, progress)
    conditions = StateConditions(
        version=__version__,
        compiled=kvblocks.__compiled__,
        python=platform.python_version(),
        mean_arrival_s=options.mean_arrival_s,
        seed=options.seed,
        kv_bytes=model.kv_bytes,
        state_bytes=model.state_bytes,
        large_block=model.large_block,
    )
    return StateResult(trace.facts(workload.arrivals), conditions, [found[job] for job in jobs])
