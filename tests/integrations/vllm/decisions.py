"""All that a scheduler decides about some requests, step by step, in a form that can be compared.

Block ids are left out, since managers may hand out different ones. How many blocks there are is compared.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from bench.vllm.schedulers import Settings, make_scheduler
from integrations.vllm.worker import Tables, Worker
from integrations.vllm.workload import Ask, continuation, make_drafts

MOST_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Step:
    """What a schedule was, and what a worker needs of it."""

    output: SchedulerOutput
    tables: dict[str, Tables]
    sampling: set[str]
    starts: dict[str, int]


@dataclass(slots=True)
class Decisions:
    """decided: a row a step. tokens, cached: each request's answer, and how much of its prompt was cached."""

    decided: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    num_preempted: int = 0

    @property
    def num_cached(self) -> int:
        """Tokens of all prompts that were cached."""
        return sum(self.cached.values())


class Driver:
    """Takes requests through a scheduler, as vLLM's EngineCore does, with a mocked model."""

    def __init__(self, scheduler: Scheduler, settings: Settings, asks: list[Ask]) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.asks = asks
        self.requests: dict[str, Request] = {}
        self.worker = Worker(settings)
        self.result = Decisions()
        self.loads: list[KVConnectorOutput | None] = []  # what the next steps' loads came to

    def run(self) -> Decisions:
        """Return what was decided. Raises AssertionError when blocks are lost, or a step reads what is not there."""
        in_flight: deque[Step] = deque()
        depth = 2 if self.settings.is_async else 1
        coming = deque(self.asks)
        number = 0
        while coming or in_flight or self.scheduler.has_unfinished_requests():
            assert number < MOST_STEPS, "the requests never end"
            while coming and coming[0].arrival <= number:
                self._add(coming.popleft())
            for ask in self.asks:
                if ask.cancelled == number:
                    self.scheduler.finish_requests(ask.request_id, RequestStatus.FINISHED_ABORTED)
            step = self._schedule()
            if step.output.num_scheduled_tokens:
                in_flight.append(step)
            if in_flight and (len(in_flight) == depth or in_flight[-1] is not step):
                self._finish(in_flight.popleft())
            number += 1
        num_free = self._num_free_blocks()
        assert num_free == self.settings.num_blocks - 1, f"{self.settings.num_blocks - 1 - num_free} blocks are lost"
        assert self.scheduler.reset_prefix_cache(), "the cache cannot be emptied"
        return self.result

    def _add(self, ask: Ask) -> None:
        request = self.requests[ask.request_id] = ask.make_request(self.settings)
        self.result.tokens[ask.request_id] = []
        self.scheduler.add_request(request)

    def _schedule(self) -> Step:
        output = self.scheduler.schedule()
        self._record(output)
        return Step(
            output=output,
            tables=self.worker.take_tables(output),
            sampling={r for r in output.num_scheduled_tokens if not self.requests[r].is_prefill_chunk},
            starts=dict(starts(output)),
        )

    def _record(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        preempted = sorted(output.preempted_req_ids or ())
        self.result.num_preempted += len(preempted)
        self.result.decided.append(
            {
                "new": [(r.req_id, r.num_computed_tokens, num_blocks(r.block_ids)) for r in output.scheduled_new_reqs],
                "running": list(zip(cached.req_ids, map(num_blocks, cached.new_block_ids), strict=True)),
                "computed": list(starts(output)),
                "resumed": sorted(cached.resumed_req_ids),
                "scheduled": list(output.num_scheduled_tokens.items()),
                "drafts": {name: len(drafts) for name, drafts in output.scheduled_spec_decode_tokens.items()},
                "preempted": preempted,
                "finished": sorted(output.finished_req_ids),
                "free": self._num_free_blocks(),
            }
        )

    def _finish(self, step: Step) -> None:
        """Let the worker compute a step, and tell the scheduler."""
        accepted = self.worker.execute(step, self.requests)
        names = list(step.output.num_scheduled_tokens)
        sampled = [
            continuation(self.requests[name].all_token_ids, accepted[name] + 1) if name in step.sampling else []
            for name in names
        ]
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self.loads.pop(0) if self.loads else None,
        )
        for outputs in self.scheduler.update_from_output(step.output, answer).values():
            for output in outputs.outputs:
                self.result.tokens[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.result.cached[output.request_id] = output.prefill_stats.num_cached_tokens
        if self.settings.num_drafts and not self.settings.is_async:
            drafting = [name for name in names if name in step.sampling]
            drafts = [make_drafts(self.requests[n].all_token_ids, self.settings.num_drafts) for n in drafting]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafting, drafts))

    def _num_free_blocks(self) -> int:
        total = self.settings.num_blocks - 1
        return round((1 - self.scheduler.kv_cache_manager.usage) * total)


def num_blocks(block_ids: tuple[list[int], ...] | None) -> list[int] | None:
    """Return the number of blocks of each group."""
    return None if block_ids is None else [len(group) for group in block_ids]


def starts(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Yield which request starts at which token."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)


def decide(settings: Settings, asks: list[Ask], kind: type[Scheduler] | None = None) -> Decisions:
    """Return what a scheduler of class `kind`, or vLLM's own, decides about these requests."""
    return Driver(make_scheduler(settings, kind), settings, asks).run()


def first_difference(theirs: Decisions, ours: Decisions) -> str | None:
    """Return where two schedulers part first, or None."""
    for number, (expected, got) in enumerate(zip(theirs.decided, ours.decided, strict=False)):
        if expected != got:
            parts = [
                f"{key}: expected {expected[key]}, got {got[key]}" for key in expected if expected[key] != got[key]
            ]
            return f"step {number}: " + "; ".join(parts)
    if len(theirs.decided) != len(ours.decided):
        return f"expected {len(theirs.decided)} steps, got {len(ours.decided)}"
    for what in ("tokens", "cached"):
        expected, got = getattr(theirs, what), getattr(ours, what)
        for name in expected:
            if expected[name] != got.get(name):
                return f"{name}: expected {what} {expected[name]}, got {got.get(name)}"
    return None
