"""The samples of a prompt. They are siblings of the first one until the prompt is computed, then separate requests."""

from collections import deque

from kvblocks import KVCacheManager
from kvblocks.engine.schedule.capacity import may_fork, num_possible_forks
from kvblocks.engine.schedule.request import Request


def fork_samples(
    manager: KVCacheManager, request: Request, running: list[Request], waiting: deque[Request], max_num_seqs: int
) -> None:
    """Fork a running request's prompt for its siblings. Those beyond the limits wait at the front.

    O(prompt) for each.
    """
    siblings, request.siblings = request.siblings, []
    num_forks = max(0, min(max_num_seqs - len(running), num_possible_forks(manager)))
    forks, others = siblings[:num_forks], siblings[num_forks:]
    for sample in siblings:
        sample.num_cached_tokens, sample.was_admitted = request.sequence.num_prompt_tokens, True
    for sample in forks:
        sample.sequence = manager.fork(request.sequence, sample.sequence.sequence_id)
    index = running.index(request) + 1
    running[index:index] = forks
    waiting.extendleft(reversed(others))


def hand_over(
    manager: KVCacheManager, request: Request, running: list[Request], waiting: deque[Request], *, is_open: bool
) -> None:
    """Let the next sample run in the place of a request that ends, or wait at the front of the queue if it can't.

    is_open: whether the request has an open chunk. O(prompt).
    """
    heir = request.hand_over()
    if is_open or not may_fork(manager, request.sequence):
        waiting.appendleft(heir)
    else:
        heir.sequence = manager.fork(request.sequence, heir.sequence.sequence_id)
        running.insert(running.index(request), heir)
