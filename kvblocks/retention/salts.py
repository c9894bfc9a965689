"""Salts: finding the salt of a cached prefix in its first block's keys, and removing a salt from the cache."""

from struct import unpack_from

from kvblocks.core.block import Epoch
from kvblocks.core.hashing import SALT_KIND
from kvblocks.core.pool import BlockPool


def salt_in(extra_keys: bytes | None) -> str | None:
    """Return the salt in a first block's encoded extra keys, where it comes first; None if there is none. O(bytes)."""
    if not extra_keys or extra_keys[0] != SALT_KIND:
        return None
    (num_bytes,) = unpack_from("<I", extra_keys, 1)
    return extra_keys[5 : 5 + num_bytes].decode()


def forget_salt(pool: BlockPool, salt: str | None) -> int:
    """Stop caching all prefixes with one salt; None: without one. Returns how many blocks. O(runs + those blocks)."""
    num_before = pool.num_cached_blocks
    for run in pool.index.runs():
        parent, _, _, extra_keys = run.key
        if parent is None and salt_in(extra_keys) == salt:
            while run.blocks:  # once for each duplicate of its first block; after the last one the run is empty
                pool.index.forget(run.blocks[0], "dropped")
    pool.requeue_detached()
    return num_before - pool.num_cached_blocks


def ended_epoch(epoch: Epoch) -> Epoch:
    """Return an epoch that has ended, for sequences that must go on as after a reset."""
    ended = Epoch(epoch.names, epoch.block_bytes)
    ended.is_current = False
    return ended
