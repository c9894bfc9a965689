"""In which order waiting requests are admitted.

In each step an order yields candidates, best first, and the scheduler admits them until the step is full. A request
that was admitted before, and was preempted or was in a step that failed, comes first in any order: it is at the front
of the queue, since it has waited already.

`FirstCome` is the order of arrival. `AgingOrder` is the base of cache-aware orders. They rank only the first
`num_candidates` of the queue, so that a step costs the same however many requests wait. No request is overtaken more
than `max_overtakes` times: after that it is overdue, and no later request is admitted before it, whatever its rank. An
overdue request doesn't wait for a prefix that another request computes.
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
    """The interface of an order of admission."""

    def candidates(self, waiting: deque[Request], lookups: Lookups) -> Iterator[Request]:
        """Yield requests of `waiting`, best first. The scheduler may admit a request before it takes the next one.

        lookups: finds the requests' hits, and has the manager. Changes only the order's own state.
        """

    def is_overdue(self, request: Request) -> bool:
        """Whether no other request may be admitted before this one. O(1)."""

    def note_admitted(self, request: Request) -> None:
        """Note that a request was admitted. O(1)."""


class FirstCome:
    """First come, first served. A candidate costs O(1), plus the requests before it that were passed over."""

    def candidates(self, waiting: deque[Request], lookups: Lookups) -> Iterator[Request]:  # noqa: ARG002
        """As `Order`."""
        index = 0
        while index < len(waiting):
            request = waiting[index]
            yield request
            if not request.sequence.is_allocated:  # passed over
                index += 1

    def is_overdue(self, request: Request) -> bool:  # noqa: ARG002
        """Always False: others pass a request only while the prefix that it waits for is being computed."""
        return False

    def note_admitted(self, request: Request) -> None:
        """Do nothing."""


class AgingOrder(ABC):
    """An order by rank in which no request starves.

    num_candidates: how many requests are ranked, from the front of the queue. max_overtakes: how many later requests
    may be admitted before a request; 0 is the order of arrival. Raises InvalidArgumentError.
    """

    def __init__(self, *, num_candidates: int = 32, max_overtakes: int = 16) -> None:
        self.num_candidates = check_count("num_candidates", num_candidates, 1)
        self.max_overtakes = check_count("max_overtakes", max_overtakes, 0)

    def candidates(self, waiting: deque[Request], lookups: Lookups) -> Iterator[Request]:
        """As `Order`. O(num_candidates) for each candidate, plus the costs of `start` and `choose`."""
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
        """Prepare for a step with these candidates."""

    @abstractmethod
    def choose(self, candidates: Items[Request]) -> Request:
        """Return the best of `candidates`, which come in the order of arrival."""

    def note_admitted(self, request: Request) -> None:  # noqa: B027
        """As `Order`."""
