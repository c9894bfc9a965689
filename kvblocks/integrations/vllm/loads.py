"""Failed loads: requests compute the missing tokens in the same blocks, which nobody else hits until then."""

from kvblocks import KVCacheManager, Sequence


class FailedLoads:
    """The requests that compute again what a failed load within a step should have brought.

    vLLM counts such a load as done when it makes room for it, so all of its blocks are cached by then.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._sequences: set[Sequence] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def note(self, sequence: Sequence, num_tokens: int) -> None:
        """Stop caching what comes after a sequence's first `num_tokens` tokens, until all of it is computed again."""
        uncache(self._manager, sequence, num_tokens)
        self._sequences.add(sequence)

    def cache_again(self, sequence: Sequence, end: int) -> None:
        """Cache again what this step completes, which computes a sequence's tokens up to `end`."""
        if sequence in self._sequences:
            if end < sequence.num_computed_tokens:
                return
            self._sequences.discard(sequence)
        self._manager.cache_blocks(sequence, min(end, sequence.num_computed_tokens))

    def forget(self, sequence: Sequence) -> None:
        """Forget a freed sequence."""
        self._sequences.discard(sequence)


def uncache(manager: KVCacheManager, sequence: Sequence, num_tokens: int) -> None:
    """Stop caching what a sequence holds after its first `num_tokens` tokens, and everything chained to that."""
    for group, kind in enumerate(manager.groups):
        blocks = sequence.group_blocks(group)[num_tokens // kind.block_size :]
        manager.evict_blocks([block.block_id for block in blocks if block is not None and block.is_cached])
