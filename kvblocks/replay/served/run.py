"""A trace on a model of a server where a hit shortens a request, optionally behind a session gate or a cap.

The server computes in steps. A step takes `decode_step_s`, and 1 / `prefill_rate` for each token of a prompt that it
computes. It gives each running request whose prompt is computed one token of its answer, and computes prompts, first
come, first served. Tokens of both kinds together are at most `num_step_tokens`. Sessions begin at the given times. Each
waits its think time after a request ends before it sends the next one, so a delay also delays the later requests.

The cache is the production manager, or arrays that decide the same, with the trace's blocks as tokens, as in `run`.
Answers take no room. What a host tier has is loaded over one link, one request after another, before the rest of the
prompt is computed. Stores cost nothing.
"""

import heapq
from collections import deque
from dataclasses import asdict, dataclass
from math import ceil, inf
from typing import Any, Protocol

import numpy as np

from kvblocks import KVCacheManager, Sequence, Tier
from kvblocks.arguments import check_count, check_number, wrong
from kvblocks.gate import HOST_SHARE
from kvblocks.replay.arrays.pool import ArrayPool
from kvblocks.replay.arrays.released import Blocks
from kvblocks.replay.pools import has_own_blocks
from kvblocks.replay.run import followers
from kvblocks.replay.served.entrances import INFINITE, make_entrance
from kvblocks.replay.trace import Numbers, Trace

MOST_SHARE = 0.9
"""Sessions with a prompt that needs more than this share of the pool are left out."""


@dataclass(frozen=True, slots=True)
class ServerModel:
    """How fast the server is. prefill_rate: prompt tokens computed per second. Raises InvalidArgumentError.

    read_s: additional seconds of a step for each token in the context of a decoding request. load_rate: tokens loaded
    from a host tier per second. num_running: the most requests that run at once.
    """

    prefill_rate: float
    decode_step_s: float
    read_s: float = 0.0
    load_rate: float = 150_000.0
    num_step_tokens: int = 8192
    num_running: int = 256

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_step_s", "read_s", "load_rate"):
            value, may_be_zero = getattr(self, name), name == "read_s"
            expected = "a number of at least 0" if may_be_zero else "a number above 0"
            number = check_number(name, value, expected)
            if not 0 <= number < inf or (number == 0 and not may_be_zero):
                raise wrong(name, expected, value)
        check_count("num_step_tokens", self.num_step_tokens, 1)
        check_count("num_running", self.num_running, 1, self.num_step_tokens)


