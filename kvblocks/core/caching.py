"""Looking a sequence up in the prefix index, caching its blocks as they get full, and taking them back.

The index speaks of packed tokens and nodes, the manager of sequences and slots; this is what lies between. A sequence's
first `num_cached_blocks` blocks were hit or cached here, so the next one is cached below the last of them.
"""

from kvblocks.core.block import ROOT, Epoch, KVCacheBlock
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence


def find_blocks(index: PrefixIndex, sequence: Sequence) -> list[KVCacheBlock]:
    """Return the full blocks that hold the longest cached prefix of the sequence's known tokens. Changes nothing."""
    block_size = index.block_size
    tokens = memoryview(sequence.tokens)
    return index.match(tokens, sequence.encoded_keys(block_size), len(tokens) // block_size)


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

    Nothing is cached for a sequence of before a reset, or when an abort took away the prefix that it is attached to.
    """
    first, end = sequence.num_cached_blocks, sequence.num_computed_tokens // index.block_size
    if first >= end or sequence.epoch is not index.epoch:
        return
    node = ROOT
    if first:
        last = sequence.blocks[first - 1]
        if last.run is None:
            return
        node = last.run, last.index
    keys = None if sequence.keys is None else sequence.encoded_keys(index.block_size)
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
        is_next = sequence.num_computed_tokens == (first + 1) * block_size
        if is_next and first and sequence.keys is None and sequence.epoch is epoch:
            parent = sequence.blocks[first - 1]
            run = sequence.run or parent.run
            if run is not None and index.cache_one(run, parent, sequence.blocks[first], sequence.tokens[-block_size:]):
                sequence.num_cached_blocks = first + 1
                sequence.run = run
                continue
        cache_full_blocks(index, sequence, None)


def digests_anew(index: PrefixIndex, sequence: Sequence) -> bytearray | None:
    """Return the digests that `cache_anew` will record; None when nothing needs them. As `digests_ahead`."""
    if not index.needs_digests:
        return None
    num_full = sequence.num_computed_tokens // index.block_size
    return index.digests(ROOT, sequence.packed_tokens(), sequence.encoded_keys(index.block_size), 0, num_full)


def cache_anew(index: PrefixIndex, sequence: Sequence, digests: bytearray | None) -> None:
    """Cache all full blocks of a sequence from before a reset. O(their number).

    Those that it shares with a sequence which was cached anew earlier may be cached already, and stay as they are.
    """
    blocks, num_full = sequence.blocks, sequence.num_computed_tokens // index.block_size
    tokens, keys, size = sequence.packed_tokens(), sequence.encoded_keys(index.block_size), index.epoch.num_digest_bytes
    node, first = ROOT, 0
    while first < num_full:
        end = first
        while end < num_full and not blocks[end].is_cached:
            index.forget(blocks[end])  # what it held before the reset
            end += 1
        if end > first:
            ahead = None if digests is None else digests[first * size : end * size]
            index.cache(node, blocks[first:end], tokens, keys, first, ahead)
        while end < num_full and blocks[end].is_cached:
            end += 1
        node, first = blocks[end - 1].node, end
    sequence.epoch = index.epoch
    sequence.num_cached_blocks = num_full


def forget_unwritten(index: PrefixIndex, sequence: Sequence, num_computed_tokens: int) -> None:
    """Stop caching what is in the sequence's own blocks beyond its first `num_computed_tokens`, and all chained to it.

    Whoever cached it: a twin that was renewed may have done so, in a block that only this sequence was to write.
    """
    block_size = index.block_size
    first_unwritten = max(sequence.num_readonly_tokens, num_computed_tokens) // block_size
    for block in reversed(sequence.blocks[first_unwritten : sequence.num_computed_tokens // block_size]):
        index.forget(block)
