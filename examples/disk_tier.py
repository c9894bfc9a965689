"""A disk below a manager: a second process finds what the first one stored. Run it: it needs no torch.

Here the engine is a bytearray that stands for the KV of its blocks. A real engine carries out transfers on a separate
thread, and calls `sync` there every second while `store.needs_sync`.
"""

import hashlib
import tempfile

from kvblocks import KVCacheManager, Sequence, Tier
from kvblocks.tiers.disk import DiskError, DiskStore

NUM_BLOCKS, BLOCK_SIZE, BLOCK_BYTES = 64, 16, 2**18
device = bytearray(NUM_BLOCKS * BLOCK_BYTES)


def start(folder: str) -> tuple[KVCacheManager, DiskStore]:
    """Make a manager whose tier `disk` has what the folder has."""
    fingerprint = hashlib.sha256(b"the model, its weights, the type and layout of KV").digest()
    store = DiskStore(
        folder, fingerprint=fingerprint, num_block_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE, max_bytes=2**26
    )
    tier = Tier("disk", store.num_slots, BLOCK_BYTES, is_persistent=True)
    manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, tiers=[tier])
    manager.tiers.restore("disk", store.remembered())
    return manager, store


def carry_out(manager: KVCacheManager, store: DiskStore) -> None:
    """Move the blocks of all transfers, and record what the tier says of its slots. Call this after each step."""
    for transfer in manager.tiers.take_transfers():
        places = [slice(block_id * BLOCK_BYTES, (block_id + 1) * BLOCK_BYTES) for block_id in transfer.block_ids]
        if transfer.is_load:
            payload = bytearray(transfer.num_bytes)
            is_right = store.read(transfer.slots, transfer.identities(), payload) == len(transfer.slots)
            for number, place in enumerate(places):
                device[place] = payload[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        else:
            is_right = True
            try:
                store.write(transfer.slots, transfer.identities(), b"".join(device[place] for place in places))
            except DiskError:  # a full disk
                is_right = False
        manager.tiers.complete(transfer, ok=is_right)
    store.remember(manager.tiers.take_changes()["disk"])
    store.note_used(manager.tiers.take_uses()["disk"])
    store.sync()


with tempfile.TemporaryDirectory() as folder:
    manager, store = start(folder)
    first = Sequence("first", range(100))
    manager.allocate_slots(first)  # the step runs here
    manager.free(first)
    carry_out(manager, store)
    store.close()

    manager, store = start(folder)  # as in another process
    again = Sequence("again", range(100))
    hit = manager.get_computed_blocks(again)
    manager.tiers.allocate(again, hit, manager.tiers.find(hit))
    carry_out(manager, store)
    assert (again.num_computed_tokens, store.stats.num_read_blocks) == (96, 6)
    print(f"{again.num_computed_tokens} of {again.num_tokens} tokens came from the disk: {store.stats}")
    store.close()
