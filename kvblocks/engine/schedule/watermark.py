"""The watermark: the blocks that stay free when a request is admitted, so that running requests can grow.

Without it, a request is admitted to a nearly full pool, preempted a few tokens later, admitted again, and computed anew
each time. So while others run, a request is admitted only if some blocks then stay free for tokens that will be
generated. All known tokens count as taken: the request's own that aren't cached, and those of running requests that
have no slots yet.

Cached blocks that somebody owns cost a request nothing. Free blocks that it hits stop being free, so they count. All
other free blocks are available, cached or not, so a pool full of free cached blocks counts as empty. The idea is vLLM
v0's watermark; with chunked prefill the whole prompt must count, not only its first chunk.
"""

from collections.abc import Iterable

from kvblocks import CacheHit, KVCacheManager
from kvblocks.engine.schedule.capacity import blocks_of, count_blocks
from kvblocks.engine.schedule.request import Request


class Watermark:
    """How much of the pool one step's admissions may use. share: the share of the pool to leave free.

    num_step_tokens: the most tokens that a step computes of a request; layers with a window hold blocks accordingly.
    Running requests are counted when the first request asks for admission. O(running requests).
    """

    def __init__(self, manager: KVCacheManager, running: Iterable[Request], share: float, num_step_tokens: int) -> None:
        self._manager = manager
        self._groups = manager.groups
        self._num_step_tokens = num_step_tokens
        self._num_reserved_blocks = int(share * manager.num_blocks + 1e-6)  # 0.29 of 100 is 29
        self._num_promised_blocks = 0
        self._uncounted = [*running]
        self._is_alone = not self._uncounted

    def admits(self, request: Request, hit: CacheHit) -> bool:
        """Whether a waiting request with this hit leaves enough blocks free. True if nothing runs.

        O(blocks of the hit + groups of each running request that hasn't been counted yet).
        """
        if self._is_alone or not self._num_reserved_blocks:
            return True
        self._num_promised_blocks += sum([self._num_missing_blocks(running) for running in self._uncounted])
        self._uncounted.clear()
        found = blocks_of(self._manager, hit)
        num_new = max(0, self._num_blocks(request) - len(found))
        num_hit_free = sum([not block.ref_cnt for block in found])
        num_left = self._manager.num_free_blocks - self._num_promised_blocks - num_new - num_hit_free
        return num_left >= self._num_reserved_blocks

    def note(self, request: Request) -> None:
        """Note that a request runs from now on, with the blocks that it has. O(1)."""
        self._is_alone = False
        self._uncounted.append(request)

    def _num_missing_blocks(self, request: Request) -> int:
        """How many more blocks a running request needs for the rest of its prompt. O(groups)."""
        sequence = request.sequence
        groups = range(len(self._groups))
        num_held = sum([len(sequence.group_block_ids(group)) - sequence.first_live_block(group) for group in groups])
        return max(0, self._num_blocks(request) - num_held)

    def _num_blocks(self, request: Request) -> int:
        """Blocks for all known tokens, and one more in each group for each other sample of the prompt."""
        num_blocks = count_blocks(self._groups, request.sequence.num_tokens, self._num_step_tokens)
        return num_blocks + len(request.siblings) * len(self._groups)
