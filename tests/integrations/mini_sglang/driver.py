"""Runs a scheduler with a given cache type over a simulated model that knows who wrote which slot."""

from dataclasses import dataclass
from random import Random

import torch

from kvblocks.verify import SlotMemory, VerificationError, WalkRequest

VOCABULARY = 60


@dataclass(frozen=True)
class Settings:
    num_pages: int
    page_size: int = 1
    max_running: int = 6
    prefill_budget: int = 48
    longest: int = 160


class Engine:
    """A model in place of mini-sglang's: writes a step's slots, then reads every slot of each request.

    found: tokens that were found of each request. foreign: the requests that read a slot with something else in it.
    """

    eos = 7

    def __init__(self, settings):
        self.page_table = torch.zeros((settings.max_running + 1, settings.longest), dtype=torch.int32)
        self.memory = SlotMemory()
        self.answers, self.found, self.foreign = {}, {}, set()

    def run(self, reqs, token_pool):
        spans = []
        for req in reqs:
            tokens = token_pool[req.table_idx, : req.device_len].tolist()
            slots = self.page_table[req.table_idx, : req.device_len].tolist()
            request = WalkRequest(f"request {req.uid}", tokens, num_tokens=len(tokens))
            spans.append((req, request, slots, self.memory.numbers(request)))
        for req, _, slots, numbers in spans:
            self.memory.write(slots, numbers, req.cached_len)
        self.memory.run_step()
        for req, request, slots, numbers in spans:
            try:
                self.memory.check(request, slots, numbers)
            except VerificationError:
                self.foreign.add(req.uid)
        return [(sum(request.token_ids) * 31 + len(request.token_ids)) % VOCABULARY for _, request, _, _ in spans]


def make_asks(seed, num_requests=60):
    """Random requests: (step that it comes at, prompt, most tokens). Many are equal and come at once."""
    random = Random(seed)
    roots = [[random.randrange(VOCABULARY) for _ in range(random.randint(8, 40))] for _ in range(4)]
    asks = []
    for number in range(num_requests):
        root = random.choice(roots)
        prompt = root[: random.randint(2, len(root))] if random.random() < 0.3 else [*root]
        prompt += [random.randrange(VOCABULARY) for _ in range(random.choice((0, 0, 0, 1, 9)))]
        asks.append((number // 4 * 2, torch.tensor(prompt, dtype=torch.int32), random.randint(1, 16)))
    return asks


def answer(make, settings, asks, cache_type, *, cancels=None):
    """Answer all requests. Returns the engine, with what it saw, and the cache. cancels: a Random that aborts some."""
    engine = Engine(settings)
    scheduler = make(engine, settings, cache_type)
    waiting, last, number = [*enumerate(asks)], None, 0
    while waiting or last is not None or not scheduler.is_idle():
        while waiting and waiting[0][1][0] <= number:
            uid, (_, tokens, most) = waiting.pop(0)
            scheduler.add(uid, tokens, most)
        if cancels is not None and cancels.random() < 0.15:
            scheduler.cancel(cancels.randrange(len(asks) - len(waiting)))
        last = scheduler.loop(last)
        number += 1
        assert number < 10_000, "it is stuck"
    scheduler.check_integrity()
    assert scheduler.cache.size_info.protected_size == 0
    return engine, scheduler.cache
