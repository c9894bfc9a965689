"""`GroupTierHit`: the blocks that a load moves for all groups, and those that the device has already."""

from kvblocks.core.block import KVCacheBlock
from kvblocks.core.hit import CacheHit
from kvblocks.core.loading import LoadingHit, Mixed
from kvblocks.core.longest_hit import GroupHit
from kvblocks.tiers.grouped.holders import Found, PrefixHolder, find_checkpoint
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.transfer import TierHit

Piece = tuple[int, int, TierPool, KVCacheBlock]
"""A block to load: its table's number, its index there, its tier and its slot.

The primary table comes after those of side groups. After that comes the checkpoint, each part of which has an index.
"""


class GroupTierHit(TierHit):
    """A `TierHit` of several groups. A load of this part also moves the parts before it.

    num_bytes: how many bytes this part adds to the load; the sum over all parts is what is moved. pieces: all blocks
    that the load moves, the primary group's first. prefix: the slots of `pieces` in this part's tier. checkpoint: the
    number of the place that has the state at the end of this part, and the checkpoint; None: no layer keeps a state.
    places: what the device and each tier have of the primary group's blocks up to the end of this part.
    """

    __slots__ = ("before", "checkpoint", "hit", "layout", "num_all_bytes", "pieces", "places", "tables", "versions")

    def __init__(
        self,
        hit: CacheHit,
        end: int,
        pools: list[TierPool],
        places: list[PrefixHolder],
        tables: list[tuple[int, Found]],
        before: "GroupTierHit | None",
    ) -> None:
        """hit: what the lookup started from. end: the token at which the load ends. pools: the tiers. places: the
        device, then the tiers. tables: by side group, the blocks that a sequence needs to start at `end`. before: the
        part before this one.
        """
        layout = places[0].index.layout
        num_blocks = end // layout.block_size
        first = len(hit.blocks) if before is None else (before.first_token + before.num_tokens) // layout.block_size
        super().__init__(hit.sequence, pools[-1], [], first, num_blocks)
        self.hit = hit
        self.layout = layout
        self.places = [PrefixHolder(place.index, place.blocks[:num_blocks]) for place in places]
        self.versions = [place.index.version for place in places]
        self.tables = tables
        self.pieces: list[Piece] = []
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
        if self.checkpoint is not None and self.checkpoint[0]:
            pool, parts = pools[self.checkpoint[0] - 1], self.checkpoint[1].blocks
            self.pieces += [(len(tables) + 1, index, pool, block) for index, block in enumerate(parts)]
        self.prefix = [slot for _, _, pool, slot in self.pieces if pool is self.pool]
        self.num_all_bytes = sum([pool.num_block_bytes for _, _, pool, _ in self.pieces])
        self.num_bytes = self.num_all_bytes - (0 if before is None else before.num_all_bytes)
        self.before = before

    def seconds(self) -> float:
        """Return how many seconds this part is expected to add to the load. O(blocks)."""
        return self.all_seconds() - (0.0 if self.before is None else self.before.all_seconds())

    def all_seconds(self) -> float:
        """Return how long a load of this and the parts before it is expected to take. O(blocks)."""
        return sum([pool.num_block_bytes * pool.rate.seconds_a_unit for _, _, pool, _ in self.pieces])

    def is_there(self) -> bool:
        """Whether all blocks are still where they were found.

        O(1) while nothing left the device or the tiers, otherwise O(blocks).
        """
        sequence = self.sequence
        if not sequence.was_truncated and self.versions == [place.index.version for place in self.places]:
            return True
        tokens, keys = memoryview(sequence.tokens), sequence.encoded_keys(self.layout.block_size)
        used = {place_number for _, found in self.tables for place_number, _ in found}
        pools = {pool.index for _, _, pool, _ in self.pieces}
        for number, place in enumerate(self.places):
            is_used = not number or number in used or place.index in pools
            if is_used and place.index.match(tokens, keys, len(place.blocks)) != place.blocks:
                return False
        for side_group, (first, found) in zip(self.layout.side_groups, self.tables, strict=True):
            for number, (place_number, block) in enumerate(found, first):
                if self.places[place_number].attached(side_group, number) is not block:
                    return False
        if self.checkpoint is None:
            return True
        number, checkpoint = self.checkpoint
        return self.places[number].checkpoint(self.first_token + self.num_tokens) is checkpoint

    def loading_hit(self, hit: GroupHit | None) -> LoadingHit:
        """Return the hit of a sequence that loads this part and those before it. hit: the sequence's own. O(blocks)."""
        device = self.places[0]
        loading = LoadingHit(self.hit, hit, device.index, device.blocks)
        loading.end = self.first_token + self.num_tokens
        mixed: Mixed = []
        for first, found in self.tables:
            mixed.append((first, [None if place else block for place, block in found]))
        loading.mixed = mixed
        if self.checkpoint is not None:
            number, checkpoint = self.checkpoint
            loading.arriving = None if number else checkpoint
            loading.num_state_blocks = len(checkpoint.blocks) if number else 0
        return loading
