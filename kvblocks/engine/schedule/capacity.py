"""What the pool can serve at all: how long a request may be, and how much of the pool is left by pins.

If needed, the oldest request gets the blocks of all others. So only three things can stop it for good: the model's
context, the size of the pool, and pins of priority 100 on blocks that it doesn't share. In the last case the scheduler
raises StalledError instead of waiting for ever, and the caller may unpin.

A sequence needs blocks in every group of layers. In groups with a window it needs only blocks that a step sees, so the
longest possible request depends on how many of its tokens one step computes at most.
"""

from bisect import bisect_right
from collections.abc import Iterable

from kvblocks import CacheHit, Group, KVCacheBlock, KVCacheManager, RecurrentState, Sequence
from kvblocks.arguments import counted
from kvblocks.engine.errors import RequestTooLongError
from kvblocks.engine.schedule.request import Request
from kvblocks.errors import PoolExhaustedError

NO_LIMIT = 1 << 62

_KEEP = 100  # the priority of pins that give up no block: `manager.pins.pin`


class StalledError(PoolExhaustedError):
    """Pins leave too few blocks for `request`, even if it gets the blocks of all other requests."""

    def __init__(self, message: str, request: Request) -> None:
        super().__init__(message)
        self.request = request


def check_fits(manager: KVCacheManager, request: Request, max_model_len: int, num_step_tokens: int) -> None:
    """Raise an error if the request could never finish, even alone, in steps of `num_step_tokens` tokens.

    Raises RequestTooLongError if it never could, and PoolExhaustedError if it couldn't until a pin ends. Changes
    nothing. O(groups), and O(tokens pinned + prompt) with pins.
    """
    sequence = request.sequence
    num_tokens = sequence.num_prompt_tokens + request.max_tokens
    asked = f"{num_tokens} (a prompt of {sequence.num_prompt_tokens} and max_tokens {request.max_tokens})"
    if num_tokens > max_model_len:
        raise RequestTooLongError(f"expected at most {max_model_len} tokens, the model's context, got {asked}")
    num_last = min(1, request.max_tokens)  # the last generated token needs no slot
    num_wanted = count_blocks(manager.groups, num_tokens - num_last, num_step_tokens)
    if num_wanted > manager.num_blocks:
        most = _most_tokens(manager, manager.num_blocks, num_step_tokens, num_tokens)
        raise RequestTooLongError(
            f"expected at most {most + num_last} tokens, what the pool's {counted(manager.num_blocks, 'block')} of"
            f" {manager.block_size} can serve, got {asked}"
        )
    kept = _kept_blocks(manager)
    if not kept:
        return
    num_left = manager.num_blocks - len(kept.difference(_find_cached(manager, request)[0]))
    if num_wanted > num_left:
        most = _most_tokens(manager, num_left, num_step_tokens, num_tokens)
        raise PoolExhaustedError(
            f"expected at most {most + num_last} tokens while pins keep {len(kept)} of the pool's"
            f" {counted(manager.num_blocks, 'block')}, got {asked}: unpin something, or wait for pins to expire"
        )


def max_request_tokens(manager: KVCacheManager, max_model_len: int, num_step_tokens: int) -> int:
    """Return the most tokens, prompt and answer, of a request that shares no blocks that pins of priority 100 keep.

    O(groups * log(tokens)), and O(tokens pinned) with pins.
    """
    num_left = manager.num_blocks - len(_kept_blocks(manager))
    return min(max_model_len, 1 + _most_tokens(manager, num_left, num_step_tokens, max_model_len))


def check_oldest(manager: KVCacheManager, request: Request, num_tokens: int, max_num_tokens: int) -> None:
    """Raise StalledError if the oldest running request, just refused, can't go on even when all others give way.

    It can go on if the pool has room for its first `num_tokens` tokens, in addition to the blocks that it has. It can
    also go on by starting again with at most `max_num_tokens` tokens, if there is room in addition to the blocks that
    it would hit, which pins may hold. Changes nothing. O(tokens pinned + the request's tokens).
    """
    kept = _kept_blocks(manager)
    if not kept:
        return
    cached, num_cached_tokens = _find_cached(manager, request)
    num_tokens_anew = max(num_tokens, min(num_cached_tokens + max_num_tokens, request.sequence.num_tokens))
    for num_wanted, blocks in ((num_tokens, blocks_of(manager, request.sequence)), (num_tokens_anew, cached)):
        num_left = manager.num_blocks - len(kept.difference(blocks))
        if count_blocks(manager.groups, num_wanted, max_num_tokens) <= num_left:
            return
    raise stalled(manager, request)


