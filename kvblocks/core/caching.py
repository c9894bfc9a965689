"""Looking a sequence up in the prefix index, caching its blocks as they fill, and undoing that.

The index works with packed tokens and nodes, the manager with sequences and slots. This module connects the two. A
sequence's first `num_cached_blocks` blocks were hit or cached here, so the next block is cached below the last of them.
"""

from kvblocks.core.block import ROOT, Epoch, KVCacheBlock
from kvblocks.core.hooks import Digests
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence


def find_blocks(index: PrefixIndex, sequence: Sequence, max_tokens: int | None = None) -> list[KVCacheBlock]:
    """Return the full blocks that hold the longest cached prefix of the sequence's known tokens. Changes nothing.

    max_tokens: the most tokens in the prefix; None: no limit.
    """
    block_size = index.block_size
    tokens = memoryview(sequence.tokens)
    num_tokens = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
    return index.match(tokens, sequence.encoded_keys(block_size), num_tokens // block_size)


def digests_ahead(
    index: PrefixIndex, sequence: Sequence, epoch: Epoch | None, held: list[KVCacheBlock], num_held: int, end: int
) -> Digests | None:
    """Return the digests that caching the sequence's first `end` tokens will record; None if nothing records them.

    epoch: the sequence's epoch from this call on. held: a table whose first `num_held` blocks are cached: the
    sequence's own, or that of the hit it starts with. This runs before anything is changed, so a hash function that
    raises does no harm. Changes nothing. O(new full blocks).
    """
    first, last = num_held, end // index.block_size
    if not index.needs_digests or first >= last or epoch is not index.epoch:
        return None
    node = held[first - 1].node if first else ROOT
    keys = sequence.encoded_keys(index.block_size)
    return Digests(index.digests(node, sequence.packed_tokens(), keys, first, last), sequence.sequence_id)


def cache_full_blocks(index: PrefixIndex, sequence: Sequence, digests: Digests | None) -> None:
    """Cache those of the sequence's blocks that have become full. O(newly cached blocks).

    Caches nothing if the sequence is from before a reset, or while some of its tokens are delayed or lost. `cache_from`
    caches those later.
    """
    first, end = sequence.num_cached_blocks, sequence.num_computed_tokens // index.block_size
    is_awaited = sequence.delayed_from is not None or sequence.lost_from is not None
    if first >= end or is_awaited or sequence.epoch is not index.epoch:
        return
    node = sequence.blocks[first - 1].node if first else ROOT
    keys = None if sequence.keys is None else sequence.encoded_keys(index.block_size)
    index.cache(node, sequence.blocks[first:end], memoryview(sequence.tokens).cast("B"), keys, first, digests)
    sequence.num_cached_blocks = end
    sequence.run = sequence.blocks[end - 1].run


def cache_filled_blocks(index: PrefixIndex, sequences: list[Sequence]) -> None:
    """`cache_full_blocks` for sequences that each filled a block with one decoded token. Records no digests.

    O(1) for each block that extends a run.
    """
    block_size, epoch = index.block_size, index.epoch
    for sequence in sequences:
        first = sequence.num_cached_blocks
        is_next = sequence.num_computed_tokens == (first + 1) * block_size and sequence.delayed_from is None
        if is_next and first and sequence.keys is None and sequence.epoch is epoch and sequence.lost_from is None:
            parent = sequence.blocks[first - 1]
            run = sequence.run or parent.run
            if run is not None and index.cache_one(run, parent, sequence.blocks[first], sequence.tokens[-block_size:]):
                sequence.num_cached_blocks = first + 1
                sequence.run = run
                continue
        cache_full_blocks(index, sequence, None)


def cache_from(index: PrefixIndex, sequence: Sequence, first: int, end: int, digests: Digests | None) -> None:
    """Cache blocks first to end - 1 of a sequence, all of them full, and those before them cached. O(end - first).

    Blocks that are cached already, by sequences that share them, stay as they are.
    """
    blocks, size = sequence.blocks, index.epoch.num_digest_bytes
    tokens, keys = sequence.packed_tokens(), sequence.encoded_keys(index.block_size)
    node, start = blocks[first - 1].node if first else ROOT, first
    while start < end:
        stop = start
        while stop < end and not blocks[stop].is_cached:
            index.forget(blocks[stop])  # in case it was cached before a reset
            stop += 1
        if stop > start:
            ahead = digests
            if digests is not None:
                ahead = Digests(digests.packed[(start - first) * size : (stop - first) * size], digests.sequence_id)
            index.cache(node, blocks[start:stop], tokens, keys, start, ahead)
        while stop < end and blocks[stop].is_cached:
            stop += 1
        node, start = blocks[stop - 1].node, stop
    sequence.epoch = index.epoch
    sequence.num_cached_blocks = end
