"""What the pool can serve at all: how long a request may be, and what pins leave of the pool.

The oldest request gets the blocks of all others if need be. So all that can stand in its way for good are the model's
context, the size of the pool, and what pins of priority 100 keep of it: the blocks that it doesn't share with them.
Where they do, a scheduler would wait for ever; it raises StalledError instead, and the caller may unpin.
"""

from kvblocks.block import KVCacheBlock
from kvblocks.engine.request import Request
from kvblocks.errors import InvalidArgumentError, PoolExhaustedError
from kvblocks.manager import KVCacheManager
from kvblocks.retention import KEEP


class StalledError(PoolExhaustedError):
    """Pins leave no room for `request`, though nobody else stands in its way."""

    def __init__(self, message: str, request: Request) -> None:
        super().__init__(message)
        self.request = request


def check_fits(manager: KVCacheManager, request: Request, max_model_len: int) -> None:
    """Raise if the request could never finish, even alone. Changes nothing.

    InvalidArgumentError: it never will; PoolExhaustedError: not while the present pins stand. O(1), and O(tokens
    pinned + prompt) with pins.
    """
    sequence = request.sequence
    num_tokens = sequence.num_prompt_tokens + request.max_tokens
    asked = f"{num_tokens} (a prompt of {sequence.num_prompt_tokens} and max_tokens {request.max_tokens})"
    if num_tokens > max_model_len:
        raise InvalidArgumentError(f"expected at most {max_model_len} tokens, the model's context, got {asked}")
    block_size = manager.block_size
    num_slots = manager.num_blocks * block_size
    if num_tokens - 1 > num_slots:  # the last token generated needs no slot
        raise InvalidArgumentError(
            f"expected at most {num_slots + 1} tokens, what the pool's {manager.num_blocks} blocks of"
            f" {block_size} can serve, got {asked}"
        )
    kept = _kept_blocks(manager)
    if not kept:
        return
    num_left = manager.num_blocks - len(kept.difference(_find_cached(manager, request)[0]))
    if num_tokens - 1 > num_left * block_size:
        raise PoolExhaustedError(
            f"expected at most {num_left * block_size + 1} tokens while pins keep {len(kept)} of the pool's"
            f" {manager.num_blocks} blocks, got {asked}: unpin something, or wait for pins to expire"
        )


def check_oldest(manager: KVCacheManager, request: Request, num_tokens: int, max_num_tokens: int) -> None:
    """Raise StalledError if the oldest running request, just refused, can't go on though all others give way.

    It can if the rest of the pool holds its first `num_tokens` tokens: beside the blocks that it has, or, if it starts
    anew with at most `max_num_tokens` tokens, beside those that the cache then has for it, which pins may hold also.
    Changes nothing. O(tokens pinned + the request's tokens).
    """
    kept = _kept_blocks(manager)
    if not kept:
        return
    cached, num_cached_tokens = _find_cached(manager, request)
    num_tokens_anew = max(num_tokens, min(num_cached_tokens + max_num_tokens, request.sequence.num_tokens))
    for num_wanted, blocks in ((num_tokens, request.sequence.blocks), (num_tokens_anew, cached)):
        if num_wanted <= (manager.num_blocks - len(kept.difference(blocks))) * manager.block_size:
            return
    raise stalled(manager, request)


def stalled(manager: KVCacheManager, request: Request) -> StalledError:
    """The error for a request that the pool, with nobody else in the way, has just refused. O(tokens pinned)."""
    refusal = manager.last_refusal
    wanted = "" if refusal is None else f" {refusal.num_blocks} more blocks"
    return StalledError(
        f"expected{wanted} for {request.sequence}, the next in line, once all others give way; got too few: pins of"
        f" priority {KEEP} keep {len(_kept_blocks(manager))} of the pool's {manager.num_blocks}. Nothing was changed:"
        f" unpin something or cancel the request (manager.last_refusal has the numbers)",
        request,
    )


def _kept_blocks(manager: KVCacheManager) -> set[KVCacheBlock]:
    """Blocks that pins never give up: those that they hold, and those that they will when a request lets go of them."""
    kept: set[KVCacheBlock] = set()
    for pin in manager.pins:
        cached = manager.get_computed_blocks(pin.sequence).blocks
        kept.update(block for block, priority in zip(cached, pin.priorities, strict=False) if priority >= KEEP)
    return kept


def _find_cached(manager: KVCacheManager, request: Request) -> tuple[list[KVCacheBlock], int]:
    """The blocks that the request would hit if it started now, and how many tokens it would not compute."""
    sequence = request.sequence
    hit = manager.get_computed_blocks(sequence.fork("probe") if sequence.is_allocated else sequence)
    return hit.blocks, hit.num_tokens