@dataclass(frozen=True, slots=True)
class Served:
    """The results of a run. load: the divisor of the times between sessions. entrance: its name, as in `make_entrance`.

    - delay: the seconds of a session from its beginning to its end, without its think times.
    - ttft: the seconds from a request's arrival to its first token.
    - computed_share: the share of the prompts' tokens that were computed.
    - recomputed_share: the share that was computed although an infinite cache would have had it.
    - longest_wait_s: the longest time from a request's arrival until it began to run.
    - num_paused: how often the gate took away a session's place during a pause.
    - num_left_out: the sessions with prompts that are too large for the pool (MOST_SHARE), left out with every
      entrance.
    """

    load: float
    entrance: str
    num_blocks: int
    num_sessions: int
    num_left_out: int
    delay_mean_s: float
    delay_p50_s: float
    delay_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    computed_share: float
    recomputed_share: float
    longest_wait_s: float
    num_paused: int
    hours: float

    def to_row(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return asdict(self)


class Cache(Protocol):
    """What a run needs of a cache. Requests are their numbers in the trace, and results are in blocks."""

    def find(self, request: int) -> int:
        """Return how many leading blocks of a prompt are cached."""
        ...

    def take(self, request: int) -> tuple[int, int] | None:
        """Give a request its blocks. Returns how many were found on the device and how many in the host tier.

        Returns None, with nothing changed, if there are too few.
        """
        ...

    def free(self, request: int) -> None:
        """Take a request's blocks back."""
        ...


class ManagerCache:
    """The production manager, with or without a host tier."""

    def __init__(self, trace: Trace, num_blocks: int, host_blocks: int | None = None) -> None:
        tiers = [] if host_blocks is None else [Tier("host", host_blocks, num_block_bytes=1)]
        self.manager = KVCacheManager(num_blocks, 1, tiers=tiers)
        self._trace = trace
        self._sequences: dict[int, Sequence | None] = {}

    def find(self, request: int) -> int:
        """Return how many leading blocks of a prompt are on the device. O(runs), or O(blocks) the first time."""
        sequence = self._sequence(request)
        return 0 if sequence is None else len(self.manager.get_computed_blocks(sequence).blocks)

    def take(self, request: int) -> tuple[int, int] | None:
        """Give a request its blocks. Returns how many were on the device and how many in the host tier. O(blocks)."""
        sequence, manager = self._sequence(request), self.manager
        if sequence is None:
            return 0, 0
        hit = manager.get_computed_blocks(sequence)
        if not len(manager.tiers):
            return None if manager.allocate_slots(sequence, hit=hit) is None else (len(hit.blocks), 0)
        if manager.get_num_blocks_to_allocate(sequence, sequence.num_tokens, hit=hit) > manager.num_free_blocks:
            return None
        loads = manager.tiers.find(hit)
        if manager.tiers.allocate(sequence, hit, loads, 0 if loads else None) is None:
            return None
        self._move()
        if sequence.num_computed_tokens < sequence.num_tokens and manager.allocate_slots(sequence) is None:
            raise AssertionError(f"{sequence}: there was room for it, and now {manager.last_refusal}")
        return len(hit.blocks), sum(load.num_tokens for load in loads)

    def free(self, request: int) -> None:
        """Take a request's blocks back. O(blocks)."""
        sequence = self._sequences.pop(request)
        if sequence is not None:
            self.manager.free(sequence)
            self._move()

    def _move(self) -> None:
        """Carry out all transfers at once."""
        tiers = self.manager.tiers
        while len(tiers):
            for transfer in tiers.take_transfers():
                tiers.complete(transfer, ok=True)
            if not tiers.is_busy:
                return

    def _sequence(self, request: int) -> Sequence | None:
        if request not in self._sequences:
            path, tenants = self._trace.blocks_of(request), self._trace.tenants
            salt = tenants[int(self._trace.sessions[request])]
            self._sequences[request] = Sequence(request, path, salt=salt) if len(path) else None
        return self._sequences[request]


class ArrayCache:
    """An `ArrayPool`, which gives the same results as the manager without a host tier, in a fraction of the time."""

    def __init__(self, trace: Trace, num_blocks: int) -> None:
        """Only for a trace that `has_own_blocks`."""
        self._trace = trace
        self._pool = ArrayPool(num_blocks, trace.num_unique_blocks)
        self._paths: dict[int, Blocks] = {}

    def find(self, request: int) -> int:
        """Return how many leading blocks of a prompt are cached. O(log blocks)."""
        return self._pool.find(self._path(request))

    def take(self, request: int) -> tuple[int, int] | None:
        """Give a request its blocks. Returns how many were cached, and 0 for the host tier. O(blocks), by NumPy."""
        path = self._path(request)
        num_hit = self._pool.find(path)
        return None if self._pool.take(path, num_hit, None, None) is None else (num_hit, 0)

    def free(self, request: int) -> None:
        """Take a request's blocks back. O(blocks), by NumPy."""
        self._pool.release(self._paths.pop(request), None, None)

    def _path(self, request: int) -> Blocks:
        path = self._paths.get(request)
        if path is None:
            path = self._paths[request] = self._trace.blocks_of(request).astype(np.intp)
        return path


def make_cache(trace: Trace, num_blocks: int, host_blocks: int | None) -> Cache:
    """Make the cache of a run: arrays if they can replace the manager."""
    if host_blocks is None and has_own_blocks(trace):
        return ArrayCache(trace, num_blocks)
    return ManagerCache(trace, num_blocks, host_blocks)


@dataclass(eq=False, slots=True)
class _Running:
    """A request that runs: prompt tokens to compute, tokens of its answer to come, and all tokens before those.

    ready_s: when its blocks are loaded.
    """

    request: int
    num_prefill: int
    num_decode: int
    num_context: int
    ready_s: float


class ServedRun:
    """One run of a trace on a server. Its cost grows with its steps and with all blocks of all prompts."""

    def __init__(
        self,
        trace: Trace,
        times: tuple[Numbers, Numbers],
        num_blocks: int,
        entrance: str,
        server: ServerModel,
        host_blocks: int | None = None,
    ) -> None:
        """times: when requests come, of which a session's first one counts, and the results of `think_times`.

        num_blocks: of the pool. host_blocks: of a host tier; None: there is none.
        """
        num_tokens = check_count("num_blocks", num_blocks, 1) * trace.block_size
        num_room = num_tokens + int(HOST_SHARE * (host_blocks or 0)) * trace.block_size
        self.trace, self.server, self.num_blocks = trace, server, num_blocks
        self.entrance_name, self.entrance = entrance, make_entrance(entrance, num_room, 1 / server.prefill_rate)
        most = max(1, trace.num_unique_blocks) if entrance == INFINITE else num_blocks
        self.cache = make_cache(trace, most, None if entrance == INFINITE else host_blocks)
        self.tokens: list[int] = trace.tokens.tolist()
        self.outputs: list[int] = np.maximum(trace.outputs, 1).tolist()
        self.sessions, self.thinks = trace.sessions.tolist(), np.nan_to_num(times[1]).tolist()
        self.followers = followers(trace)
        largest = np.zeros(len(trace.session_names), np.int64)
        np.maximum.at(largest, trace.sessions, trace.tokens + trace.outputs)
        self.is_left_out = (largest > MOST_SHARE * num_tokens).tolist()
        self.arrivals: list[tuple[float, int]] = []
        behind = {*self.followers.values()}
        for request, when in enumerate(times[0].tolist()):
            if request not in behind and not self.is_left_out[self.sessions[request]]:
                self.arrivals.append((when, request))
        heapq.heapify(self.arrivals)
        self.now = self.link_free_s = 0.0
        self.queue: deque[int] = deque()
        self.running: list[_Running] = []
        self.came: dict[int, float] = {}
        self.begun: dict[int, float] = {}
        self.thought: dict[int, float] = {}
        self.delays: list[float] = []
        self.ttfts: list[float] = []
        self.longest_wait_s = 0.0
        self.num_computed = self.num_prompted = self.num_again = 0
        self.was_seen = np.zeros(trace.num_unique_blocks, bool)

    def run(self) -> Served:
        """Run until all requests have ended."""
        while self.arrivals or self.queue or self.running or self.entrance.has_waiting:
            while self.arrivals and self.arrivals[0][0] <= self.now:
                self.arrive(*heapq.heappop(self.arrivals))
            self.queue.extend(self.entrance.let_in(len(self.running) + len(self.queue), self.now, self.num_cached))
            while self.queue and len(self.running) < self.server.num_running and self.admit(self.queue[0]):
                self.queue.popleft()
            next_s = self.arrivals[0][0] if self.arrivals else inf
            if self.entrance.wake_at is not None:
                next_s = min(next_s, self.entrance.wake_at)
            if self.running:
                self.step(next_s)
            else:
                assert next_s < inf, "something waits, and nothing would ever end that"
                self.now = max(self.now, next_s)
        delays, ttfts = np.array(self.delays or [0.0]), np.array(self.ttfts or [0.0])
        return Served(
            load=1.0,
            entrance=self.entrance_name,
            num_blocks=self.num_blocks,
            num_sessions=len(self.delays),
            num_left_out=sum(self.is_left_out),
            delay_mean_s=float(delays.mean()),
            delay_p50_s=float(np.quantile(delays, 0.5)),
            delay_p99_s=float(np.quantile(delays, 0.99)),
            ttft_p50_s=float(np.quantile(ttfts, 0.5)),
            ttft_p99_s=float(np.quantile(ttfts, 0.99)),
            computed_share=self.num_computed / max(1, self.num_prompted),
            recomputed_share=self.num_again / max(1, self.num_prompted),
            longest_wait_s=self.longest_wait_s,
            num_paused=self.entrance.num_left,
            hours=self.now / 3600,
        )

    def num_cached(self, request: int) -> int:
        """Return how many tokens of a prompt are cached now, without the last one, which is always computed."""
        return min(self.cache.find(request) * self.trace.block_size, self.tokens[request] - 1)

    def arrive(self, when: float, request: int) -> None:
        """Queue a request that came at `when`, during the last step, or let it wait at the entrance."""
        self.came[request] = when
        session = self.sessions[request]
        self.begun.setdefault(session, when)
        named = None if self.trace.session_names[session] is None else session
        tokens = self.tokens[request], self.num_cached(request)
        if self.entrance.ask(request, named, tokens, self.now):
            self.queue.append(request)

    def admit(self, request: int) -> bool:
        """Give a request its blocks. Returns False if there are too few."""
        found = self.cache.take(request)
        if found is None:
            assert self.running, "the pool is too small for a single prompt"
            return False
        num_tokens, block_size = self.tokens[request], self.trace.block_size
        num_loaded, num_blocks = found[1], sum(found)
        ready_s = self.now
        if num_loaded:
            ready_s = max(self.now, self.link_free_s) + num_loaded * block_size / self.server.load_rate
            self.link_free_s = ready_s
        num_computed = num_tokens - min(num_blocks * block_size, num_tokens - 1)
        self.running.append(_Running(request, num_computed, self.outputs[request], num_tokens, ready_s))
        self.num_computed += num_computed
        self.num_prompted += num_tokens
        missed = self.trace.blocks_of(request)[num_blocks:]
        self.num_again += int(self.was_seen[missed].sum()) * block_size
        self.was_seen[missed] = True
        self.longest_wait_s = max(self.longest_wait_s, self.now - self.came[request])
        return True

    def step(self, next_s: float) -> None:
        """Compute a step, or several equal ones at once, of which only the last may end anything or reach `next_s`."""
        decoding = [each for each in self.running if not each.num_prefill]
        most = budget = max(1, self.server.num_step_tokens - len(decoding))
        shares: list[tuple[_Running, int]] = []
        for each in self.running if len(decoding) < len(self.running) else ():
            if each.ready_s > self.now:
                next_s = min(next_s, each.ready_s)
            elif each.num_prefill and budget:
                shares.append((each, min(budget, each.num_prefill)))
                budget -= shares[-1][1]
        if not decoding and not shares:
            self.now = next_s
            return
        step_s = self.server.decode_step_s + (most - budget if shares else 0) / self.server.prefill_rate
        step_s += self.server.read_s * sum([each.num_context for each in decoding])
        num_steps = min([each.num_decode for each in decoding], default=1 << 60)
        if shares:
            num_steps = min(num_steps, max(1, shares[0][0].num_prefill // most) if len(shares) == 1 else 1)
        if next_s < inf:
            num_steps = min(num_steps, max(1, ceil((next_s - self.now) / step_s)))
        self.now += step_s * num_steps
        for each in decoding:
            each.num_decode -= num_steps
            each.num_context += num_steps
        for each, num_tokens in shares:
            each.num_prefill -= num_tokens * num_steps
            if not each.num_prefill:
                self.ttfts.append(self.now - self.came[each.request])
                each.num_decode -= 1
                each.num_context += 1
        ended = [each for each in self.running if each.num_decode <= 0 and not each.num_prefill]
        for each in ended:
            self.running.remove(each)
            self.end(each.request)

    def end(self, request: int) -> None:
        """End a request. Its session then thinks and sends the next one, or has ended."""
        self.cache.free(request)
        session, following = self.sessions[request], self.followers.get(request)
        num_tokens = self.tokens[request] + self.outputs[request]
        self.entrance.ended(request, num_tokens, self.trace.stops[request] or "unknown", self.now)
        if following is not None:
            think_s = self.thinks[following]
            self.thought[session] = self.thought.get(session, 0.0) + think_s
            heapq.heappush(self.arrivals, (self.now + think_s, following))
            return
        self.entrance.end_session(session)
        self.delays.append(self.now - self.begun[session] - self.thought.get(session, 0.0))
