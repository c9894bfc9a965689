"""The best schedule that can be computed with knowledge of the future: leaves first, and with holds.

A request holds its blocks from admission until it ends, as in `run`. The evicted block is the free one whose next
request comes last. A request that needs a block needs all blocks before it, so a block is never needed sooner than the
one before it. If times are equal, the deeper block goes first. So leaves go before the blocks above them, and blocks
that are never needed again go at once.

This is not an upper bound: with holds, it can be better to evict a block that is needed sooner.
"""

import heapq
from collections import deque
from dataclasses import replace

import numpy as np

from kvblocks.replay.bound import next_uses_in
from kvblocks.replay.trace import Numbers, Trace

_NEVER = np.iinfo(np.int64).max


class KnownFuture:
    """A pool of blocks, and for each block the next request that needs it.

    NumPy handles the blocks. Free blocks are kept in stretches, which are pieces of a prompt with the same next
    request.
    """

    def __init__(self, trace: Trace, num_blocks: int, needed: Numbers) -> None:
        """needed: for each reference of the trace, when the block's next request comes, or _NEVER."""
        self._trace, self._num_blocks, self._needed_by_reference = trace, num_blocks, needed
        num_unique = trace.num_unique_blocks
        self._is_cached = np.zeros(num_unique, bool)
        self._owners = np.zeros(num_unique, np.int64)
        self._needed = np.full(num_unique, _NEVER, np.int64)
        self._stretch = np.full(num_unique, -1, np.int64)  # the stretch that a free block is in
        self._free: list[tuple[int, int, int, Numbers]] = []
        self._num_stretches = self._num_owned = self._num_cached = 0

    def num_hit(self, path: Numbers) -> int:
        """Return how many blocks of a prompt are cached. These are its leading ones, since leaves go first."""
        return int(np.count_nonzero(self._is_cached[path]))

    def num_room(self, path: Numbers) -> int:
        """Return how many blocks would be free after admitting this prompt; negative if it doesn't fit."""
        return self._num_blocks - self._num_owned - len(path) + int(np.count_nonzero(self._owners[path]))

    def admit(self, request: int, path: Numbers, start: int = 0) -> None:
        """Give a request blocks of its prompt, for which there must be room. path: its blocks from index `start` on."""
        num_missing = len(path) - self.num_hit(path)
        self._num_owned += len(path) - int(np.count_nonzero(self._owners[path]))
        self._owners[path] += 1
        self._stretch[path] = -1
        first = self._trace.ends[request] + start
        self._needed[path] = self._needed_by_reference[first : first + len(path)]
        self._evict(self._num_cached + num_missing - self._num_blocks)
        self._is_cached[path] = True
        self._num_cached += num_missing

    def admit_in_part(self, request: int, path: Numbers) -> Numbers:
        """Give a request whose prompt doesn't fit as many leading blocks as is worthwhile. Returns those.

        It takes those that are cached, and further ones as long as each is needed sooner than the block that would be
        evicted.
        """
        end = self.num_hit(path)
        self.admit(request, path[:end])
        first = self._trace.ends[request]
        needed = self._needed_by_reference[first : first + len(path)]
        most = min(len(path) + self.num_room(path[end:]), int((needed != _NEVER).sum()))
        while end < most:
            wanted = self._num_blocks - self._num_cached  # blocks that hold nothing
            if not wanted:
                furthest, depth, name, stretch = heapq.heappop(self._free)
                blocks = stretch[self._stretch[stretch] == name]
                wanted = min(len(blocks), int(np.searchsorted(needed, -furthest)) - end)
                if len(blocks):
                    heapq.heappush(self._free, (furthest, depth, name, blocks))
                    if wanted <= 0:
                        break
            new_end = min(most, end + wanted)
            self.admit(request, path[end:new_end], end)
            end = new_end
        return path[:end]

    def end(self, path: Numbers) -> None:
        """Take a request's blocks back."""
        self._owners[path] -= 1
        freed = path[self._owners[path] == 0]
        self._num_owned -= len(freed)
        needed = self._needed[freed]
        num_needed = int(np.count_nonzero(needed != _NEVER))
        self._is_cached[freed[num_needed:]] = False
        self._num_cached -= len(freed) - num_needed
        edges = np.flatnonzero(np.diff(needed[:num_needed])) + 1
        for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), num_needed], strict=True):
            if begin < end:
                self._push(int(needed[begin]), len(path) - len(freed) + begin, freed[begin:end])

    def _push(self, needed: int, depth: int, blocks: Numbers) -> None:
        self._num_stretches += 1
        self._stretch[blocks] = self._num_stretches
        heapq.heappush(self._free, (-needed, -depth, self._num_stretches, blocks))

    def _evict(self, number: int) -> None:
        """Evict so many free blocks; none for 0 or less."""
        while number > 0:
            needed, depth, name, stretch = heapq.heappop(self._free)
            blocks = stretch[self._stretch[stretch] == name]
            taken = blocks[max(0, len(blocks) - number) :]
            self._is_cached[taken] = False
            self._stretch[taken] = -1
            self._num_cached -= len(taken)
            number -= len(taken)
            if len(taken) < len(blocks):
                heapq.heappush(self._free, (needed, depth, name, blocks[: len(blocks) - len(taken)]))


