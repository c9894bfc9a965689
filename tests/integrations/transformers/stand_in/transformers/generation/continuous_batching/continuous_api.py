"""The loop."""

from copy import deepcopy

from .cache import PagedAttentionCache
from .initialization import resolve_continuous_batching_config
from .input_outputs import compute
from .offloading_manager import OffloadingManager
from .requests import RequestState, RequestStatus
from .scheduler import SCHEDULER_MAPPING, FIFOScheduler


class ContinuousBatchProcessor:
    def __init__(self, config, continuous_batching_config, distributed_helper):
        resolve_continuous_batching_config(continuous_batching_config)
        self.cache = PagedAttentionCache(
            config=config,
            continuous_batching_config=continuous_batching_config,
            device=None,
            distributed_helper=distributed_helper,
            tp_plan={},
            dtype=None,
        )
        scheduler = SCHEDULER_MAPPING.get(continuous_batching_config.scheduler_type, FIFOScheduler)
        self.scheduler = scheduler(self.cache, continuous_batching_config.safety_margin)
        self.offloading_manager = OffloadingManager(self.cache, self.scheduler)
        self.config, self.answers, self.num_computed = config, {}, 0

    def prepare_next_batch(self):
        self.batch = self.scheduler.schedule_batch(self.cache.max_batch_tokens, None)
        while not self.batch and self.scheduler.starved_requests:
            assert self.offloading_manager.offload_requests(), "no room for the only request"
            self.batch = self.scheduler.schedule_batch(self.cache.max_batch_tokens, None)
        if self.scheduler.starved_requests:
            self.offloading_manager.offload_requests()
        return bool(self.batch)

    def compute(self):
        self.num_computed += compute(self.cache, self.config.windows, self.batch)

    def update_batch(self):
        for future_state in self.batch:
            state = future_state.state
            if future_state.has_new_token:
                tokens = state.initial_tokens + state.generated_tokens
                state.generated_tokens.append((sum(tokens) * 7 + len(tokens)) % 50)
                state.tokens_to_process = state.generated_tokens[-1:]
                self.cache.mark_shareable_blocks_as_complete(state, future_state.complete_blocks)
                if len(state.generated_tokens) == state.max_new_tokens:
                    state.status = RequestStatus.FINISHED
                    self.scheduler.finish_request(state.request_id)
                    self.answers[state.request_id] = state.initial_tokens + state.generated_tokens
            else:
                self.cache.mark_shareable_blocks_as_complete(state, future_state.complete_blocks)
        while self.scheduler._requests_to_fork:
            self.fork(self.scheduler._requests_to_fork.pop())

    def fork(self, state):
        names = [f"{state.request_id}__child#{number}" for number in range(state.num_children)]
        state.num_children = 0
        num_forks = min(len(names), self.cache.compute_max_num_forks(state.request_id))
        for name in names[num_forks:]:
            tokens = state.initial_tokens + state.generated_tokens
            self.scheduler.waiting_requests[name] = RequestState(name, tokens, state.max_new_tokens)
        for name in names[:num_forks]:
            self.scheduler.active_requests[name] = deepcopy(state)
            self.scheduler.active_requests[name].request_id = name
        self.cache.copy_cache(*self.cache.fork_request(state.request_id, names[:num_forks]))
