"""Failed loads: requests compute the missing tokens in the same blocks, and nobody else hits these before then."""

from kvblocks import KVCacheManager, Sequence


class FailedLoads:
    """The requests that compute again what a load within a step failed to bring.

    vLLM counts such a load as done when it makes room for it. So all of its blocks are cached by then.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._sequences: set[Sequence] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def note(self, sequence: Sequence, num_tokens: int) -> None:
        """Stop caching what is behind a sequence's first `num_tokens` tokens, until all of it is computed again."""
        uncache(self._manager, sequence, num_tokens)
        self._sequences.add(sequence)

    def cache_again(self, sequence: Sequence, end: int) -> None:
        """Cache what is complete again after this step, which computes a sequence's tokens up to `end`."""
        if sequence in self._sequences:
            if end < sequence.num_computed_tokens:
                return
            self._sequences.discard(sequence)
        self._manager.cache_blocks(sequence, min(end, sequence.num_computed_tokens))

    def forget(self, sequence: Sequence) -> None:
        """Forget a freed sequence."""
        self._sequences.discard(sequence)


def uncache(manager: KVCacheManager, sequence: Sequence, num_tokens: int) -> None:
    """Stop caching what a sequence holds behind its first `num_tokens` tokens, and all that is chained to it."""
    for group, kind in enumerate(manager.groups):
        blocks = sequence.group_blocks(group)[num_tokens // kind.block_size :]
        manager.evict_blocks([block.block_id for block in blocks if block is not None and block.is_cached])
