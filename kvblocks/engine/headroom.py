"""The watermark: what admitting a request leaves free, so that those who run can grow before anybody is preempted.

Without it a pool that is nearly full admits a request, preempts it a few tokens later, admits it again, and computes it
anew each time. So a request is admitted beside others only if the pool then still has some blocks free for what is not
known yet, the tokens that will be generated, counting as taken what is known: all tokens of the request that aren't
cached, and what the running ones have yet to get slots for.

What is cached costs a request nothing as long as somebody holds it. Free blocks that it hits stop being free, and are
counted; all other free blocks can be had, whatever they cache, so a pool full of cached blocks is an empty one.
The share left free is vLLM v0's watermark; counting the whole prompt, not its first chunk, is what chunks need.
"""

from collections.abc import Iterable

from kvblocks.cache_hit import CacheHit
from kvblocks.engine.request import Request
from kvblocks.manager import KVCacheManager


class Headroom:
    """What one step's admissions may use of a pool of which `share` is to stay free. O(running requests)."""

    def __init__(self, manager: KVCacheManager, running: Iterable[Request], share: float) -> None:
        self._manager = manager
        self._num_reserved_blocks = int(share * manager.num_blocks + 1e-6)  # 0.29 of 100 is 29
        self._num_promised_blocks = 0
        self._is_alone = True
        for request in running:
            self.note(request)

    def admits(self, request: Request, hit: CacheHit) -> bool:
        """Whether a waiting request with this hit leaves enough free. Always, if nobody runs. O(blocks of the hit)."""
        if self._is_alone or not self._num_reserved_blocks:
            return True
        num_new = self._num_blocks(request) - len(hit.blocks)
        num_hit_free = sum([not block.ref_cnt for block in hit.blocks])
        num_left = self._manager.num_free_blocks - self._num_promised_blocks - num_new - num_hit_free
        return num_left >= self._num_reserved_blocks

    def note(self, request: Request) -> None:
        """Count a running request, with the blocks that it has: the rest of its prompt will need more. O(1)."""
        self._is_alone = False
        self._num_promised_blocks += max(0, self._num_blocks(request) - len(request.sequence.blocks))

    def _num_blocks(self, request: Request) -> int:
        """Blocks for all tokens that are known, and one more for each other sample of the prompt."""
        return -(-request.sequence.num_tokens // self._manager.block_size) + len(request.siblings)
