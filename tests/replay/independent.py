"""An independent simulator of a replay under LRU: what the production replay must agree with to the block.

It shares nothing with kvblocks: neither code, nor imports, nor data structures. It says in plain Python what a replay
under the policy "lru" means.

- A request has a chain of block ids: equal ids mean equal prefixes, so an id occurs once in a chain, and always behind
  the same id. It needs a block for each, and none for anything else.
- A request hits the longest beginning of its chain that is in the pool, whether it is held or free. What it does not
  hit is there from the moment of its admission on: a request that is admitted at the same time may hit it.
- It holds all its blocks from its admission until it ends, `seconds` after its admission.
- A block that two requests have is one block, and free when both have ended.
- When a request ends, its chain is freed from the end: of the blocks that nobody else holds, the last is the first to
  be reused. They are reused after all that was freed before.
- A request takes its hit first. For the rest it takes blocks that never held anything, and then the free ones in the
  order in which they are reused: what they held is lost.
- Requests that do not fit wait, first come, first served: nobody passes another. A request that is larger than the
  pool is refused at its arrival, and hits nothing.
- Of what happens at one time, ends come first, in the order of admission; then arrivals, in the order in which they
  became known: the trace's, and behind those whoever follows in a closed loop. Whoever waits is asked after each.
- In an open loop a request arrives at its `arrival`. In a closed loop that holds for the first one of a session, and
  each other one arrives its `think` after the one before it in its session has ended (or has been refused).
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """A request of a trace: whose, when (seconds), for how long, and its chain of block ids."""

    session: Hashable
    arrival: float
    think: float
    seconds: float
    chain: tuple[Hashable, ...]


@dataclass(frozen=True)
class Served:
    """The result of a request: hit blocks, and when it arrived, was admitted (None: refused) and ended."""

    num_hit: int
    arrived: float
    admitted: float | None
    ended: float


class Pool:
    """Blocks: `empty` by number, `free` (with contents) in the order of reuse, and how many owners `held` have."""

    def __init__(self, num_blocks: int) -> None:
        self.empty = num_blocks
        self.free: OrderedDict[Hashable, None] = OrderedDict()
        self.held: dict[Hashable, int] = {}

    def admit(self, ask: Ask) -> int | None:
        """Take what a request needs; returns how many blocks of its chain were there, None if it does not fit."""
        num_hit = 0
        while num_hit < len(ask.chain) and (ask.chain[num_hit] in self.free or ask.chain[num_hit] in self.held):
            num_hit += 1
        num_missing = len(ask.chain) - num_hit
        num_revived = sum(name in self.free for name in ask.chain[:num_hit])
        if num_missing > self.empty + len(self.free) - num_revived:
            return None
        for name in ask.chain[:num_hit]:
            self.free.pop(name, None)
        for _ in range(num_missing - self.empty):
            self.free.popitem(last=False)
        self.empty = max(0, self.empty - num_missing)
        for name in ask.chain:
            self.held[name] = self.held.get(name, 0) + 1
        return num_hit

    def release(self, ask: Ask) -> None:
        """Give back what a request holds."""
        for name in reversed(ask.chain):
            self.held[name] -= 1
            if not self.held[name]:
                del self.held[name]
                self.free[name] = None


def simulate(trace: Sequence[Ask], num_blocks: int, *, closed_loop: bool = False) -> list[Served]:
    """Return the result of each request of a trace, in the trace's order."""
    pool, served = Pool(num_blocks), dict[int, Served]()
    following = _followers(trace) if closed_loop else {}
    later = set(following.values())
    numbers = itertools.count()
    # Events: (time, kind, order within the kind, request); an end is of kind 0, an arrival of kind 1.
    first = sorted([(ask.arrival, number) for number, ask in enumerate(trace) if number not in later])
    events = [(arrival, 1, next(numbers), number) for arrival, number in first]
    waiting = deque[tuple[int, float]]()

    def follow(number: int, ended: float) -> None:
        if number in following:
            arrival = ended + trace[following[number]].think
            heapq.heappush(events, (arrival, 1, next(numbers), following[number]))

    while events:
        now, kind, _, number = heapq.heappop(events)
        if kind == 0:
            pool.release(trace[number])
            follow(number, now)
        elif len(trace[number].chain) > num_blocks:
            served[number] = Served(0, now, None, now)
            follow(number, now)
        else:
            waiting.append((number, now))
        while waiting and (num_hit := pool.admit(trace[waiting[0][0]])) is not None:
            number, arrived = waiting.popleft()
            ended = now + trace[number].seconds
            heapq.heappush(events, (ended, 0, next(numbers), number))
            served[number] = Served(num_hit, arrived, now, ended)
    return [served[number] for number in range(len(trace))]


def _followers(trace: Sequence[Ask]) -> dict[int, int]:
    """Return the next request of the same session, for each that has one."""
    last, following = dict[Hashable, int](), dict[int, int]()
    for number, ask in enumerate(trace):
        if ask.session in last:
            following[last[ask.session]] = number
        last[ask.session] = number
    return following
