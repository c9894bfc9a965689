"""Looking a sequence up in the prefix index, caching its blocks as they get full, and undoing that.

The index works with packed tokens and nodes, the manager with sequences and slots. This module connects the two. A
sequence's first `num_cached_blocks` blocks were hit or cached here, so the next block is cached below the last of them.
"""

from kvblocks.core.block import ROOT, Epoch, KVCacheBlock
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence


def find_blocks(index: PrefixIndex, sequence: Sequence, max_tokens: int | None = None) -> list[KVCacheBlock]:
    """Return the full blocks that hold the longest cached prefix of the sequence's known tokens. Changes nothing.

    max_tokens: most tokens in the prefix; None: no limit.
    """
    block_size = index.block_size
    tokens = memoryview(sequence.tokens)
    num_tokens = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
    return index.match(tokens, sequence.encoded_keys(block_size), num_tokens // block_size)


def digests_ahead(
    index: PrefixIndex, sequence: Sequence, epoch: Epoch | None, held: list[KVCacheBlock], num_held: int, end: int
) -> bytearray | None:
    """Return the digests that caching the sequence's first `end` tokens will record; None when nothing records them.

    epoch: the sequence's, now or when it is allocated. held: a table whose first `num_held` blocks are cached: the
    sequence's own, or the hit that it starts with. This runs before anything is changed, so that a hash function that
    raises does no harm. Changes nothing. O(new full blocks).
    """
    first, last = num_held, end // index.block_size
    if not index.needs_digests or first >= last or epoch is not index.epoch:
        return None
    node = held[first - 1].node if first else ROOT
    if first and node[0] is None:
        return None
    keys = sequence.encoded_keys(index.block_size)
    return index.digests(node, sequence.packed_tokens(), keys, first, last)


def cache_full_blocks(index: PrefixIndex, sequence: Sequence, digests: bytearray | None) -> None:
    """Cache those of the sequence's blocks that have become full. O(their number).

    Caches nothing if the sequence is from before a reset, if an abort removed the prefix before these blocks, or while
    some of its tokens are delayed (`cache_from` caches them later).
    """
    first, end = sequence.num_cached_blocks, sequence.num_computed_tokens // index.block_size
    if first >= end or sequence.delayed_from is not None or sequence.epoch is not index.epoch:
        return
    node = ROOT
    if first:
        last = sequence.blocks[first - 1]
        if last.run is None:
            return
        node = last.run, last.index
    keys = None if sequence.keys is None else sequence.encoded_keys(index.block_size)
    if digests is not None and index.events is not None:
        index.events.storing = sequence.sequence_id
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
        if is_next and first and sequence.keys is None and sequence.epoch is epoch:
            parent = sequence.blocks[first - 1]
            run = sequence.run or parent.run
            if run is not None and index.cache_one(run, parent, sequence.blocks[first], sequence.tokens[-block_size:]):
                sequence.num_cached_blocks = first + 1
                sequence.run = run
                continue
        cache_full_blocks(index, sequence, None)


def first_uncached(sequence: Sequence) -> int:
    """Return how many first blocks of a sequence are still cached: fewer than it cached if some were forgotten.

    O(1 + blocks forgotten).
    """
    first = sequence.num_cached_blocks
    while first and not sequence.blocks[first - 1].is_cached:
        first -= 1
    return first


def digests_from(index: PrefixIndex, sequence: Sequence, first: int, end: int) -> bytearray | None:
    """Return the digests that `cache_from` will record for blocks first to end - 1; None when nothing records them.

    As `digests_ahead`.
    """
    if not index.needs_digests or first >= end:
        return None
    node = sequence.blocks[first - 1].node if first else ROOT
    return index.digests(node, sequence.packed_tokens(), sequence.encoded_keys(index.block_size), first, end)


def cache_from(index: PrefixIndex, sequence: Sequence, first: int, end: int, digests: bytearray | None) -> None:
    """Cache blocks first to end - 1 of a sequence. All must be full, and those before them cached. O(their number).

    Blocks that are cached already, by sequences that share them, stay as they are.
    """
    blocks, size = sequence.blocks, index.epoch.num_digest_bytes
    if index.events is not None:
        index.events.storing = sequence.sequence_id
    tokens, keys = sequence.packed_tokens(), sequence.encoded_keys(index.block_size)
    node, start = blocks[first - 1].node if first else ROOT, first
    while start < end:
        stop = start
        while stop < end and not blocks[stop].is_cached:
            index.forget(blocks[stop])  # in case it was cached before a reset
            stop += 1
        if stop > start:
            ahead = None if digests is None else digests[(start - first) * size : (stop - first) * size]
            index.cache(node, blocks[start:stop], tokens, keys, start, ahead)
        while stop < end and blocks[stop].is_cached:
            stop += 1
        node, start = blocks[stop - 1].node, stop
    sequence.epoch = index.epoch
    sequence.num_cached_blocks = end


def forget_unwritten(index: PrefixIndex, sequence: Sequence, num_computed_tokens: int) -> None:
    """Stop caching the sequence's own blocks beyond its first `num_computed_tokens`, and everything below them.

    This includes blocks that another sequence cached. A fork that was renewed may have cached a block that only this
    sequence writes.
    """
    block_size = index.block_size
    first_unwritten = max(sequence.num_readonly_tokens, num_computed_tokens) // block_size
    for block in reversed(sequence.blocks[first_unwritten : sequence.num_computed_tokens // block_size]):
        index.forget(block)
