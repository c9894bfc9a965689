"""Undoes a step that was interrupted at any point, for example by KeyboardInterrupt, even within a call.

`Scheduler.abort` undoes a step whose chunks are known. This module knows only the state before the step.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import inf

from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.errors import CorruptStateError

Written = Mapping[tuple[Request, int], int]
"""How many tokens are written, by request and by how often it has been preempted: afterwards the number is void."""


def written_tokens(scheduler: Scheduler) -> dict[tuple[Request, int], int]:
    """Return how many tokens of each running request are written or being loaded. Call it between two steps.

    For `undo`. O(running requests).
    """
    written = {(each, each.num_preemptions): each.sequence.num_computed_tokens for each in scheduler.running}
    part = scheduler.long_prompts.open
    return written if part is None else written | {(part.request, part.request.num_preemptions): part.start}


def undo(scheduler: Scheduler, written: Written, requests: Iterable[Request] = ()) -> None:
    """Undo a call that was interrupted at any point. All unfinished requests wait again, those that ran at the front.

    written: what `written_tokens` returned before the call; nothing beyond that stays cached. An open chunk is dropped.
    requests: all requests that the caller knows. The call may have taken them out of the queue, and those that have
    ended may still be in it. A manager that was interrupted within a call refuses all further calls, so its cache can't
    be hit any more. If this call is interrupted, repeat it with the same requests. O(requests + blocks held).
    """
    scheduler.lookups.forget()
    scheduler.long_prompts.open = None
    scheduler.next_deadline = -inf  # `expire` may have been interrupted: let it look at all requests
    requests = list(requests)
    queued = [*scheduler.running, *scheduler.waiting, *scheduler.entrance.recover()]
    siblings = [sample for request in (*queued, *requests) for sample in request.siblings]
    known = {*queued, *siblings}
    lost = [request for request in requests if request not in known]
    queued = list(dict.fromkeys([*scheduler.running, *lost, *queued]))
    if scheduler.remembered is not None:
        with suppress(CorruptStateError):
            scheduler.remembered.recover()
    for request in reversed([*queued, *siblings]):
        request.end_if_done()
        with suppress(CorruptStateError):
            _abort(scheduler, request, written)
            if request.finish_reason is not None:
                scheduler.pause_session(request)
    scheduler.waiting = deque(_unfinished(queued))
    scheduler.running.clear()


def _abort(scheduler: Scheduler, request: Request, written: Written) -> None:
    """Free a request's blocks, and those of a fork that it had not got yet."""
    own, manager = request.sequence, scheduler.manager
    child = manager.sequence(own.sequence_id)
    if child is not None and child is not own:
        manager.abort(child, 0)
    if own.is_allocated:
        manager.abort(own, written.get((request, request.num_preemptions), 0))


def _unfinished(queued: Iterable[Request]) -> list[Request]:
    """Those that haven't ended, and the samples that take the places of others."""
    found = []
    for request in queued:
        request.siblings = [sample for sample in request.siblings if sample.finish_reason is None]
        if request.finish_reason is None:
            found.append(request)
        elif request.siblings:
            found.append(request.hand_over())
    return found
