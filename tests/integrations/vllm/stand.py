"""A scheduler and a worker, driven step by step, for tests of one feature at a time."""

from collections import deque
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from bench.vllm.schedulers import Settings, make_scheduler, our_scheduler, own_scheduler, request_hasher
from integrations.vllm.decisions import Driver, Step

BLOCK = 16
NUM_ENCODER_TOKENS = 10_000
WHOSE = ["vLLM's", "ours"]


class Stand(Driver):
    """Takes requests through a scheduler, with a worker that notices a wrong hit."""

    def __init__(self, settings: Settings, whose: str = "ours", *, worker_block_size: int = 0, **options: Any) -> None:
        kind = our_scheduler(settings) if whose == "ours" else own_scheduler(settings)
        super().__init__(make_scheduler(settings, kind, **options), settings, [])
        self.worker.block_size = worker_block_size or settings.block_size
        self.manager: Any = self.scheduler.kv_cache_manager
        self.in_flight: deque[Step] = deque()
        scheduler: Any = self.scheduler  # whose model has no images, so it has no room for any
        scheduler.max_num_encoder_input_tokens = NUM_ENCODER_TOKENS
        self.stats: list[Any] = []  # which the scheduler takes from its manager in every step
        make_stats = scheduler.make_stats

        def keep_stats(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            self.stats += [] if stats is None else [stats]
            return stats

        scheduler.make_stats = keep_stats
        scheduler.encoder_cache_manager = EncoderCacheManager(NUM_ENCODER_TOKENS)

    def add(self, request: Request) -> Request:
        """Hand a request to the scheduler, or the next turn of one that it has."""
        if request.request_id not in self.requests:
            self.requests[request.request_id] = request
            self.result.tokens[request.request_id] = []
        self.scheduler.add_request(request)
        return self.requests[request.request_id]

    def preempt(self, request: Request) -> None:
        """Preempt a running request."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)  # noqa: SLF001  vLLM does it for want of blocks only

    def step(self) -> SchedulerOutput:
        """Schedule a step, and let the worker compute what is due. Async, that is the step before."""
        step = self._schedule()
        is_empty = self.settings.is_async and not step.output.num_scheduled_tokens
        if not is_empty:
            self.in_flight.append(step)
        if self.in_flight and (is_empty or len(self.in_flight) == (2 if self.settings.is_async else 1)):
            self._finish(self.in_flight.popleft())
        if is_empty and self.loads:
            self._finish(step)
        return step.output

    def finish(self) -> None:
        """Let the worker compute what is in flight, and schedule nothing."""
        while self.in_flight:
            self._finish(self.in_flight.popleft())

    def run_all(self, most_steps: int = 1000) -> None:
        """Go on until all requests are finished."""
        for _ in range(most_steps):
            if not (self.scheduler.has_unfinished_requests() or self.in_flight):
                return
            self.step()
        raise AssertionError("the requests never end")

    def cached(self, request: Request) -> int:
        """Take a request through to its end, and return how many tokens of its prompt were cached."""
        self.add(request)
        self.run_all()
        return self.result.cached[request.request_id]

    def take_prefix_stats(self) -> tuple[int, int, int, bool]:
        """Return what was counted of lookups since the last call: their number, their tokens, those hit, and resets."""
        taken = [stats.prefix_cache_stats for stats in self.stats] + [self.manager.make_prefix_cache_stats()]
        self.stats.clear()
        numbers = [sum(getattr(stats, name) for stats in taken) for name in ("requests", "queries", "hits")]
        return numbers[0], numbers[1], numbers[2], any(stats.reset for stats in taken)

    @property
    def num_free(self) -> int:
        """How many blocks are free."""
        return self._num_free_blocks()


def request(
    name: str, tokens: Any, max_tokens: int = 1, *, params: dict[str, Any] | None = None, **what: Any
) -> Request:
    """Return a request. what: further parameters of vLLM's Request; block_size, num_ahead: of its hashes."""
    hasher = request_hasher(what.pop("block_size", BLOCK), what.pop("num_ahead", 0))
    sampling = SamplingParams(ignore_eos=True, max_tokens=max_tokens, **(params or {}))
    return Request(
        request_id=name,
        prompt_token_ids=None if tokens is None else list(tokens),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=hasher,
        **what,
    )


def image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """Return an image whose placeholders are the tokens from `offset` on."""
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=offset, length=length)
    )


def adapter(name: str = "a", number: int = 1, path: str = "/adapters/a", *, load_inplace: bool = False) -> LoRARequest:
    """Return a LoRA adapter."""
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=load_inplace)
