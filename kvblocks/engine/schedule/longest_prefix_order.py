"""Longest cached prefix first: what is cheapest to compute goes first, before its prefix is evicted.

The idea is SGLang's cache-aware scheduling; the bound on how often a request is overtaken is `AgingOrder`'s.
"""

from collections.abc import Sequence as Items

from kvblocks.engine.schedule.lookups import Lookups
from kvblocks.engine.schedule.order import AgingOrder
from kvblocks.engine.schedule.request import Request


class LongestPrefixOrder(AgingOrder):
    """Ranks candidates by the number of their tokens that the cache has as the step begins; ties by arrival.

    Cost: at most `num_candidates` lookups a step, and none for a single candidate. Prefixes that requests of the same
    step bring are not counted: whoever shares one waits for it or hits it anyway.
    """

    _num_cached_tokens: dict[Request, int]

    def start(self, candidates: Items[Request], lookups: Lookups) -> None:
        """Look the candidates up. O(their tokens), by memcmp."""
        ranked = [request for request in candidates if not request.was_admitted]
        self._num_cached_tokens = {
            request: lookups.find(request).num_tokens if len(ranked) > 1 else 0 for request in ranked
        }

    def choose(self, candidates: Items[Request]) -> Request:
        """Return the one with the longest cached prefix, the oldest of several. O(candidates)."""
        return max(candidates, key=self._num_cached_tokens.__getitem__)
