"""Events about tiers. They are like the device's events, with the same names of blocks, but name the tier's medium.

A tier's blocks come from the device's cache, where they have names already, so a store hashes nothing. A removal
history needs the names too. Unless somebody asked for one or for events (`EventOptions`), nothing here costs anything.
"""

from collections.abc import Iterable

from kvblocks.arguments import wrong
from kvblocks.core.attached import AttachedBlocks
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hooks import EventLog
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.hashing.scheme import HashScheme
from kvblocks.tiers.identity import BlockIdentity
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.prefix import prefix_of
from kvblocks.tiers.restoring import has_keys
from kvblocks.tiers.tier import Tier


def record_tiers(
    tiers: Iterable[Tier], pools: list[TierPool], device: EventLog | None, hash_scheme: HashScheme
) -> None:
    """If the device has an event log, also record what tiers store and remove. Raises InvalidArgumentError."""
    media: list[str] = [] if device is None else [device.medium]
    for tier, pool in zip(tiers, pools, strict=True):
        log = None if device is None else device.of_tier(tier.medium)
        if log is not None:
            if tier.medium in media:
                raise wrong("tiers", f"media of their own for their events, other than {media}", tier.medium)
            media.append(tier.medium)
            pool.index.record(log, hash_scheme)


def digests_of(pool: TierPool, blocks: list[KVCacheBlock]) -> bytearray | None:
    """Return the names of cached device blocks that a tier will hold; None if they aren't needed. O(blocks)."""
    if not pool.index.needs_digests:
        return None
    return bytearray(b"".join([block.block_hash or b"" for block in blocks]))


def check_digests(pool: TierPool, identities: list[BlockIdentity]) -> None:
    """Compute the names of what may be restored. A hash function that raises does so before any change. O(tokens)."""
    index = pool.index
    if not index.needs_digests:
        return
    size, behind = 4 * index.block_size, dict[bytes, list[BlockIdentity]]()
    for identity in identities:
        if len(identity.tokens) == size and has_keys(identity):
            behind.setdefault(identity.parent, []).append(identity)
    ends: list[tuple[bytes, bytes, bytes | None]] = [(b"", b"", None)]
    while ends:
        digest, name, first_keys = ends.pop()
        for identity in behind.pop(digest, []):
            keys = {0: identity.extra_keys} if identity.extra_keys else None
            root = first_keys if digest else identity.extra_keys or None
            named = index.epoch.hash_scheme.chain(name, bytearray(identity.tokens), keys, root, size, range(1))
            ends.append((identity.digest(), bytes(named), root))


def note_restored(pool: TierPool) -> None:
    """Name all that a tier holds, if names are needed, and record it as stored now, parents first. O(blocks)."""
    if pool.index.needs_digests:
        for run in pool.index.runs():
            run.digest(len(run.blocks) - 1)
            if pool.index.events is not None:
                pool.index.events.note_stored(run, 0)
        if pool.index.attached is not None and pool.index.events is not None:
            _note_restored_attached(pool.index, pool.index.attached)


def _note_restored_attached(index: PrefixIndex, attached: AttachedBlocks) -> None:
    """Record all blocks that are attached in a tier as stored just now. O(blocks of the prefixes that have some)."""
    for run in index.runs():
        if not attached.num_in_run(run):
            continue
        checkpoints = {} if attached.checkpoints is None else attached.checkpoints.in_run(run)
        prefix = prefix_of(run, len(run.blocks))
        above = len(prefix.blocks) - len(run.blocks)
        for position, checkpoint in sorted(checkpoints.items()):
            attached.note_checkpoint_at_end(prefix.blocks[: above + position + 1], checkpoint, prefix.tokens)
        for position, primary in enumerate(run.blocks):
            for column, slot in enumerate(attached.row(primary)):
                if slot is not None:
                    attached.note_column(prefix.blocks[: above + position + 1], prefix.tokens, column)
