"""Fairness in the queue: tenants, told apart by their salts, take turns.

The queue consists of rounds, and a salt has one request in each round. So if a tenant queues many requests at once,
other tenants' requests come between them. A new request joins the round after that of its salt's last waiting request,
or the round after the current one if that is later. The current round takes no new requests, so it always ends, and
nobody starves. Requests of one salt keep the order of arrival unless they have priorities. Priorities only distribute
the places of one salt among its own requests, so they never delay requests of another salt.

Turns decide the place in the queue and nothing else. Orders and overtakes go by that place.
"""

from collections import deque

from kvblocks.engine.schedule.request import Request


class Turns:
    """Finds the places of new requests in a queue."""

    def __init__(self) -> None:
        self._admitted = 0  # the latest round of which a request was admitted

    def place(self, request: Request, waiting: deque[Request]) -> None:
        """Put a new request in its place in the queue, and set its `round`.

        O(requests after the last one of its salt), so O(1) if all have one salt. O(requests) if its priority puts it
        before another request of its salt.
        """
        salt = request.sequence.salt
        before = next((other for other in reversed(waiting) if other.sequence.salt == salt), None)
        own = 0 if before is None else before.round
        first = next((other.round for other in waiting if not other.was_admitted), self._admitted)
        request.round = max(own, min(first, self._admitted)) + 1
        index = len(waiting)
        while index and waiting[index - 1].round > request.round:
            index -= 1
        waiting.insert(index, request)
        if before is not None and before.priority > request.priority:
            _order_by_priority(salt, waiting)

    def note_admitted(self, request: Request) -> None:
        """Note that a request was admitted. O(1)."""
        self._admitted = max(self._admitted, request.round)


def _order_by_priority(salt: str | None, waiting: deque[Request]) -> None:
    """Give the places, and rounds, of a salt's new requests to them in the order of their priorities."""
    places = [place for place, one in enumerate(waiting) if one.sequence.salt == salt and not one.was_admitted]
    rounds = [waiting[place].round for place in places]
    in_order = sorted([waiting[place] for place in places], key=lambda one: one.priority)
    for place, number, request in zip(places, rounds, in_order, strict=True):
        request.round = number
        waiting[place] = request
