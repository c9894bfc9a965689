"""The three that are compared: vLLM's Scheduler with its own manager, with kvblocks, and with one that does nothing."""

from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from bench.vllm.idle import IdleAsyncScheduler, IdleScheduler
from bench.vllm.schedulers import Settings, make_scheduler, our_scheduler, own_scheduler, request_hasher

VLLM, OURS, NOTHING = "vllm", "kvblocks", "nothing"
NAMES = (VLLM, OURS, NOTHING)
BLOCK_SIZE = 16
ENDLESS = 100_000  # more tokens than any measurement decodes

_numbers = count()


@dataclass(frozen=True, slots=True)
class Contestant:
    """A scheduler with one of the managers. Only vLLM's needs the hashes of requests."""

    name: str
    settings: Settings
    scheduler: Scheduler

    def make_request(self, prompt: list[int]) -> Request:
        """Return a request, hashed where the manager needs it."""
        return Request(
            request_id=f"r{next(_numbers)}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=ENDLESS),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=request_hasher(BLOCK_SIZE) if self.name == VLLM else None,
        )

    def finish_step(self, output: SchedulerOutput) -> None:
        """Tell the scheduler what the model answered."""
        self.scheduler.update_from_output(output, answer(self.scheduler, output))

    def end(self, requests: list[Request]) -> None:
        """Cancel requests, and schedule the step that reports it."""
        self.scheduler.finish_requests([request.request_id for request in requests], RequestStatus.FINISHED_ABORTED)
        self.finish_step(self.scheduler.schedule())


def answer(scheduler: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """Return a mocked model's answer: one token for every request whose prompt is computed."""
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in names]
    positions = {name: number for number, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=positions, sampled_token_ids=sampled)


def make_contestants(
    num_sequences: int, num_tokens: int, *, is_async: bool, has_events: bool = False
) -> dict[str, Contestant]:
    """Return the three, for `num_sequences` sequences over a common prefix of `num_tokens` tokens."""
    settings = Settings(
        num_blocks=num_tokens // BLOCK_SIZE + num_sequences * 200 + 4000,
        block_size=BLOCK_SIZE,
        max_num_seqs=max(num_sequences, 2),
        max_num_batched_tokens=max(num_tokens + 1024, 16 * num_sequences),
        max_model_len=num_tokens + ENDLESS // 2,
        is_async=is_async,
        has_events=has_events,
    )
    kinds: dict[str, Any] = {
        VLLM: own_scheduler(settings),
        OURS: our_scheduler(settings),
        NOTHING: IdleAsyncScheduler if is_async else IdleScheduler,
    }
    made = {name: make_scheduler(settings, kind, log_stats=False) for name, kind in kinds.items()}
    return {name: Contestant(name, settings, scheduler) for name, scheduler in made.items()}
