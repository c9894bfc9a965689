"""The cost of a steady decode step: `schedule` and `update_from_output` for sequences that share a long prefix."""

import gc
from collections import deque
from random import Random
from time import thread_time_ns

from vllm.v1.core.sched.output import SchedulerOutput

from bench.timing import Spread, settle
from bench.vllm.contestants import BLOCK_SIZE, NAMES, NOTHING, Contestant, answer, make_contestants
from bench.vllm.idle import IdleManager
from bench.vllm.schedulers import VOCABULARY

OWN_TOKENS = 24
WARM_UP_STEPS = 2 * BLOCK_SIZE
ROUND_STEPS = 2 * BLOCK_SIZE  # in a round every sequence takes two new blocks
TURN_STEPS = 8  # steps until the next contestant's turn, so that all have the same noise


class Decoding:
    """A contestant in the middle of decoding."""

    def __init__(self, contestant: Contestant, prompts: list[list[int]], num_shared: int) -> None:
        self.contestant = contestant
        self.scheduler = contestant.scheduler
        self._depth = 2 if contestant.settings.is_async else 1
        self._in_flight: deque[SchedulerOutput] = deque()
        requests = [contestant.make_request(prompt) for prompt in prompts]
        self._admit(requests[:1])
        manager = self.scheduler.kv_cache_manager
        if isinstance(manager, IdleManager):
            manager.set_cached(num_shared, BLOCK_SIZE)
        self._admit(requests[1:])
        self.time_steps(WARM_UP_STEPS)
        assert len(self.scheduler.running) == len(prompts), "not all sequences decode"

    def _admit(self, requests: list) -> None:
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.waiting:
            self.time_steps(1)

    def time_steps(self, num_steps: int) -> float:
        """Take steps, and return the nanoseconds of processor time per step. The mocked model isn't timed."""
        total = 0
        for _ in range(num_steps):
            start = thread_time_ns()
            output = self.scheduler.schedule()
            total += thread_time_ns() - start
            self._in_flight.append(output)
            if len(self._in_flight) == self._depth:
                oldest = self._in_flight.popleft()
                answered = answer(self.scheduler, oldest)
                start = thread_time_ns()
                self.scheduler.update_from_output(oldest, answered)
                total += thread_time_ns() - start
        return total / num_steps


def time_decoding(
    num_sequences: int, num_shared: int, num_rounds: int, *, is_async: bool, has_events: bool = False
) -> dict[str, Spread]:
    """Return the nanoseconds per step of each contestant. They take turns."""
    random = Random(1)
    prefix = [random.randrange(VOCABULARY) for _ in range(num_shared)]
    prompts = [
        prefix + [random.randrange(VOCABULARY) for _ in range(OWN_TOKENS + i % BLOCK_SIZE)]
        for i in range(num_sequences)
    ]
    contestants = make_contestants(num_sequences, num_shared, is_async=is_async, has_events=has_events)
    decoding = {name: Decoding(contestants[name], prompts, num_shared) for name in NAMES}
    settle()
    samples: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(num_rounds):
        totals = dict.fromkeys(NAMES, 0.0)
        for _ in range(ROUND_STEPS // TURN_STEPS):
            for name in NAMES if number % 2 == 0 else NAMES[::-1]:
                decoding[name].time_steps(1)  # fills the processor's caches again after the others' turns
                totals[name] += TURN_STEPS * decoding[name].time_steps(TURN_STEPS)
        for name in NAMES:
            samples[name].append(totals[name] / ROUND_STEPS)
    gc.enable()
    return {name: Spread(values) for name, values in samples.items()}


def share_saved(spreads: dict[str, Spread], theirs: str, ours: str) -> Spread:
    """Return what we save, as a share of what the manager that does nothing saves, round by round."""
    rounds = zip(spreads[theirs].samples, spreads[ours].samples, spreads[NOTHING].samples, strict=True)
    return Spread([(their - our) / (their - nothing) for their, our, nothing in rounds])
