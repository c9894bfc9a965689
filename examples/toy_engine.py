"""A toy engine on kvblocks: what docs/tutorial.md builds, step by step. Run it: it needs no torch.

A token's KV is the token itself, and the next token is a sum over all KV, so one wrong block gives a wrong answer.
"""

from kvblocks import KVCacheManager, Sequence

BLOCK_SIZE, NUM_BLOCKS, MAX_STEP_TOKENS, MAX_NEW_TOKENS = 4, 12, 32, 6
LATE = False

manager = KVCacheManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
kv_cache = [[0] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
waiting: list[Sequence] = []
running: list[Sequence] = []
num_samples: dict[str, int] = {}
answers: dict[str, list[int]] = {}


def store(sequence: Sequence, start: int) -> None:
    """Write the KV of the tokens from `start` on. Shared blocks already have theirs."""
    token_ids = sequence.token_ids()
    for position in range(max(start, sequence.num_readonly_tokens), sequence.num_computed_tokens):
        block_id = sequence.block_ids[position // BLOCK_SIZE]
        kv_cache[block_id][position % BLOCK_SIZE] = token_ids[position]


def attend(sequence: Sequence) -> int:
    """Read the KV of all tokens so far, and choose the next token."""
    total = 0
    for position in range(sequence.num_computed_tokens):
        block_id = sequence.block_ids[position // BLOCK_SIZE]
        total += (position + 1) * kv_cache[block_id][position % BLOCK_SIZE]
    return total % 1000


def forward(step: list[tuple[Sequence, int]]) -> list[int]:
    """Compute a step: copy what forks need, store everything, and only then attend."""
    for _, source, destination in manager.take_copies():
        kv_cache[destination] = list(kv_cache[source])
    for sequence, start in step:
        store(sequence, start)
    return [attend(sequence) for sequence, _ in step]


def schedule() -> list[tuple[Sequence, int]]:
    """Choose what the next step computes: sequences, and the first position of each that is computed."""
    step: list[tuple[Sequence, int]] = []
    budget, num_running = MAX_STEP_TOKENS, len(running)
    while len(step) < len(running) and budget:
        sequence = running[len(step)]
        start = sequence.num_computed_tokens
        num_tokens = min(budget, sequence.num_tokens - start)
        if manager.allocate_slots(sequence, num_tokens, delay_cache_blocks=LATE) is None:
            manager.free(running[-1])  # the youngest, which this step has not reached
            waiting.insert(0, running.pop())
            continue
        step.append((sequence, start))
        budget -= num_tokens
    while waiting and budget and len(running) >= num_running:
        hit = manager.get_computed_blocks(waiting[0])
        num_tokens = min(budget, waiting[0].num_tokens - hit.num_tokens)
        if manager.allocate_slots(waiting[0], num_tokens, hit=hit, delay_cache_blocks=LATE) is None:
            break
        running.append(waiting.pop(0))
        step.append((running[-1], hit.num_tokens))
        budget -= num_tokens
    return step


def sample(sequence: Sequence, token: int) -> None:
    """Add a sampled token, or end the sequence. After the prompt, fork it into as many samples as requested."""
    for number in range(1, num_samples.pop(sequence.sequence_id, 1)):
        child = manager.fork(sequence, f"{sequence.sequence_id}/{number}")
        running.append(child)
        child.append_tokens([token + number])
    sequence.append_tokens([token])
    if sequence.num_tokens == sequence.num_prompt_tokens + MAX_NEW_TOKENS:
        answers[sequence.sequence_id] = sequence.token_ids(sequence.num_prompt_tokens)
        running.remove(sequence)
        manager.free(sequence)


def run() -> None:
    """Serve until nobody waits."""
    while waiting or running:
        step = schedule()
        for (sequence, _), token in zip(step, forward(step), strict=True):
            if LATE:
                manager.cache_blocks(sequence, sequence.num_computed_tokens)
            if sequence.num_computed_tokens == sequence.num_tokens:
                sample(sequence, token)
        manager.check()


if __name__ == "__main__":
    system = list(range(100, 114))
    waiting += [Sequence(name, [*system, number]) for number, name in enumerate(["ann", "bob", "cid", "dee"])]
    num_samples["bob"] = 2
    run()
    print(answers, manager.stats, sep="\n")
