"""A model for the scheduler's tests, whose slots remember the whole prefix that their KV would be computed from.

So reading a context through a block table shows every wrong hit, and every slot that is unwritten, overwritten or not
copied. Sequence ids of samples are (name, number), and samples with different numbers get different tokens.
"""

import zlib

from kvblocks import KVCacheManager, Sequence
from kvblocks.engine.schedule.request import Request
from kvblocks.engine.schedule.scheduler import Scheduler
from kvblocks.engine.schedule.step import StepLimits

BLOCK_SIZE = 4
NUM_TOKEN_IDS = 3


def next_token(kind, tokens):
    """What the fake model generates after `tokens`: it depends on all of them, and on `kind`."""
    return zlib.crc32(repr((kind, *tokens)).encode()) % NUM_TOKEN_IDS


def answer_alone(kind, prompt, max_tokens, stop_token_ids=frozenset()):
    """The answer that a request of this kind, (salt, sample number), must get, whatever else happens."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(kind, tokens))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


def kind_of(sequence):
    name = sequence.sequence_id
    return sequence.salt, name[1] if isinstance(name, tuple) else 0


class FakeCache:
    """The slots, and the model that fills and reads them. Slices before the last one of a chunk fill them with junk."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.slots = {}
        self.num_copied_blocks = 0

    def slot(self, sequence, position):
        return sequence.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def store(self, chunks, *, poison=False):
        """Write the chunks' tokens, as a step does before it attends: all except those in shared blocks."""
        for source, destination in [pair for chunk in chunks for pair in chunk.copies]:
            self.num_copied_blocks += 1
            for offset in range(self.block_size):
                copied = self.slots.get(source * self.block_size + offset)
                self.slots[destination * self.block_size + offset] = None if poison else copied
        for chunk in chunks:
            sequence = chunk.request.sequence
            is_unwritten = poison or (chunk.part is not None and chunk.part.layers.stop < chunk.part.num_layers)
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                if position >= sequence.num_readonly_tokens:
                    prefix = None if is_unwritten else (sequence.salt, *sequence.token_ids(0, position + 1))
                    self.slots[self.slot(sequence, position)] = prefix

    def run(self, chunks):
        """Compute a step. Returns a sampled token for each request that gets one."""
        self.store(chunks)
        for chunk in chunks:
            if chunk.part is not None and chunk.part.layers.stop < chunk.part.num_layers:
                continue
            sequence = chunk.request.sequence
            tokens = sequence.token_ids()
            assert chunk.token_ids == tokens[chunk.start : chunk.start + chunk.num_tokens]
            for position in range(chunk.start + chunk.num_tokens):
                held = self.slots.get(self.slot(sequence, position), "nothing")
                assert held == (sequence.salt, *tokens[: position + 1]), f"{sequence}, position {position}: {held}"
        return [
            next_token(kind_of(request.sequence), request.sequence.token_ids())
            for chunk in chunks
            for request in chunk.sampled_requests
        ]


def make(
    num_blocks,
    *,
    max_num_batched_tokens=16,
    max_num_seqs=8,
    enable_caching=True,
    max_model_len=1000,
    order=None,
    pin_budget=0.5,
    debug=False,
    num_layers=1,
    **more_limits,
):
    manager = KVCacheManager(num_blocks, BLOCK_SIZE, enable_caching=enable_caching, pin_budget=pin_budget, debug=debug)
    limits = StepLimits(max_num_batched_tokens, max_num_seqs, **more_limits)
    return Scheduler(manager, max_model_len, limits, order=order, num_layers=num_layers)


def add(scheduler, name, prompt, max_tokens=4, **options):
    request = Request(Sequence(name, prompt), max_tokens, **options)
    scheduler.add(request)
    return request


def add_samples(scheduler, name, prompt, num_samples, max_tokens=4, **options):
    """The requests of all samples, with the ids (name, number)."""
    request = Request(Sequence((name, 0), prompt), max_tokens, **options)
    samples = [request, *(request.add_sample((name, number)) for number in range(1, num_samples))]
    scheduler.add(request)
    return samples


def step(scheduler, cache):
    """One step: (request's name, start, tokens) of each chunk."""
    chunks = scheduler.schedule()
    scheduler.complete(chunks, cache.run(chunks))
    scheduler.manager.check()
    return [(chunk.request.sequence.sequence_id, chunk.start, chunk.num_tokens) for chunk in chunks]


def unfinished_requests(scheduler):
    """All requests of the scheduler, each once, with the samples of prompts that aren't computed."""
    found = [sample for r in (*scheduler.running, *scheduler.waiting) for sample in (r, *r.siblings)]
    assert len(found) == len(set(found))
    return found


def run_any_step(scheduler, cache, *, dies=False, fails=()):
    """Run one step, and check what must hold in each step. Returns its chunks.

    fails: requests that get no token if they are to be sampled.
    """
    unfinished = unfinished_requests(scheduler)
    limits = scheduler.limits
    chunks = scheduler.schedule()
    assert chunks, "a step without progress"
    assert all(1 <= chunk.num_tokens <= limits.chunk_tokens(10**9) for chunk in chunks if chunk.part is None)
    assert len(chunks) == 1 or all(chunk.part is None for chunk in chunks)
    for part in [chunk.part for chunk in chunks if chunk.part is not None]:
        assert part.layers and part.num_worth_tokens <= limits.num_step_tokens
        assert part.request.sequence.num_written_tokens == part.start < part.start + part.num_tokens
    assert sum(chunk.num_tokens for chunk in chunks) <= limits.max_num_batched_tokens
    assert len(scheduler.running) <= limits.max_num_seqs
    assert set(unfinished) == set(unfinished_requests(scheduler))
    assert [r.sequence.is_allocated for r in unfinished] == [r in scheduler.running for r in unfinished]
    scheduler.manager.check()
    if dies:
        cache.store(chunks, poison=True)
        scheduler.abort(chunks)
    else:
        sampled = [request for chunk in chunks for request in chunk.sampled_requests]
        tokens = [None if r in fails else token for r, token in zip(sampled, cache.run(chunks), strict=True)]
        scheduler.complete(chunks, tokens)
        assert all((r.finish_reason == "error") == (r in fails) for r in sampled)
    scheduler.manager.check()
    assert len(scheduler.running) <= limits.max_num_seqs
    assert {r for r in unfinished if r.finish_reason is None} == set(unfinished_requests(scheduler))
    return chunks
