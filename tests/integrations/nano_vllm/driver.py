"""Runs nano-vllm's scheduler with a given block manager, and a simulated model that knows who wrote which slot."""

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from types import SimpleNamespace

from kvblocks.verify import SlotMemory, WalkRequest

VOCABULARY = 50


@dataclass(frozen=True)
class Settings:
    num_blocks: int
    block_size: int = 8
    max_num_seqs: int = 12
    max_num_batched_tokens: int = 96
    reads_first: bool = True  # whether what a prompt found must have been written before the step


@dataclass
class Decided:
    """steps: (whether prompts, [(request, tokens found or computed, tokens scheduled)]). tables: of each step."""

    steps: list = field(default_factory=list)
    tables: list = field(default_factory=list)
    answers: dict = field(default_factory=dict)
    num_found: int = 0
    num_computed: int = 0
    num_preempted: int = 0


def make_asks(seed, num_requests=60):
    """Random requests: (the step that it comes at, prompt, tokens to generate). Many begin alike."""
    random = Random(seed)
    roots = [[random.randrange(VOCABULARY) for _ in range(random.randint(10, 70))] for _ in range(4)]
    asks = []
    for number in range(num_requests):
        root = random.choice(roots)
        prompt = root[: random.randint(1, len(root))] if random.random() < 0.4 else [*root]
        prompt = prompt + [random.randrange(VOCABULARY) for _ in range(random.choice((0, 0, 1, 8, 20)))]
        asks.append((number // 3 if random.random() < 0.8 else 0, prompt, random.randint(1, 24)))
    return sorted(asks, key=lambda ask: ask[0])


def read(memory, seq, end):
    """Read the first `end` tokens of a sequence. Raises VerificationError."""
    request, slots = asked(seq, end)
    memory.check(request, slots, memory.numbers(request))


def asked(seq, end):
    """The first `end` tokens of a sequence as a request, and their slots."""
    request = WalkRequest(f"sequence {seq.seq_id}", seq.token_ids, num_tokens=end)
    return request, [(block, offset) for block in seq.block_table for offset in range(seq.block_size)]


def run_step(memory, seqs, *, reads_first):
    """Write what a step computes, and read what it needs: also before, if prompts read first."""
    spans = [(seq, seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens) for seq in seqs]
    if reads_first:
        for seq, start, _ in spans:
            read(memory, seq, start)
    for seq, start, end in spans:
        request, slots = asked(seq, end)
        memory.write(slots, memory.numbers(request), start)
    memory.run_step()
    for seq, _, end in spans:
        read(memory, seq, end)


def decide(nano, settings, asks, manager):
    """Answer all requests with `manager` in place of nano-vllm's, and return the decisions."""
    nano.scheduler.BlockManager = manager
    nano.Sequence.block_size = settings.block_size
    config = SimpleNamespace(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        eos=-1,
        kvcache_block_size=settings.block_size,
        num_kvcache_blocks=settings.num_blocks,
    )
    scheduler = nano.scheduler.Scheduler(config)
    memory, decided, names, waiting, number = SlotMemory(), Decided(), {}, [*asks], 0
    while waiting or not scheduler.is_finished():
        while waiting and (waiting[0][0] <= number or scheduler.is_finished()):
            _, prompt, max_tokens = waiting.pop(0)
            seq = nano.Sequence(prompt, SimpleNamespace(temperature=1.0, max_tokens=max_tokens, ignore_eos=True))
            names[seq.seq_id] = len(names)
            scheduler.add(seq)
        seqs, is_prefill = scheduler.schedule()
        assert seqs
        run_step(memory, seqs, reads_first=settings.reads_first)
        row = [(names[seq.seq_id], seq.num_cached_tokens, seq.num_scheduled_tokens) for seq in seqs]
        decided.steps.append((is_prefill, row))
        decided.tables.append([[*seq.block_table] for seq in seqs])
        for seq in seqs:
            is_start = is_prefill and seq.seq_id not in decided.answers
            decided.answers.setdefault(seq.seq_id, [])
            decided.num_found += seq.num_cached_tokens if is_start else 0
            decided.num_computed += seq.num_scheduled_tokens if is_prefill else 0
        before = len(scheduler.waiting)
        tokens = [(sum(seq.token_ids) * 31 + len(seq)) % VOCABULARY for seq in seqs]
        scheduler.postprocess(seqs, tokens, is_prefill)
        for seq in seqs:
            decided.answers[seq.seq_id] = seq.token_ids[seq.num_prompt_tokens :]
        assert len(scheduler.waiting) == before
        number += 1
    decided.answers = {names[seq_id]: answer for seq_id, answer in decided.answers.items()}
    starts = {}
    for is_prefill, row in decided.steps:
        for name, start, _ in row if is_prefill else ():
            starts.setdefault(name, []).append(start)
    decided.num_preempted = sum(later <= earlier for begins in starts.values() for earlier, later in pairwise(begins))
    free = scheduler.block_manager
    left = free.manager.num_free_blocks if hasattr(free, "manager") else None
    assert left in (None, settings.num_blocks), f"{settings.num_blocks - left} blocks were not given back"
    if left is not None:
        free.manager.check()
    return decided


def first_difference(theirs, ours):
    """The first step in which two runs decided differently, None if there is none."""
    for number, pair in enumerate(zip(theirs.steps, ours.steps, strict=False)):
        if pair[0] != pair[1]:
            return number, *pair
    return None if len(theirs.steps) == len(ours.steps) else (len(theirs.steps), len(ours.steps))
