"""Agents that pause for tools, and a policy that learns who comes back soon. Run it: it needs no torch.

The engine says which conversation a request belongs to, when the conversation pauses, and why. Here half of the agents
call tools and come back within seconds. The rest wait for a person, who takes minutes. `eviction="sessions"` learns the
difference from the reasons. LRU can't see it.
"""

import random

from kvblocks import KVCacheManager, Sequence

NUM_SESSIONS, NUM_TURNS, TURN_TOKENS = 60, 12, 64


def hit_rate(eviction: str | None) -> float:
    """Serve all turns of all sessions on a simulated clock, and return the share of tokens that were cached."""
    chance = random.Random(7)
    manager = KVCacheManager(num_blocks=160, block_size=16, eviction=eviction)
    histories: dict[int, list[int]] = {number: [] for number in range(NUM_SESSIONS)}
    arrivals = [(chance.uniform(0, 300), number) for number in range(NUM_SESSIONS)]
    while arrivals:
        arrivals.sort()
        now, number = arrivals.pop(0)
        manager.now = now
        history = histories[number]
        history += [chance.randrange(50_000) for _ in range(TURN_TOKENS)]  # the question, and the answer before it

        sequence = Sequence((number, len(history)), history, session=number)
        if manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence)) is None:
            raise RuntimeError("the pool is full of running requests: wait, or preempt one")
        manager.free(sequence)

        if len(history) == NUM_TURNS * TURN_TOKENS:
            manager.sessions.end(number)  # its blocks are free at once
        elif number % 2:
            manager.sessions.pause(number, "tool_calls")
            arrivals.append((now + chance.expovariate(1 / 5), number))
        else:
            manager.sessions.pause(number, "stop")
            arrivals.append((now + chance.expovariate(1 / 600), number))
    manager.check()
    return manager.stats.num_hit_tokens / manager.stats.num_queried_tokens


lru, sessions = hit_rate(None), hit_rate("sessions")
print(f"tokens cached: {lru:.1%} with LRU, {sessions:.1%} with eviction='sessions'")
assert sessions > lru
