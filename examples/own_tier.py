"""A tier of your own: blocks that leave the pool are compressed, and kept in memory. Run it: own_tier.py [MODEL].

It counts what it does, and the engine's statistics show the counts. Only this process has the blocks, so a slot always
has what was stored, and `load` needn't check the blocks' identities.
"""

import sys
import zlib
from dataclasses import dataclass, replace

import numpy as np

from kvblocks import Tier
from kvblocks.engine import Engine, Move, Place, Site, TierOptions, register_place


@dataclass(frozen=True)
class ZipStats:
    num_compressed_bytes: int = 0


class ZipPlace(Place):
    def __init__(self, tier: Tier) -> None:
        self.tier, self.blocks, self.counts = tier, dict[int, bytes](), ZipStats()

    @classmethod
    def check(cls, options: TierOptions) -> None:
        if not options.address.isdecimal():
            raise options.wrong("MiB, such as zip:64", options.address)

    @classmethod
    def open(cls, options: TierOptions, site: Site) -> "ZipPlace":
        num_slots = int(options.address) * 2**20 // site.num_block_bytes
        return cls(Tier("zip", num_slots, site.num_block_bytes))

    def store(self, move: Move) -> bool:
        for slot, row in zip(move.slots, move.fetch(), strict=True):
            self.blocks[slot] = zlib.compress(row, level=1)
        self.counts = replace(self.counts, num_compressed_bytes=sum(map(len, self.blocks.values())))
        return True

    def load(self, move: Move) -> bool:
        for slot, row in zip(move.slots, move.rows(), strict=True):
            row[:] = np.frombuffer(zlib.decompress(self.blocks[slot]), np.uint8)
        move.deliver()
        return True

    def stats(self) -> ZipStats:
        return self.counts


register_place("zip", ZipPlace)
prompt, *others = ([(7 * seed + at) % 250 for at in range(200)] for seed in range(5))
with Engine(*sys.argv[1:], num_blocks=30, tiers=["zip:64"]) as engine:
    answers = [engine.generate([one], max_tokens=4)[0] for one in (prompt, *others, prompt)]
    loaded, traffic = answers[-1].num_loaded_tokens, engine.offload.traffic()
print("the same answer:", answers[0].token_ids == answers[-1].token_ids, "loaded:", loaded, traffic[0].place)