def stalled(manager: KVCacheManager, request: Request) -> StalledError:
    """Make the error for a request that the pool has just refused, with no other request to preempt.

    O(tokens pinned).
    """
    refusal = manager.last_refusal
    wanted = "" if refusal is None else f" {counted(refusal.num_blocks, 'more block')}"
    return StalledError(
        f"expected{wanted} for {request.sequence}, the next in line, once all others give way; got too few: pins of"
        f" priority {_KEEP} keep {len(_kept_blocks(manager))} of the pool's {manager.num_blocks}. Nothing was changed:"
        f" unpin something or cancel the request (manager.last_refusal has the numbers)",
        request,
    )


def count_blocks(groups: Iterable[Group], num_tokens: int, num_step_tokens: int) -> int:
    """The most blocks, in all groups, that a sequence holds. O(groups)."""
    return sum([group.num_blocks(num_tokens, num_step_tokens) for group in groups])


def fitting_tokens(manager: KVCacheManager, request: Request, num_tokens: int, hit: CacheHit | None = None) -> int:
    """`num_tokens`, or fewer if a step of so many tokens would need more blocks than the pool has.

    This happens if the limits were replaced after the request was checked for smaller steps. If layers keep a state,
    the result may also be smaller so that a step ends where the state is saved. hit: the cache hit of a request without
    blocks. Mostly O(groups).
    """
    if num_tokens <= 1:  # a decode can't be cut
        return num_tokens
    num_known = request.sequence.num_tokens
    while num_tokens > 1 and count_blocks(manager.groups, num_known, num_tokens) > manager.num_blocks:
        num_tokens //= 2
    if keeps_states(manager):
        sequence = request.sequence
        start = sequence.num_computed_tokens if hit is None else hit.num_tokens
        return manager.states.next_cut(sequence, start + num_tokens, hit) - start
    return num_tokens


def keeps_states(manager: KVCacheManager) -> bool:
    """Whether layers keep a state. O(groups)."""
    return any(isinstance(group, RecurrentState) for group in manager.groups)


def may_fork(manager: KVCacheManager, sequence: Sequence) -> bool:
    """Whether a sequence can be forked now. If layers keep a state, a slot must be free and no load under way.

    O(groups).
    """
    if not keeps_states(manager):
        return True
    is_loading = len(manager.tiers) > 0 and manager.tiers.is_loading(sequence)
    return not is_loading and manager.states.num_free_slots > 0


def num_possible_forks(manager: KVCacheManager) -> int:
    """How many forks are possible now: if layers keep a state, each takes a slot. O(groups)."""
    return manager.states.num_free_slots if keeps_states(manager) else NO_LIMIT


def most_pool_tokens(manager: KVCacheManager, num_step_tokens: int) -> int:
    """Return the most tokens of one sequence that fit into the whole pool. O(groups * log(tokens))."""
    return _most_tokens(manager, manager.num_blocks, num_step_tokens, manager.num_blocks * manager.block_size + 1)


def _most_tokens(manager: KVCacheManager, num_blocks: int, num_step_tokens: int, below: int) -> int:
    """The longest sequence, shorter than `below`, that so many blocks hold. O(groups * log(below))."""
    groups = manager.groups
    return bisect_right(range(below), num_blocks, key=lambda tokens: count_blocks(groups, tokens, num_step_tokens)) - 1


def blocks_of(manager: KVCacheManager, holder: Sequence | CacheHit) -> list[KVCacheBlock]:
    """The blocks of a sequence or a hit in all groups. O(blocks)."""
    tables = [holder.group_blocks(group) for group in range(len(manager.groups))]
    return [block for table in tables for block in table if block is not None]


def _kept_blocks(manager: KVCacheManager) -> set[KVCacheBlock]:
    """Blocks that pins never give up: those that they hold, and those that they get when a request frees them."""
    kept: set[KVCacheBlock] = set()
    for pin in manager.pins:
        # A pin may hold more than can be hit, if a group lacks a block, and virtual blocks, which take no memory.
        for blocks in (pin.blocks, manager.get_computed_blocks(pin.sequence).blocks):
            kept.update(block for block, priority in zip(blocks, pin.priorities, strict=False) if priority >= _KEEP)
        if all(priority >= _KEEP for priority in pin.priorities):
            kept.update(pin.attached_blocks)
    return {block for block in kept if block.block_id < manager.num_blocks}


def _find_cached(manager: KVCacheManager, request: Request) -> tuple[list[KVCacheBlock], int]:
    """The blocks that the request would hit if it started now, and the number of tokens in them."""
    sequence = request.sequence
    probe = sequence.fork("probe") if sequence.is_allocated else sequence
    hit = manager.get_computed_blocks(probe, request.max_hit_tokens)
    return blocks_of(manager, hit), hit.num_tokens
