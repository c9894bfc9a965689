"""In which order waiting requests are admitted.

An order is asked in each step for candidates, best first, and the scheduler admits them until the step is full. Whoever
was admitted before (preempted since, or of a step that died) comes first in any order: it has waited its turn, and
stands in front of the queue.

`FirstCome` is the order of arrival. `AgingOrder` is what cache-aware orders have in common: they rank the first
`num_candidates` of the queue only, so that a step costs the same however many wait, and nobody is overtaken more than
`max_overtakes` times. That bound is exact: a request that was overtaken so often is overdue, and no later one is
admitted before it, whatever its rank; not even while somebody computes the prefix that it would otherwise wait for.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import islice
from typing import Protocol

from kvblocks.arguments import check_count
from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.request import Request


class Order(Protocol):
    """What the scheduler asks of an order."""

    def candidates(self, waiting: deque[Request], lookups: Lookups) -> Iterator[Request]:
        """Yield requests of `waiting`, best first. Between two of them the last one may have been admitted.

        lookups: of the requests, and the manager. Changes nothing but the order's own memory.
        """

    def is_overdue(self, request: Request) -> bool:
        """Whether no other may be admitted before this one any more. O(1)."""

    def note_admitted(self, request: Request) -> None:
        """Take note that a request was admitted. O(1)."""


class FirstCome:
    """First come, first served. O(1) a candidate, but for those that are passed over."""

    def candidates(self, waiting: deque[Request], lookups: Lookups) -> Iterator[Request]:  # noqa: ARG002
        """As `Order`."""
        index = 0
        while index < len(waiting):
            request = waiting[index]
            yield request
            if not request.sequence.is_allocated:  # passed over
                index += 1

    def is_overdue(self, request: Request) -> bool:  # noqa: ARG002
        """Nobody is: others pass only those who wait for a prefix, as long as that is being computed."""
        return False

    def note_admitted(self, request: Request) -> None:
        """As `Order`: it doesn't matter here."""


class AgingOrder(ABC):
    """An order by rank in which nobody starves.

    num_candidates: how many of the queue are ranked, from its front. max_overtakes: how many later arrivals may be
    admitted before a request; 0 is the order of arrival. Raises InvalidArgumentError.
    """

    def __init__(self, *, num_candidates: int = 32, max_overtakes: int = 16) -> None:
        self.num_candidates = check_count("num_candidates", num_candidates, 1)
        self.max_overtakes = check_count("max_overtakes", max_overtakes, 0)

    def candidates(self, waiting: deque[Request], lookups: Lookups) -> Iterator[Request]:
        """As `Order`. O(num_candidates) a candidate, beside what `start` and `choose` cost."""
        untried = list(islice(waiting, self.num_candidates))
        self.start(untried, lookups)
        window = untried[:]
        while window:
            first = next((r for r in window if self.is_overdue(r) or (r.was_admitted and r in untried)), None)
            if first is None and not untried:
                return
            request = first or self.choose(untried)
            if request in untried:
                untried.remove(request)
            yield request
            if request.sequence.is_allocated:
                window.remove(request)

    def is_overdue(self, request: Request) -> bool:
        """As `Order`."""
        return request.num_overtakes >= self.max_overtakes

    def start(self, candidates: Items[Request], lookups: Lookups) -> None:  # noqa: B027
        """Get ready for a step with these candidates."""

    @abstractmethod
    def choose(self, candidates: Items[Request]) -> Request:
        """Return the best of `candidates`, which are in order of arrival."""

    def note_admitted(self, request: Request) -> None:  # noqa: B027
        """As `Order`."""
