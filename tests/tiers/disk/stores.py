"""What the tests of a store share: stores of small blocks, and what is in a folder."""

from pathlib import Path

from tiers.disk.histories import BLOCK_BYTES, OPTIONS, identity_of, number_of, payload_of

from kvblocks.tiers.disk import DiskStore

SECRET = b"sixteen bytes or more"


def open_store(folder, **more):
    return DiskStore(folder, **{**OPTIONS, **more})


def write(store, blocks):
    """Write blocks, a dict of slots and numbers."""
    identities = [identity_of(number) for number in blocks.values()]
    store.write(blocks, identities, b"".join(map(payload_of, blocks.values())))


def lengthen(store):
    """Make the arena as long as it can be, for tests that remember blocks without writing them."""
    write(store, {store.num_slots - 1: 0})


def fill(store, blocks):
    """Write, remember and sync blocks."""
    write(store, blocks)
    store.remember({slot: identity_of(number) for slot, number in blocks.items()})
    store.sync()


def reads(store, slot, number):
    """Whether reading a slot gives the block of that number. Checks its bytes."""
    out = bytearray(BLOCK_BYTES)
    count = store.read([slot], [identity_of(number)], out)
    assert count in (0, 1) and (count == 0 or out == payload_of(number))
    return count == 1


def remembered(store):
    """What a store remembers, as slots and numbers, in its order."""
    return [(slot, number_of(identity)) for slot, identity in store.remembered()]


def sizes(folder):
    return {path.name: path.stat().st_size for path in Path(folder).iterdir() if path.is_file()}


def all_bytes(folder):
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())