def attainable_hits(
    trace: Trace, arrivals: Numbers, num_blocks: int, *, never_waits: bool, thinks: Numbers | None = None
) -> int:
    """Return how many references this schedule hits. never_waits: as in `Setup`.

    thinks: the result of `think_times`, for a closed loop. What is needed next then follows from the times at which
    requests would come if none waited. O(references), by NumPy, and O(log) for each stretch.
    """
    from kvblocks.replay.run import followers

    trace = replace(trace, blocks=trace.blocks.astype(np.intp))  # an index of this type costs NumPy no conversion
    following = followers(trace) if thinks is not None else {}
    durations = np.nan_to_num(trace.durations, nan=0.0)
    times = arrivals if thinks is None else closed_times(arrivals, thinks, durations, following)
    order = np.argsort(times, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    pool = KnownFuture(trace, num_blocks, needed_ranks(trace, order))
    behind = {*following.values()}
    events = [(float(times[r]), 1, int(rank[r]), int(r)) for r in order.tolist() if r not in behind]
    heapq.heapify(events)
    waiting: deque[int] = deque()
    owned: dict[int, Numbers] = {}
    num_hits = 0
    while events:
        now, kind, _, request = heapq.heappop(events)
        if kind == 0:
            pool.end(owned.pop(request))
            follower = following.get(request)
            if follower is not None and thinks is not None:
                heapq.heappush(events, (now + float(thinks[follower]), 1, int(rank[follower]), follower))
        else:
            waiting.append(request)
        while waiting:
            request = waiting[0]
            path = trace.blocks_of(request)
            room = pool.num_room(path)
            hits = pool.num_hit(path)
            if room < 0:
                if not never_waits and owned:
                    break
                if never_waits:
                    pool.end(pool.admit_in_part(request, path))
                else:
                    hits = 0  # the prompt is larger than the pool, so it never runs
                path = path[:0]
            else:
                pool.admit(request, path)
            waiting.popleft()
            num_hits += hits
            owned[request] = path
            heapq.heappush(events, (now + float(durations[request]), 0, int(rank[request]), request))
    return num_hits


def needed_ranks(trace: Trace, order: Numbers) -> Numbers:
    """Return, for each reference in the order of the trace, the rank of the next request with the same block."""
    lengths = np.diff(trace.ends)
    uses = next_uses_in(trace, order.tolist())
    ranks = np.repeat(np.arange(len(order)), lengths[order])
    needed = np.where(uses >= 0, ranks[uses], _NEVER)
    found = np.empty(len(needed), np.int64)
    ends = np.cumsum(lengths[order])
    for request, end in zip(order.tolist(), ends.tolist(), strict=True):
        found[trace.ends[request] : trace.ends[request + 1]] = needed[end - lengths[request] : end]
    return found


def closed_times(arrivals: Numbers, thinks: Numbers, durations: Numbers, following: dict[int, int]) -> Numbers:
    """Return when requests would come in a closed loop if none waited."""
    times = arrivals.copy()
    for request in range(len(times)):  # a session's requests are in order
        follower = following.get(request)
        if follower is not None:
            times[follower] = times[request] + durations[request] + thinks[follower]
    return times
