"""kvblocks' own `KVCacheManager`."""

from collections.abc import Iterable, Sequence

import kvblocks
from kvblocks.verify.adapter import CacheAdapter, Slot, WalkRequest


class ManagerAdapter(CacheAdapter):
    """A `KVCacheManager` of `num_blocks` blocks. delays: whether blocks are cached only when the step has run.

    A subclass may make another manager in `make`.
    """

    block_size = 4

    def __init__(self, num_blocks: int, *, delays: bool = False) -> None:
        self.num_slots = num_blocks * self.block_size
        self.delays = delays
        self.manager = self.make(num_blocks)
        self._running: list[WalkRequest] = []
        self._num_made = 0

    def make(self, num_blocks: int) -> kvblocks.KVCacheManager:
        """Return a new manager."""
        return kvblocks.KVCacheManager(num_blocks, self.block_size)

    def start(self, request: WalkRequest, num_new_tokens: int) -> int | None:
        """Look up and allocate."""
        self._num_made += 1
        sequence = kvblocks.Sequence(f"{request.name}/{self._num_made}", request.token_ids, salt=request.salt)
        hit = self.manager.get_computed_blocks(sequence, max_tokens=len(request.token_ids) - 1)
        num_new = min(num_new_tokens, len(request.token_ids) - hit.num_tokens)
        if self.manager.allocate_slots(sequence, num_new, hit=hit, delay_cache_blocks=self.delays) is None:
            return None
        request.state = sequence
        self._running.append(request)
        return hit.num_tokens

    def grow(self, request: WalkRequest, num_tokens: int) -> bool:
        """Append the tokens that the sequence doesn't have, or continue its prompt."""
        sequence: kvblocks.Sequence = request.state
        new = request.token_ids[sequence.num_tokens :]
        if new:
            return self.manager.append_slots(sequence, new, delay_cache_blocks=self.delays) is not None
        num_new = num_tokens - sequence.num_computed_tokens
        return self.manager.allocate_slots(sequence, num_new, delay_cache_blocks=self.delays) is not None

    def slots(self, request: WalkRequest) -> Sequence[Slot]:
        """Slots by block ids."""
        ids = request.state.block_ids
        return [block_id * self.block_size + offset for block_id in ids for offset in range(self.block_size)]

    def free(self, request: WalkRequest) -> None:
        """Free the sequence."""
        self._running.remove(request)
        self.manager.free(request.state)

    def end_step(self) -> None:
        """Cache what is written, if that was delayed."""
        if self.delays:
            for request in self._running:
                self.manager.cache_blocks(request.state, request.num_written)

    def take_copies(self) -> Iterable[tuple[Slot, Slot]]:
        """Copies on write, slot by slot."""
        size = self.block_size
        return [
            (source * size + offset, destination * size + offset)
            for _, source, destination in self.manager.take_copies()
            for offset in range(size)
        ]

    def fail_step(self, requests: Iterable[WalkRequest]) -> bool:
        """Abort the sequences."""
        for request in requests:
            self._running.remove(request)
            self.manager.abort(request.state, request.num_written)
        return True

    def reset(self) -> bool:
        """Reset the prefix cache."""
        self.manager.reset_prefix_cache()
        return True

    def num_free_slots(self) -> int:
        """All free blocks, cached or not."""
        return self.manager.num_free_blocks * self.block_size

    def check(self) -> None:
        """Check the manager's invariants."""
        self.manager.check()
