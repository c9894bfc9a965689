"""Soft resets."""

from .requests import RequestState, RequestStatus


class OffloadingManager:
    def __init__(self, cache, scheduler):
        self.cache, self.scheduler = cache, scheduler

    def offload_requests(self):
        starved, num_victims = self.scheduler.starved_requests, 0
        while starved and len(self.scheduler.active_requests) > 1:
            if sum(needed for _, needed in starved) <= self.cache.get_num_free_blocks():
                break
            state, _ = starved.pop()
            assert self.cache.blocks_in_use(state.request_id) >= 0
            assert not any(cm.block_table.get(state.request_id, []) for cm in self.cache.group_cache_managers)
            state.status = RequestStatus.FINISHED
            self.scheduler.finish_request(state.request_id)
            tokens = state.initial_tokens + state.generated_tokens
            again = RequestState(state.request_id, tokens, state.max_new_tokens - len(state.generated_tokens))
            again.num_children = state.num_children
            self.scheduler.waiting_requests[state.request_id] = again
            num_victims += 1
        return num_victims
