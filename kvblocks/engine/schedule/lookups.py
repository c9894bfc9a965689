"""Lookups of waiting requests, shared by all callers until the scheduler changes something.

A server looks up a request when it arrives, an order when it ranks the request, and the scheduler when it admits the
request. All of them get the same hit as long as the scheduler has changed nothing, so no caller sees fewer cached
tokens than a lookup of its own would find. Others than the scheduler can only remove cached blocks, for example by a
reset, and `allocate_slots` refuses a hit that has lost a block.
"""

from kvblocks import CacheHit, KVCacheManager
from kvblocks.engine.schedule.request import Request


class Lookups:
    """The lookups of waiting requests in the cache of `manager`."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self._hits: dict[Request, CacheHit] = {}

    def find(self, request: Request) -> CacheHit:
        """Return the longest cached prefix of a request that holds no blocks. One lookup; then O(1) until `forget`."""
        hit = self._hits.get(request)
        if hit is None:
            most = request.max_hit_tokens
            look_up = self.manager.get_computed_blocks
            hit = look_up(request.sequence) if most is None else look_up(request.sequence, most)
            self._hits[request] = hit
        return hit

    def forget(self) -> None:
        """Forget all hits. Only the scheduler calls this, when it has changed something. O(hits)."""
        self._hits.clear()
