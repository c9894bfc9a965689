"""vLLM's scheduler without a fault that kvblocks does not have.

Under the priority policy a request may be taken out of a step that it is already part of. vLLM has cached by then what
the request would have computed in that step, and leaves it cached. Whoever hits those blocks reads what nobody wrote.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class MendedScheduler(Scheduler):
    """Takes out of the cache what a preempted request has not computed."""

    def _preempt_request(self, request: Request, timestamp: float, *args: Any, **kwargs: Any) -> None:
        first = request.num_computed_tokens // self.block_size
        (block_ids,) = self.kv_cache_manager.get_block_ids(request.request_id)
        self.kv_cache_manager.evict_blocks(set(block_ids[first:]))
        super()._preempt_request(request, timestamp, *args, **kwargs)
