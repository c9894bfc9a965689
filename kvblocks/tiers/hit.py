"""`TierHit`: what tiers have after a hit of the device, the blocks that a load of it moves, and what the device has."""

from typing import final

from kvblocks.arguments import counted
from kvblocks.closed import Closed
from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit
from kvblocks.core.loading import Loads
from kvblocks.core.longest_hit import HitParts
from kvblocks.stats import TierPart
from kvblocks.tiers.lookup import Found, PrefixCopy, find_checkpoint
from kvblocks.tiers.pool import TierPool

Piece = tuple[int, int, TierPool, KVCacheBlock]
"""A block to load: its table's number, its index there, its tier and its slot.

The primary table comes after those of side groups. After that comes the checkpoint, each part of which has an index.
"""


@final
class TierHit(Closed):
    """What a tier has of a sequence, as of a lookup: a part after what the device and the parts before it have.

    A load of this part also moves the parts before it. Made by `manager.tiers.find`; read-only. It owns nothing:
    `tiers.allocate` checks that it is still valid.
    """

    __slots__ = (
        "_before",
        "_versions",
        "checkpoint",
        "first_token",
        "hit",
        "num_all_bytes",
        "num_bytes",
        "num_tokens",
        "pieces",
        "places",
        "pool",
        "prefix",
        "sequence",
        "tables",
        "tier",
    )

    def __init__(
        self,
        hit: CacheHit,
        end: int,
        pools: list[TierPool],
        places: list[PrefixCopy],
        tables: list[tuple[int, Found]],
        before: "TierHit | None",
    ) -> None:
        """end: the token at which the load ends. pools: the tiers. places: the device, then the tiers. before: the part
        before this one.
        """
        size = places[0].index.block_size
        num_blocks = end // size
        self.sequence = hit.sequence
        """The sequence that was looked up."""
        self.hit = hit
        """What the lookup started from."""
        self.pool = pools[-1]
        self.tier = self.pool.name
        """The tier's name."""
        self.first_token: int = len(hit.blocks) * size if before is None else before.first_token + before.num_tokens
        """Where the part begins."""
        self.num_tokens: int = end - self.first_token
        """Tokens whose KV the tier has, in whole blocks. The last known token is never among them, since its logits are
        needed.
        """
        self.tables = tables
        """By side group, the blocks that a sequence needs to start at the end of this part."""
        self.places = [PrefixCopy(place.index, place.blocks[:num_blocks]) for place in places]
        """What the device and each tier have of the primary group's blocks up to the end of this part."""
        self._versions = [place.index.version for place in places]
        self.pieces: list[Piece] = []
        """All blocks that the load moves, the primary group's first."""
        for index in range(len(self.places[0].blocks), num_blocks):
            for pool, place in zip(pools, self.places[1:], strict=True):
                if index < len(place.blocks):
                    self.pieces.append((len(tables), index, pool, place.blocks[index]))
                    break
        for table, (number, found) in enumerate(tables):
            for index, (place_number, block) in enumerate(found, number):
                if place_number:
                    self.pieces.append((table, index, pools[place_number - 1], block))
        self.checkpoint = find_checkpoint(places, end)
        """The number of the place that has the state at the end of this part, and the checkpoint; None: no layer keeps
        a state.
        """
        if self.checkpoint is not None and self.checkpoint[0]:
            pool, parts = pools[self.checkpoint[0] - 1], self.checkpoint[1].blocks
            self.pieces += [(len(tables) + 1, index, pool, block) for index, block in enumerate(parts)]
        self.prefix = [slot for _, _, pool, slot in self.pieces if pool is self.pool]
        """The slots of `pieces` in this part's tier."""
        self.num_all_bytes = sum([pool.num_block_bytes for _, _, pool, _ in self.pieces])
        """How many bytes a load of this and the parts before it moves."""
        self.num_bytes = self.num_all_bytes - (0 if before is None else before.num_all_bytes)
        """How many bytes this part adds to the load."""
        self._before = before

    def seconds(self) -> float:
        """Return how many seconds this part is expected to add to the load. O(blocks).

        While a tier's speed isn't known, its blocks take no time.
        """
        return self.all_seconds() - (0.0 if self._before is None else self._before.all_seconds())

    def part(self) -> TierPart:
        """Return this part as a record for people, with how many slots would be reused before it. O(slots)."""
        end = self.first_token + self.num_tokens
        return TierPart(self.tier, self.first_token, end, self.pool.num_ahead(self.prefix))

    def is_there(self) -> bool:
        """Whether all blocks are still where they were found.

        O(1) while nothing left the device or the tiers, otherwise O(blocks).
        """
        sequence = self.sequence
        if not sequence.was_truncated and self._versions == [place.index.version for place in self.places]:
            return True
        index = self.places[0].index
        tokens, keys = memoryview(sequence.tokens), sequence.encoded_keys(index.block_size)
        used = {place_number for _, found in self.tables for place_number, _ in found}
        pools = {pool.index for _, _, pool, _ in self.pieces}
        for number, place in enumerate(self.places):
            is_used = not number or number in used or place.index in pools
            if is_used and place.index.match(tokens, keys, len(place.blocks)) != place.blocks:
                return False
        if index.attached is None:
            return True
        for side_group, (first, found) in zip(index.attached.layout.side_groups, self.tables, strict=True):
            for number, (place_number, block) in enumerate(found, first):
                if self.places[place_number].attached(side_group, number) is not block:
                    return False
        if self.checkpoint is None:
            return True
        number, checkpoint = self.checkpoint
        return self.places[number].checkpoint(self.first_token + self.num_tokens) is checkpoint

    def all_seconds(self) -> float:
        """Return how long a load of this and the parts before it is expected to take. O(blocks)."""
        return sum([pool.num_block_bytes * pool.rate.seconds_a_unit for _, _, pool, _ in self.pieces])

    def __repr__(self) -> str:
        tokens = counted(self.num_tokens, "token")
        return f"TierHit({self.tier!r}, {tokens} from {self.first_token}, {self.num_bytes} bytes)"


def hit_with_loads(load: TierHit, hit: CacheHit | None) -> CacheHit | None:
    """Return the hit of a sequence that loads this part and those before it. hit: the sequence's own. O(blocks)."""
    device, attached = load.places[0], load.places[0].index.attached
    if attached is None:
        return hit
    number, checkpoint = (0, None) if load.checkpoint is None else load.checkpoint
    held = [] if hit is None else hit.blocks
    parts = HitParts(attached, held, [(0, []) for _ in load.tables], 0)
    if hit is not None and hit.parts is not None:
        parts.tables, parts.num_matched = hit.parts.tables, hit.parts.num_matched
        parts.checkpoint, parts.num_tier_tokens = hit.parts.checkpoint, hit.parts.num_tier_tokens
    parts.loads = Loads(
        0 if hit is None else hit.num_tokens,
        load.first_token + load.num_tokens,
        device.blocks[len(held) :],
        [(first, [None if place else block for place, block in found]) for first, found in load.tables],
        None if number else checkpoint,
        len(checkpoint.blocks) if number and checkpoint is not None else 0,
    )
    own = load.hit if hit is None else hit
    num_tokens = len(held) * device.index.block_size
    loading = CacheHit(own.sequence, held, num_tokens, own.sequence.num_tokens, own.source, parts)
    if hit is not None:
        loading.version = hit.version
    return loading
