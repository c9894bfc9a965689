"""The calls that a scheduler made on its manager, made again on another one, in the same order.

So two managers can be compared though what one of them finds would change what a scheduler does next.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from bench.vllm.schedulers import Settings, make_scheduler
from integrations.vllm.decisions import Driver
from integrations.vllm.workload import Ask


@dataclass(frozen=True, slots=True)
class Call:
    """A request gets room for its first `end` tokens, or gives its blocks back, of which `end` tokens are computed.

    num_tokens: how many it has by then.
    """

    request_id: str
    end: int
    num_tokens: int
    frees: bool = False
    is_finished: bool = False


def record(kind: type[Scheduler], settings: Settings, asks: list[Ask]) -> tuple[list[Call], dict[str, list[int]]]:
    """Return the calls of a scheduler of class `kind`, and all answers."""
    scheduler = make_scheduler(settings, kind)
    manager: Any = scheduler.kv_cache_manager
    calls: list[Call] = []
    allocate_slots, free = manager.allocate_slots, manager.free

    def allocate(request: Request, num_new_tokens: int, **what: Any) -> Any:
        given = allocate_slots(request, num_new_tokens, **what)
        if given is not None:
            end = request.num_computed_tokens + what.get("num_new_computed_tokens", 0) + num_new_tokens
            calls.append(Call(request.request_id, end, request.num_tokens))
        return given

    def give_back(request: Request) -> Any:
        end, is_finished = request.num_computed_tokens, request.is_finished()
        calls.append(Call(request.request_id, end, request.num_tokens, frees=True, is_finished=is_finished))
        return free(request)

    manager.allocate_slots, manager.free = allocate, give_back
    return calls, Driver(scheduler, settings, asks).run().tokens


class Replay:
    """Makes calls on the manager of a scheduler of class `kind`, which schedules nothing.

    mends: whether what a preempted request has not computed leaves the cache before it is freed; see `mended`.
    num_short: how often there was no room. The request then gives its blocks back, and begins again with its next call.
    """

    def __init__(self, kind: type[Scheduler], settings: Settings, asks: list[Ask], *, mends: bool) -> None:
        self.manager: Any = make_scheduler(settings, kind).kv_cache_manager
        self.num_short = 0
        self._settings = settings
        self._mends = mends
        self._asks = {ask.request_id: ask for ask in asks}
        self._requests: dict[str, Request] = {}
        self._held: set[str] = set()

    @property
    def num_free(self) -> int:
        """How many blocks are free."""
        number: int = self.manager.block_pool.get_num_free_blocks()
        return number

    def make(self, call: Call, answer: list[int]) -> int | None:
        """Make a call. Returns how many tokens were cached if the request had no blocks, otherwise None."""
        request = self._requests.get(call.request_id)
        if request is None:
            request = self._asks[call.request_id].make_request(self._settings)
            self._requests[call.request_id] = request
        more = answer[request.num_output_tokens : call.num_tokens - request.num_prompt_tokens]
        if more:
            request.append_output_token_ids(more)
        if call.frees:
            self._free(request, call)
            return None
        if call.request_id in self._held:
            if self.manager.allocate_slots(request, call.end - request.num_computed_tokens) is None:
                self.num_short += 1
                self._free(request, Call(call.request_id, request.num_computed_tokens, call.num_tokens, frees=True))
            else:
                request.num_computed_tokens = call.end
            return None
        blocks, num_cached, _ = self.manager.get_computed_blocks(request)
        num_used = num_cached
        if num_cached >= call.end:  # the scheduler that was recorded found less, and computed only so far
            blocks, num_used, _ = self.manager.get_computed_blocks(request, call.end - 1)
        if self.manager.allocate_slots(request, call.end - num_used, num_used, blocks) is None:
            self.num_short += 1
        else:
            self._held.add(call.request_id)
            request.num_computed_tokens, request.status = call.end, RequestStatus.RUNNING
        return int(num_cached)

    def _free(self, request: Request, call: Call) -> None:
        if call.request_id not in self._held:
            return
        self._held.remove(call.request_id)
        request.num_computed_tokens = min(call.end, request.num_computed_tokens)
        request.status = RequestStatus.FINISHED_STOPPED if call.is_finished else RequestStatus.PREEMPTED
        if self._mends and not call.is_finished:
            (block_ids,) = self.manager.get_block_ids(call.request_id)
            self.manager.evict_blocks(set(block_ids[request.num_computed_tokens // self._settings.block_size :]))
        self.manager.free(request)
        request.num_computed_tokens = 0
