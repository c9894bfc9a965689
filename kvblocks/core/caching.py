"""Looking a sequence up in the prefix index, caching its blocks as they get full, and taking them back.

The index speaks of packed tokens and nodes, the manager of sequences and slots; this is what lies between. A sequence's
first `num_cached_blocks` blocks were hit or cached here, so the next one is cached below the last of them.
"""

from kvblocks.core.block import ROOT, Epoch, KVCacheBlock
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence


def find_blocks(index: PrefixIndex, sequence: Sequence, max_tokens: int | None = None) -> list[KVCacheBlock]:
    """Return the full blocks that hold the longest cached prefix of the sequence's known tokens. Changes nothing.

    max_tokens: of the prefix; None: all.
    """
    block_size = index.block_size
    tokens = memoryview(sequence.tokens)
    num_tokens = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
    return index.match(tokens, sequence.encoded_keys(block_size), num_tokens // block_size)


def digests_ahead(
    index: PrefixIndex, sequence: Sequence, epoch: Epoch | None, held: list[KVCacheBlock], num_held: int, end: int
) -> bytearray | None:
    """Return the digests that caching the sequence's first `end` tokens will record; None when nothing will be.

    epoch: what the sequence is of, or will be. held: a table that begins with its cached blocks, or with the hit
    that it starts with; `num_held` are those. Computed before anything is changed, so that a hash function that raises
    can do no harm. Changes nothing. O(new full blocks).
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

    Nothing is cached for a sequence of before a reset, or when an abort took away the prefix that it is attached to;
    nor while tokens of it are delayed: what it has then is cached by `cache_from`.
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
    """`cache_full_blocks` of sequences that each filled a block by one decoded token; not when digests are needed.

    O(1) a block unless runs part.
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
    """Return how many first blocks of a sequence are cached still: fewer than it cached if some were taken back. O(1).

    And O(blocks) for those that were.
    """
    first = sequence.num_cached_blocks
    while first and not sequence.blocks[first - 1].is_cached:
        first -= 1
    return first


def digests_from(index: PrefixIndex, sequence: Sequence, first: int, end: int) -> bytearray | None:
    """Return the digests that `cache_from` will record of blocks first to end - 1; None when nothing needs them.

    As `digests_ahead`.
    """
    if not index.needs_digests or first >= end:
        return None
    node = sequence.blocks[first - 1].node if first else ROOT
    return index.digests(node, sequence.packed_tokens(), sequence.encoded_keys(index.block_size), first, end)


def cache_from(index: PrefixIndex, sequence: Sequence, first: int, end: int, digests: bytearray | None) -> None:
    """Cache blocks first to end - 1 of a sequence, all of them full, and those before them cached. O(their number).

    Some may be cached already, by sequences that share them, and stay as they are.
    """
    blocks, size = sequence.blocks, index.epoch.num_digest_bytes
    if index.events is not None:
        index.events.storing = sequence.sequence_id
    tokens, keys = sequence.packed_tokens(), sequence.encoded_keys(index.block_size)
    node, start = blocks[first - 1].node if first else ROOT, first
    while start < end:
        stop = start
        while stop < end and not blocks[stop].is_cached:
            index.forget(blocks[stop])  # what it held before a reset
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
    """Stop caching what is in the sequence's own blocks beyond its first `num_computed_tokens`, and all chained to it.

    Whoever cached it: a twin that was renewed may have done so, in a block that only this sequence was to write.
    """
    block_size = index.block_size
    first_unwritten = max(sequence.num_readonly_tokens, num_computed_tokens) // block_size
    for block in reversed(sequence.blocks[first_unwritten : sequence.num_computed_tokens // block_size]):
        index.forget(block)
