"""Makes calls to one manager, and checks after each that all requests have their own KV."""

from collections.abc import Sequence
from typing import assert_never

from kvblocks.verify.adapter import CacheAdapter, Slot, WalkRequest
from kvblocks.verify.calls import Call, EndStep, FailStep, Finish, Free, Grow, Reset, Start
from kvblocks.verify.errors import VerificationError
from kvblocks.verify.memory import SlotMemory
from kvblocks.verify.possible import PossibleHits
from kvblocks.verify.report import Report

_FIRST_NEW_TOKEN = 2  # walks use 0 and 1


class Player:
    """One pool, and the requests in it. A call that makes no sense, such as ending an unknown request, does nothing.

    report: counts what happens.
    """

    def __init__(self, adapter: CacheAdapter, report: Report) -> None:
        self.adapter = adapter
        self.report = report
        self.running: dict[str, WalkRequest] = {}
        self.memory = SlotMemory()
        self.possible = PossibleHits(adapter)
        self._in_step: dict[str, None] = {}  # who has tokens in the step that is being put together, in order

    def play(self, call: Call) -> None:
        """Make a call. Raises VerificationError."""
        match call:
            case Start():
                self._start(call)
            case Grow():
                self._grow(call)
            case Free():
                self._free(call.name)
            case EndStep():
                self._end_step()
            case FailStep():
                self._fail_step()
            case Reset():
                self._reset()
            case Finish():
                self._finish()
            case _:
                assert_never(call)
        self._check()

    def _start(self, call: Start) -> None:
        if call.name in self.running:
            return
        request = WalkRequest(call.name, list(call.tokens), call.salt)
        possible = self.possible.of(request)
        found = self.adapter.start(request, call.num_new_tokens)
        num_tokens = len(call.tokens)
        if found is None:
            self.report.count("starts refused")
            self._check_room(request)
            return
        if not 0 <= found <= num_tokens:
            raise VerificationError("bad answer", f"the hit of {call.name!r}: expected 0 to {num_tokens}, got {found}")
        self.report.num_prompt_tokens += num_tokens
        self.report.num_hit_tokens += found
        self.report.num_possible_tokens += possible
        self.report.count("hits", found > 0)
        self.report.count("hits on what runs", found > possible)
        self.possible.check(request, found)
        self.running[call.name] = request
        self._schedule(request, found, min(found + call.num_new_tokens, num_tokens))

    def _check_room(self, request: WalkRequest) -> None:
        if not self.running and len(request.token_ids) <= self.adapter.num_slots:
            what = f"nothing runs, but there is no room for the {len(request.token_ids)} tokens of {request.name!r}"
            raise VerificationError("lost blocks", f"{what} among {self.adapter.num_slots} slots")

    def _grow(self, call: Grow) -> None:
        request = self.running.get(call.name)
        if request is None:
            return
        request.token_ids += call.tokens
        end = min(request.num_tokens + call.num_tokens, len(request.token_ids))
        if end == request.num_tokens:
            return
        if self.adapter.grow(request, end):
            self._schedule(request, request.num_tokens, end)
        else:  # as a preempted request, it ends
            self.report.count("grows refused")
            del request.token_ids[len(request.token_ids) - len(call.tokens) :]
            self._free(call.name)

    def _schedule(self, request: WalkRequest, start: int, end: int) -> None:
        """Note that the next step computes the tokens from `start` to `end`."""
        self.possible.note_scheduled(end - start)
        request.num_tokens = end
        self.memory.copy(self.adapter.take_copies())
        self._in_step[request.name] = None
        self.memory.write(self._slots(request), self.memory.numbers(request), start)

    def _free(self, name: str) -> None:
        if name not in self.running:
            return
        if name in self._in_step:
            self._end_step()
        request = self.running.pop(name)
        self.adapter.free(request)
        self.possible.note_ended(request)
        self.report.count("ends")

    def _end_step(self) -> None:
        self.memory.copy(self.adapter.take_copies())
        self.memory.run_step()
        for name in self._in_step:
            self.running[name].num_written = self.running[name].num_tokens
        self._in_step.clear()
        self.adapter.end_step()
        self.report.count("steps")

    def _fail_step(self) -> None:
        requests = [self.running[name] for name in self._in_step if name in self.running]
        if not requests or not self.adapter.fail_step(requests):
            return
        self.memory.fail_step()
        for request in requests:
            del self.running[request.name]
        self._in_step.clear()
        self.report.count("steps that died")

    def _reset(self) -> None:
        self._end_all()
        if self.adapter.reset():
            self.memory.change_weights()
            self.possible.forget()
            self.report.count("resets")

    def _end_all(self) -> None:
        for name in list(self.running):
            self._free(name)
        self._check()

    def _finish(self) -> None:
        """End all requests, and check that the pool is as large as it was."""
        self._end_all()
        adapter = self.adapter
        free = adapter.num_free_slots()
        if free is not None and free != adapter.num_slots:
            what = f"with no request left, expected {adapter.num_slots} free slots, got {free}"
            raise VerificationError("lost blocks", what)
        request = WalkRequest("the whole pool", [_FIRST_NEW_TOKEN + number for number in range(adapter.num_slots)])
        found = adapter.start(request, adapter.num_slots)
        if found != 0:
            said = "there is no room" if found is None else f"{found} tokens are a hit"
            what = f"with no request left, {adapter.num_slots} new tokens were to get the whole pool, but {said}"
            raise VerificationError("lost blocks", what)
        request.num_tokens = adapter.num_slots
        slots = list(self._slots(request))
        if len(set(slots)) != len(slots):
            raise VerificationError("shared slot", f"two tokens of {request.name!r} are in one slot of {slots}")
        self.possible.note_scheduled(adapter.num_slots)
        self._in_step[request.name] = None
        self.memory.write(slots, self.memory.numbers(request), 0)
        self.running[request.name] = request
        self._free(request.name)

    def _slots(self, request: WalkRequest) -> Sequence[Slot]:
        slots = self.adapter.slots(request)
        if len(slots) < request.num_tokens:
            what = f"{request.name!r}: expected slots for {request.num_tokens} tokens, got {len(slots)}"
            raise VerificationError("missing slots", what)
        return slots

    def _check(self) -> None:
        for request in self.running.values():
            self.memory.check(request, self._slots(request), self.memory.numbers(request))
        self.adapter.check()
