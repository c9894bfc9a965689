"""The places of tiers' bytes, without an engine."""

import numpy as np
import pytest

from kvblocks import InvalidArgumentError, Tier
from kvblocks.engine.tiers.block_bytes import Staging
from kvblocks.engine.tiers.options import TierOptions
from kvblocks.engine.tiers.place import Move
from kvblocks.engine.tiers.places import DiskPlace
from kvblocks.tiers.disk import DiskStore
from kvblocks.tiers.identity import BlockIdentity

NUM_BYTES = 4096
FULL = BlockIdentity(b"", b"", bytes(16))
WINDOW = BlockIdentity(FULL.digest(), b"", b"", 1)


class Blocks:
    """`BlockBytes` of blocks on the host, or as if they were on another device."""

    def __init__(self, *, is_on_host):
        self.is_on_host = is_on_host
        self.blocks = np.full((4, NUM_BYTES), 7, np.uint8)

    def new_rows(self, num_rows):
        return np.full((num_rows, NUM_BYTES), 9, np.uint8)

    def read(self, block_ids, rows, after):
        for block_id, row in zip(block_ids, rows, strict=True):
            row[:] = self.blocks[block_id]

    def write(self, block_ids, rows, after):
        for block_id, row in zip(block_ids, rows, strict=True):
            self.blocks[block_id] = row

    def rows_of(self, block_ids):
        assert self.is_on_host
        return [self.blocks[block_id] for block_id in block_ids]


@pytest.mark.parametrize("is_on_host", [True, False])
def test_what_a_group_does_not_use_of_a_block_is_zeros_on_the_disk(tmp_path, is_on_host):
    blocks = Blocks(is_on_host=is_on_host)
    options = {"fingerprint": bytes(32), "num_block_bytes": NUM_BYTES, "block_size": 4, "max_bytes": 2**23}
    with DiskStore(tmp_path, **options) as store:
        place = DiskPlace(Tier("disk", 2, NUM_BYTES, is_persistent=True), store, "kv", (NUM_BYTES, 3072))
        staging = Staging(blocks)
        assert place.store(Move([0, 1], [2, 3], [FULL, WINDOW], blocks, staging))
        blocks.blocks[:] = 1
        assert place.load(Move([1, 0], [0, 1], [WINDOW, FULL], blocks, staging))
        assert not place.load(Move([1], [2], [FULL], blocks, staging)), "another block is there"
    assert (blocks.blocks[1] == 7).all()
    assert (blocks.blocks[0, :3072] == 7).all() and not blocks.blocks[0, 3072:].any()


def test_options_say_their_size_in_bytes():
    sizes = [TierOptions("zip:x", size=size).size_in_bytes("1KiB") for size in ("8MiB", 5000, None)]
    assert sizes == [2**23, 5000, 1024]
    for wrong in ("much", 0, 0.5, True):
        with pytest.raises(InvalidArgumentError, match=f"tiers: zip: size: expected bytes.* got {wrong!r}"):
            TierOptions("zip:x", size=wrong).size_in_bytes("1KiB")
