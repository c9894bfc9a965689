"""Salts: whose a cached prefix is, by the keys of its first block, and taking all of one salt out of the cache."""

from struct import unpack_from

from kvblocks.core.block import Epoch
from kvblocks.core.hashing import SALT_KIND
from kvblocks.core.pool import BlockPool


def salt_in(extra_keys: bytes | None) -> str | None:
    """Return the salt among a first block's encoded extra keys, where it always comes first; None for none. O(it)."""
    if not extra_keys or extra_keys[0] != SALT_KIND:
        return None
    (num_bytes,) = unpack_from("<I", extra_keys, 1)
    return extra_keys[5 : 5 + num_bytes].decode()


def forget_salt(pool: BlockPool, salt: str | None) -> int:
    """Stop caching all prefixes of one salt; None: of none. Returns how many blocks. O(runs + those blocks)."""
    num_before = pool.num_cached_blocks
    for run in pool.index.runs():
        parent, _, _, extra_keys = run.key
        if parent is None and salt_in(extra_keys) == salt:
            while run.blocks:  # as often as its first block has duplicates; then all of it goes
                pool.index.forget(run.blocks[0], "dropped")
    pool.requeue_detached()
    return num_before - pool.num_cached_blocks


def ended_epoch(epoch: Epoch) -> Epoch:
    """Return an epoch that is over already, for sequences that are to go on as after a reset."""
    ended = Epoch(epoch.names, epoch.block_bytes)
    ended.is_current = False
    return ended
