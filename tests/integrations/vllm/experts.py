"""vLLM 0.33's own keeper of the experts that tokens were routed to, without a model: an "expert" is a token's id.

So the rows that a request gets must be its tokens, whoever computed them. vLLM keeps rows by the hashes of blocks, and
asks its block pool which hashes are cached (`--enable-return-routed-experts`).
"""

from collections import deque
from threading import Lock
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector import routed_experts, store
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput
from vllm.v1.core.sched.scheduler import Scheduler

from bench.vllm.schedulers import Settings
from integrations.vllm.decisions import Driver, starts
from integrations.vllm.workload import Ask

NUM_STEPS_IN_FLIGHT = 2
ROW_BYTES = 4


class Rows(AuxOutputWorkerConnector):
    """vLLM's keeper of rows, whose own constructor wants a model."""

    def __init__(self, settings: Settings) -> None:
        block_bytes = settings.block_size * ROW_BYTES
        blocks = store.BlockObjectStore(max_bytes=settings.num_blocks * block_bytes, object_nbytes=block_bytes)
        self._store = store.BackgroundBlockObjectStore(blocks, max_pending_batches=2 * settings.max_num_seqs)
        self._buffer = routed_experts.RoutedExpertsBuffer(
            np.dtype(np.int32),
            (1,),
            settings.block_size,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            NUM_STEPS_IN_FLIGHT,
        )
        self._requests: dict[str, Any] = {}
        self._pending_outputs: list[Any] = []
        self._generation, self._step_metadata, self._lock = 0, None, Lock()
        self._max_concurrent_batches = NUM_STEPS_IN_FLIGHT

    def begin(self, output: Any) -> Any:
        """Begin a step; returns what becomes of its rows."""
        names = list(output.num_scheduled_tokens)
        begun = dict(starts(output))
        ends = np.cumsum([0, *output.num_scheduled_tokens.values()])
        pending = PendingAuxOutput(self, names, np.array([begun[name] for name in names]), ends, None)
        self._pending_outputs.append(pending)
        for name in names:
            self._requests[name].pending_outputs += 1
        return pending


class Keeper:
    """Stands between a scheduler and a worker without experts. rows: by request, those that it got."""

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        self.rows: dict[str, list[int]] = {}
        self._kept = Rows(settings)
        self._pending: deque[Any] = deque()
        self._scheduler: Any = scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._scheduler.schedule, self._scheduler.update_from_output = self.schedule, self.update_from_output

    def close(self) -> None:
        """End vLLM's thread."""
        self._kept.close()

    def schedule(self) -> Any:
        """Let the worker begin the step that was scheduled."""
        output = self._schedule()
        self._kept.begin_step(output.aux_output_connector_metadata)
        if output.num_scheduled_tokens:
            self._pending.append(self._kept.begin(output))
        return output

    def update_from_output(self, output: Any, answer: Any) -> Any:
        """Give the scheduler the rows of a step, and keep those that it gives to requests."""
        pending = self._pending.popleft()
        tokens: list[int] = []
        for name, start in zip(pending.request_ids, pending.token_starts, strict=True):
            request, end = self._scheduler.requests.get(name), start + output.num_scheduled_tokens[name]
            known = [] if request is None else list(request.all_token_ids)[start:end]
            tokens += [*known, *[-1] * (end - start - len(known))]  # of a request that has ended by now
        pending.routed_experts = np.array(tokens, dtype=np.int32).reshape(-1, 1)
        pending.num_sampled = np.array([len(sampled) for sampled in answer.sampled_token_ids])
        pending.num_rejected = np.zeros(len(pending.request_ids), dtype=np.int32)
        answer.aux_output_connector_output = self._kept.process_output(pending)
        given = self._update(output, answer)
        for outputs in given.values():
            for one in outputs.outputs:
                if one.routed_experts is not None:
                    self.rows.setdefault(one.request_id, []).extend(one.routed_experts[:, 0].tolist())
        return given


def drive(scheduler: Scheduler, settings: Settings, asks: list[Ask]) -> tuple[Any, dict[str, list[int]], Driver]:
    """Return what a scheduler decides about requests, the rows that they get, and the driver."""
    driver = Driver(scheduler, settings, asks)
    keeper = Keeper(scheduler, settings)
    try:
        return driver.run(), keeper.rows, driver
    finally:
        keeper.close()
