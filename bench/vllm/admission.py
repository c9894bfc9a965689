"""The cost of admitting a request whose long prompt is cached, and of making a `Request`, with and without hashes."""

import gc
from collections.abc import Callable
from random import Random
from time import thread_time_ns

from vllm.v1.request import Request

from bench.timing import NUM_WARM_UPS, Spread, settle
from bench.vllm.contestants import BLOCK_SIZE, NAMES, OURS, VLLM, Contestant, make_contestants
from bench.vllm.idle import IdleManager
from bench.vllm.schedulers import VOCABULARY

NUM_CACHED = 32_768
OWN_TOKENS = 20


class Prompts:
    """Prompts that begin alike, each with its own end."""

    def __init__(self) -> None:
        self._random = Random(2)
        self.prefix = self._tokens(NUM_CACHED)

    def fresh(self) -> list[int]:
        """Return another prompt."""
        return self.prefix + self._tokens(OWN_TOKENS)

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(num_tokens)]


def warm(contestant: Contestant, prompt: list[int]) -> None:
    """Compute a prompt, so that it is cached."""
    request = contestant.make_request(prompt)
    contestant.scheduler.add_request(request)
    contestant.finish_step(contestant.scheduler.schedule())
    contestant.end([request])
    manager = contestant.scheduler.kv_cache_manager
    if isinstance(manager, IdleManager):
        manager.set_cached(NUM_CACHED, BLOCK_SIZE)


def time_admission(contestant: Contestant, prompt: list[int]) -> int:
    """Return the nanoseconds of processor time from `Request()` until it is first scheduled. Cancels it afterwards."""
    scheduler = contestant.scheduler
    start = thread_time_ns()
    request = contestant.make_request(prompt)
    scheduler.add_request(request)
    output = scheduler.schedule()
    elapsed = thread_time_ns() - start
    num_scheduled = output.num_scheduled_tokens[request.request_id]
    assert num_scheduled == OWN_TOKENS, f"expected a hit, got {num_scheduled} tokens to compute"
    contestant.finish_step(output)
    contestant.end([request])
    return elapsed


def time_request(make: Callable[[list[int]], Request], prompt: list[int]) -> int:
    """Return the nanoseconds of processor time that `Request()` takes."""
    start = thread_time_ns()
    made = make(prompt)
    elapsed = thread_time_ns() - start
    del made
    return elapsed


def time_admissions(num_rounds: int) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Return the nanoseconds of an admission, and of `Request()` alone, for each contestant; they take turns."""
    prompts = Prompts()
    contestants = make_contestants(2, NUM_CACHED, is_async=False)
    for contestant in contestants.values():
        warm(contestant, prompts.fresh())
    settle()
    admitted: dict[str, list[float]] = {name: [] for name in NAMES}
    made: dict[str, list[float]] = {name: [] for name in (VLLM, OURS)}
    for number in range(NUM_WARM_UPS + num_rounds):
        for name in NAMES if number % 2 == 0 else NAMES[::-1]:
            time_taken = time_admission(contestants[name], prompts.fresh())
            if number >= NUM_WARM_UPS:
                admitted[name].append(time_taken)
        for name, samples in made.items():
            time_taken = time_request(contestants[name].make_request, prompts.fresh())
            if number >= NUM_WARM_UPS:
                samples.append(time_taken)
    gc.enable()
    return tuple({name: Spread(values) for name, values in found.items()} for found in (admitted, made))
