"""A continuous-batching engine in miniature: the whole loop around kvblocks, with a toy in the place of the model.

The toy's "KV" of a token is the token itself, and its next token is a sum over the context, read slot by slot through
the block table, as paged attention reads it. So wrong blocks would give wrong answers. Run it: it needs no torch.
"""

from kvblocks import KVCacheManager, Sequence

MAX_STEP_TOKENS, MAX_NEW_TOKENS = 32, 6
manager = KVCacheManager(num_blocks=10, block_size=4)
kv_cache = [0] * (manager.num_blocks * manager.block_size)


def slot(sequence: Sequence, position: int) -> int:
    return sequence.block_ids[position // manager.block_size] * manager.block_size + position % manager.block_size


def schedule(running: list[Sequence], waiting: list[Sequence]) -> list[tuple[Sequence, int]]:
    """Choose what the step computes: (sequence, first position) each, with slots up to num_computed_tokens."""
    step: list[tuple[Sequence, int]] = []
    budget, num_running = MAX_STEP_TOKENS, len(running)
    while len(step) < len(running) and budget:
        sequence = running[len(step)]
        start = sequence.num_computed_tokens
        num_tokens = min(budget, sequence.num_tokens - start)
        if manager.allocate_slots(sequence, num_tokens) is None:
            manager.free(running[-1])  # the pool is dry: the youngest, not in this step yet, waits and is recomputed
            waiting.insert(0, running.pop())
            print(f"{waiting[0].sequence_id}: preempted")
            continue
        step.append((sequence, start))
        budget -= num_tokens
    while waiting and budget and len(running) >= num_running:
        hit = manager.get_computed_blocks(waiting[0])
        num_tokens = min(budget, waiting[0].num_tokens - hit.num_tokens)
        if manager.allocate_slots(waiting[0], num_tokens, hit=hit) is None:
            break
        print(f"{waiting[0].sequence_id}: {hit.num_tokens} of {waiting[0].num_tokens} tokens cached")
        running.append(waiting.pop(0))
        step.append((running[-1], hit.num_tokens))
        budget -= num_tokens
    return step


def run_model(step: list[tuple[Sequence, int]]) -> list[int]:
    """Store the step's KV, all of it, then attend: so sequences may share blocks that are filled in this very step."""
    for sequence, start in step:
        end = sequence.num_computed_tokens
        for position, token in enumerate(sequence.token_ids(start, end), start):
            if position >= sequence.num_readonly_tokens:  # what lies in shared blocks is there already
                kv_cache[slot(sequence, position)] = token
    contexts = [[kv_cache[slot(s, position)] for position in range(s.num_computed_tokens)] for s, _ in step]
    return [sum(position * token for position, token in enumerate(context, 1)) % 1000 for context in contexts]


def generate(prompts: dict[str, list[int]]) -> dict[str | int, list[int]]:
    """Continue all prompts by MAX_NEW_TOKENS tokens."""
    waiting = [Sequence(name, prompt) for name, prompt in prompts.items()]
    running: list[Sequence] = []
    answers: dict[str | int, list[int]] = {}
    while running or waiting:
        step = schedule(running, waiting)
        for (sequence, _), token in zip(step, run_model(step), strict=True):
            if sequence.num_computed_tokens < sequence.num_tokens:
                continue  # a chunk from the middle of a prompt: nothing to sample yet
            sequence.append_tokens([token])
            if sequence.num_tokens == sequence.num_prompt_tokens + MAX_NEW_TOKENS:
                answers[sequence.sequence_id] = sequence.token_ids(sequence.num_prompt_tokens)
                running.remove(sequence)
                manager.free(sequence)
        manager.check()
    return answers


system = list(range(100, 114))
answers = generate({name: [*system, number] for number, name in enumerate(["ann", "bob", "cid", "dee"])})
print(answers, manager.stats, sep="\n")
