"""Digests, which name blocks for other processes: those of a prompt's blocks, and the block with a given digest."""

from typing import Any

from kvblocks.arguments import is_a, wrong
from kvblocks.core.block import ROOT, KVCacheBlock
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.core.sequence import Sequence


def block_digests(index: PrefixIndex, sequence: Sequence) -> list[bytes]:
    """Return the digests of a sequence's full blocks of known tokens, cached or not. Changes nothing. O(tokens).

    Raises what the hash function raises.
    """
    size = index.block_size
    num_blocks = sequence.num_tokens // size
    digests = index.digests(ROOT, sequence.packed_tokens(), sequence.encoded_keys(size), 0, num_blocks)
    length = index.epoch.num_digest_bytes
    return [bytes(digests[i * length : (i + 1) * length]) for i in range(num_blocks)]


def find_by_digest(index: PrefixIndex, digest: object) -> KVCacheBlock | None:
    """Return the cached block with this digest, the one that hits get; None if there is none.

    Digests decide no hit, so there is no map of them, and this costs O(cached blocks), plus O(their tokens) for digests
    that aren't computed yet. Raises InvalidArgumentError for what isn't bytes. Changes nothing, except that runs keep
    computed digests.
    """
    if not is_a(digest, bytes):
        raise wrong("digest", "bytes", digest)
    wanted: Any = digest
    for run in index.runs():
        for position, block in enumerate(run.blocks):
            if run.digest(position) == wanted:
                return block
    return None
