"""What the cache has for requests that wait, looked up once for all who ask between two changes.

A server looks a request up when it comes, an order when it ranks it, and the scheduler when it admits it. As long as
the scheduler has changed nothing in between, all of them get the same hit. So nobody sees fewer cached tokens than a
lookup of his own would find. What others than the scheduler do can only take something away, a reset of the cache for
example; `allocate_slots` refuses a hit that has lost a block.
"""

from kvblocks.core.hit import CacheHit
from kvblocks.engine.schedule.request import Request
from kvblocks.manager import KVCacheManager


class Lookups:
    """The lookups of waiting requests in the cache of `manager`."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self._hits: dict[Request, CacheHit] = {}

    def find(self, request: Request) -> CacheHit:
        """Return the longest cached prefix of a request that holds no blocks. A lookup, or O(1) until `forget`."""
        hit = self._hits.get(request)
        if hit is None:
            most = request.max_hit_tokens
            look_up = self.manager.get_computed_blocks
            hit = look_up(request.sequence) if most is None else look_up(request.sequence, most)
            self._hits[request] = hit
        return hit

    def forget(self) -> None:
        """Look everything up anew from now on. Only for the scheduler, when it has changed something. O(hits)."""
        self._hits.clear()
