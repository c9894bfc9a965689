"""Blocks that are taken together are those that would be taken one by one."""

from random import Random

import pytest

from kvblocks import FullAttention, KVCacheManager, RecurrentState, Sequence, SlidingWindow

STATE = RecurrentState(2, 3, 3)


def walk(manager: KVCacheManager, seed: int) -> list[object]:
    """Prompts that share beginnings come, are cut into chunks, decode and go. Returns which blocks everything got."""
    random, seen, running = Random(seed), list[object](), list[Sequence]()
    for number in range(150):
        if len(running) == 3 or (running and random.random() < 0.4):
            sequence = running.pop(random.randrange(len(running)))
            manager.free(sequence)
        else:
            first = random.choice([0, 100])
            shared, own = random.choice([0, 7, 20, 60]), random.randrange(1, 60)
            sequence = Sequence(number, [*range(first, first + shared), *range(1000 * number, 1000 * number + own)])
            hit, start = manager.get_computed_blocks(sequence), 0
            while start < sequence.num_tokens:
                found = None if sequence.is_allocated else hit
                before = start if found is None else hit.num_tokens
                start = manager.states.next_cut(sequence, sequence.num_tokens, found)
                if manager.allocate_slots(sequence, start - before, found) is None:
                    seen.append(manager.last_refusal)
                    if sequence.is_allocated:
                        manager.free(sequence)
                    break
                seen.append([list(sequence.group_block_ids(group)) for group in range(len(manager.groups or ()))])
                seen.append(manager.states.take_copies())
            else:
                running.append(sequence)
        seen.append((manager.num_free_blocks, manager.stats.num_evicted_blocks))
        manager.check()
    return seen


@pytest.mark.parametrize("groups", [(FullAttention(2), STATE), (STATE, FullAttention(1), SlidingWindow(2, 5))])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_the_same_as_one_by_one(groups, seed):
    """With events each block is evicted by itself, so that its name is told."""
    together = walk(KVCacheManager(90, groups=groups), seed)
    assert together == walk(KVCacheManager(90, groups=groups, enable_events=True), seed)
