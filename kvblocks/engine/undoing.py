"""Undoes a step that was interrupted at any point, for example by KeyboardInterrupt, even within a call.

`Scheduler.abort` undoes a step whose chunks are known. This module knows only the state before the step.
"""

from collections.abc import Mapping
from contextlib import suppress

from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.errors import CorruptStateError


def written_tokens(scheduler: Scheduler) -> dict[Request, int]:
    """Return how many tokens of each running request are written or being loaded. Call it between two steps.

    For `undo`. O(running requests).
    """
    written = {request: request.sequence.num_computed_tokens for request in scheduler.running}
    part = scheduler.long_prompts.open
    return written if part is None else written | {part.request: part.start}


def undo(scheduler: Scheduler, written: Mapping[Request, int]) -> None:
    """Undo a step that was interrupted at any point, even in scheduling. All requests wait again, at the front.

    written: what `written_tokens` returned before the step; nothing beyond that stays cached. An open chunk is dropped.
    A manager that was interrupted within a call refuses all further calls, so its cache can't be hit any more. O(blocks
    held).
    """
    manager, running, waiting = scheduler.manager, scheduler.running, scheduler.waiting
    scheduler.lookups.forget()
    held = [request for request in (*running, *waiting) if request.sequence.is_allocated]
    for request in waiting:  # a fork of a remembered prompt that the request had not got yet
        with suppress(CorruptStateError):
            twin = manager.sequence(request.sequence.sequence_id)
            if twin is not None and twin is not request.sequence:
                manager.abort(twin, 0)
    waiting.extend([request for request in scheduler.entrance.recover() if request not in waiting])
    if scheduler.remembered is not None:
        with suppress(CorruptStateError):
            scheduler.remembered.recover()
    for request in reversed(held):
        scheduler.long_prompts.drop(request)
        with suppress(CorruptStateError):
            manager.abort(request.sequence, written.get(request, 0))
        if request in running:
            running.remove(request)
            waiting.appendleft(request)
