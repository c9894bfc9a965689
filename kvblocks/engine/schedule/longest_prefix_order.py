"""Longest cached prefix first: the request that is cheapest to compute goes first, before its prefix is evicted.

The idea is SGLang's cache-aware scheduling. `AgingOrder` bounds how often a request is overtaken.
"""

from collections.abc import Sequence as Items

from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.order import AgingOrder
from kvblocks.engine.schedule.request import Request


class LongestPrefixOrder(AgingOrder):
    """Ranks candidates by the number of their tokens that the cache has at the step's beginning; ties by arrival.

    Cost: at most `num_candidates` lookups a step, and none for a single candidate. Prefixes that requests of the same
    step will cache don't count: a request that shares one waits for it or hits it anyway.
    """

    _num_cached_tokens: dict[Request, int]

    def start(self, candidates: Items[Request], lookups: Lookups) -> None:
        """Look the candidates up. O(their tokens), by memcmp."""
        ranked = [request for request in candidates if not request.was_admitted]
        self._num_cached_tokens = {
            request: lookups.find(request).num_tokens if len(ranked) > 1 else 0 for request in ranked
        }

    def choose(self, candidates: Items[Request]) -> Request:
        """Return the candidate with the longest cached prefix; ties go to the oldest. O(candidates)."""
        return max(candidates, key=self._num_cached_tokens.__getitem__)
