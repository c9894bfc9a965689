"""The scheduler: what decodes, then prompts."""

from .requests import FutureRequestState, RequestStatus


class Scheduler:
    def __init__(self, cache, safety_margin=None):
        self.cache, self.safety_margin = cache, safety_margin or 0.0
        self.active_requests, self.waiting_requests = {}, {}
        self._requests_to_fork, self.starved_requests = [], []

    def finish_request(self, request_id):
        self.cache.free_blocks(request_id)
        self.active_requests.pop(request_id, None)

    def _allocate_blocks_if_needed(self, state, len_next_tokens):
        occupancy = state.allocated_blocks * self.cache.block_size - state.current_len()
        allocated = self.cache.allocate_blocks(occupancy, state.request_id, state.allocated_blocks)
        self.starved_requests.append((state, self.cache.blocks_needed(occupancy, state.allocated_blocks)))
        return allocated is not None

    def _infer_request_tokens(self, state):
        if self.cache.use_prefix_sharing and state.status == RequestStatus.PENDING:
            prefill_length = self.cache.search_prefix_match(state.request_id, state.remaining_prefill_tokens)
            if prefill_length > 0:
                self.active_requests[state.request_id] = self.waiting_requests.pop(state.request_id)
                state.status = RequestStatus.PREFILLING
                state.remaining_prefill_tokens = state.remaining_prefill_tokens[prefill_length:]
                state.position_offset += prefill_length
        return state.tokens_to_process if state.status == RequestStatus.DECODING else state.remaining_prefill_tokens

    def _schedule_request(self, state, request_tokens, token_budget):
        if state.num_children > 0 and token_budget >= len(request_tokens) - 1:
            token_budget = len(request_tokens) - 1
            self._requests_to_fork.append(state)
        if self.waiting_requests.pop(state.request_id, None) is not None:
            self.active_requests[state.request_id] = state
        state.tokens_to_process = request_tokens[:token_budget]
        if state.status != RequestStatus.DECODING:
            state.remaining_prefill_tokens = request_tokens[token_budget:]
            is_over = not state.remaining_prefill_tokens
            state.status = RequestStatus.DECODING if is_over else RequestStatus.PREFILLING

    def _process_candidates(self, candidates, token_budget, cache_budget, request_ids_to_remove_from_waiting):
        scheduled_requests, self.starved_requests = [], []
        for state in candidates:
            if self.cache.get_num_free_blocks() < self.safety_margin * self.cache.num_blocks and scheduled_requests:
                break
            request_tokens = self._infer_request_tokens(state)
            request_len = min(len(request_tokens), token_budget)
            allocation_successful = self._allocate_blocks_if_needed(state, request_len)
            if not allocation_successful:
                if state.request_id in self.waiting_requests:
                    break
                continue
            self._schedule_request(state, request_tokens, token_budget)
            request_len = len(state.tokens_to_process)
            token_budget -= request_len
            has_new_token = not state.remaining_prefill_tokens
            scheduled_requests.append(FutureRequestState(state, has_new_token, 0, request_len))
            if token_budget == 0:
                break
        return scheduled_requests, bool(self.starved_requests)


class FIFOScheduler(Scheduler):
    def schedule_batch(self, token_budget, cache_budget):
        active = sorted(self.active_requests.values(), key=lambda state: -state.status)
        return self._process_candidates([*active, *self.waiting_requests.values()], token_budget, cache_budget, set())[
            0
        ]


SCHEDULER_MAPPING = {"fifo": FIFOScheduler}
