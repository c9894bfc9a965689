"""Bandwidth between the device's blocks and tiers, by block size, compared with a plain copy and plain files."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from bench.tiers.first_token import SECRET, folder
from bench.timing import Case, Spread, measure
from kvblocks import BlockIdentity, Tier
from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.tiers.block_bytes import BlockBytes, Staging
from kvblocks.engine.tiers.place import Move
from kvblocks.engine.tiers.places import DiskPlace, HostPlace
from kvblocks.tiers.disk import DiskStore

BATCH = 32  # blocks of a transfer
NUM_BATCHES = 6
BLOCK_BYTES = (2**16, 2**18, 2**20)
_SHAPE = ModelConfig(64, 64, 1, 1, 1, 64, 2, 4096)


def time_bandwidth(block_bytes: int, num_rounds: int) -> dict[str, Spread]:
    """Return the nanoseconds per byte of each way to move batches of blocks. Each batch is at another place.

    A block has 16 tokens of one head of 64, in float32, K and V: 8 KiB a layer, and as many layers as fill it.
    """
    config = replace(_SHAPE, num_layers=block_bytes // 8192)
    number = BATCH * NUM_BATCHES
    cache = KVCache.allocate(config, number, 16)
    cache.memory[0].copy_(torch.randn(cache.memory[0].shape))
    block_bytes_of = BlockBytes(cache)
    staging = Staging(block_bytes_of)
    host = HostPlace(Tier("host", number, block_bytes), block_bytes_of.new_rows(number))
    order = torch.randperm(number).tolist()
    whole, copied = (
        torch.randn(NUM_BATCHES, BATCH * block_bytes // 4),
        torch.zeros(NUM_BATCHES, BATCH * block_bytes // 4),
    )
    identities = [BlockIdentity(b"", b"", index.to_bytes(4, "little") * 16) for index in range(number)]
    turn = iter(range(1 << 60))

    def places() -> tuple[int, int]:
        """Return where a copy of a batch's bytes comes from and goes to. The next copy has other places."""
        number = next(turn) % NUM_BATCHES
        return number, NUM_BATCHES - 1 - number

    def batch() -> "Batch":
        """Return slots, block ids and identities. A slot always has the same identity."""
        first = next(turn) % NUM_BATCHES * BATCH
        slots = order[first : first + BATCH]
        return slots, slots[::-1], [identities[slot] for slot in slots]

    def move(at: "Batch") -> Move:
        return Move(*at, block_bytes_of, staging)

    with folder() as plain, folder() as keyed, folder() as files:
        sizes = {"num_block_bytes": block_bytes, "block_size": 16, "max_bytes": 2 * number * block_bytes + 2**24}
        stores = (
            DiskStore(plain, fingerprint=bytes(32), **sizes),
            DiskStore(keyed, fingerprint=bytes(32), secret=SECRET, **sizes),
        )
        tier = Tier("disk", number, block_bytes, is_persistent=True)
        disk, sealed = (DiskPlace(tier, store, "", (block_bytes,)) for store in stores)
        for place in (host, disk, sealed):
            for _ in range(NUM_BATCHES):
                place.store(move(batch()))
        for _ in range(NUM_BATCHES):
            _write_file(files / "file", block_bytes_of, batch())
        cases = {
            "one copy": Case(lambda at: copied[at[0]].copy_(whole[at[1]]), BATCH * block_bytes, places),
            "host, store": Case(lambda at: host.store(move(at)), BATCH * block_bytes, batch),
            "host, load": Case(lambda at: host.load(move(at)), BATCH * block_bytes, batch),
            "a file, write": Case(
                lambda at: _write_file(files / "file", block_bytes_of, at), BATCH * block_bytes, batch
            ),
            "a file, read": Case(lambda at: _read_file(files / "file", block_bytes_of, at), BATCH * block_bytes, batch),
            "disk, store": Case(lambda at: disk.store(move(at)), BATCH * block_bytes, batch),
            "disk, load": Case(lambda at: _check(disk.load(move(at))), BATCH * block_bytes, batch),
            "disk keyed, store": Case(lambda at: sealed.store(move(at)), BATCH * block_bytes, batch),
            "disk keyed, load": Case(lambda at: _check(sealed.load(move(at))), BATCH * block_bytes, batch),
        }
        found = measure(cases, num_rounds, 2)
        disk.close()
        sealed.close()
    return found


def _check(is_right: bool) -> None:  # noqa: FBT001
    if not is_right:
        raise ValueError("expected what was stored, got something else")


Batch = tuple[list[int], list[int], list[BlockIdentity]]


def _write_file(path: Path, blocks: BlockBytes, at: Batch) -> None:
    """Write blocks to their places in a file, with a call for each. The file is not synced."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for slot, row in zip(at[0], blocks.rows_of(at[1]), strict=True):
        os.pwrite(descriptor, row.data, slot * blocks.num_block_bytes)
    os.close(descriptor)


def _read_file(path: Path, blocks: BlockBytes, at: Batch) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for slot, row in zip(at[0], blocks.rows_of(at[1]), strict=True):
        os.preadv(descriptor, [row.data], slot * blocks.num_block_bytes)
    os.close(descriptor)
