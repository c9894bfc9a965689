"""nano-vllm's `BlockManager`, as its scheduler calls it. Written for commit bb823b3, which has no release."""

from collections.abc import Sequence

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence as NanoSequence

from kvblocks.verify.adapter import CacheAdapter, Slot, WalkRequest


class NanoVllmAdapter(CacheAdapter):
    """A manager of `num_blocks` blocks. A prompt gets all its blocks at once, and they are cached after the step."""

    block_size = 4
    has_salts = False

    def __init__(self, num_blocks: int) -> None:
        self.num_slots = num_blocks * self.block_size
        NanoSequence.block_size = self.block_size
        self.manager = BlockManager(num_blocks, self.block_size)
        self._in_step: list[NanoSequence] = []

    def start(self, request: WalkRequest, num_new_tokens: int) -> int | None:
        """Look up and allocate. The first chunk has `num_new_tokens` tokens."""
        sequence = NanoSequence(list(request.token_ids))
        num_cached_blocks = self.manager.can_allocate(sequence)
        if num_cached_blocks == -1:
            return None
        self.manager.allocate(sequence, num_cached_blocks)
        request.state = sequence
        num_hit_tokens = int(sequence.num_cached_tokens)
        self._schedule(sequence, min(num_hit_tokens + num_new_tokens, len(sequence)))
        return num_hit_tokens

    def grow(self, request: WalkRequest, num_tokens: int) -> bool:
        """Continue the prompt, or append tokens one by one."""
        sequence: NanoSequence = request.state
        new = request.token_ids[len(sequence) :]
        num_blocks = -(-(len(sequence) + len(new)) // self.block_size)
        if num_blocks - len(sequence.block_table) > len(self.manager.free_block_ids):
            return False
        for token in new:
            sequence.append_token(token)
            self.manager.may_append(sequence)
        self._schedule(sequence, num_tokens)
        return True

    def slots(self, request: WalkRequest) -> Sequence[Slot]:
        """Slots by block ids."""
        ids = request.state.block_table
        return [block_id * self.block_size + offset for block_id in ids for offset in range(self.block_size)]

    def free(self, request: WalkRequest) -> None:
        """Deallocate the sequence."""
        self.manager.deallocate(request.state)

    def end_step(self) -> None:
        """Cache what the step has filled, as `postprocess` does."""
        for sequence in self._in_step:
            self.manager.hash_blocks(sequence)
            sequence.num_cached_tokens += sequence.num_scheduled_tokens
            sequence.num_scheduled_tokens = 0
        self._in_step.clear()

    def num_free_slots(self) -> int:
        """All free blocks, cached or not."""
        return len(self.manager.free_block_ids) * self.block_size

    def _schedule(self, sequence: NanoSequence, num_tokens: int) -> None:
        sequence.num_scheduled_tokens = num_tokens - sequence.num_cached_tokens
        if sequence not in self._in_step:
            self._in_step.append(sequence)
