"""`GroupRecords`: `Records` of several groups."""

from kvblocks.core.attached import GroupIndex
from kvblocks.core.hit import CacheHit
from kvblocks.core.longest_hit import GroupHit
from kvblocks.core.prefix_index import PrefixIndex
from kvblocks.events import BlocksHit, EventOptions
from kvblocks.observe.event_log import Records


class GroupRecords(Records):
    """`Records` that record the blocks of a hit for each group, and the state that it goes on from."""

    def note_hit(self, hit: CacheHit) -> None:
        """Record that a sequence was allocated with a hit, by group. O(its blocks)."""
        super().note_hit(hit)
        if isinstance(hit, GroupHit):
            index = hit.group_index
            for side_group, (first, blocks) in zip(index.layout.side_groups, hit.tables, strict=True):
                numbers = range(first, first + len(blocks))
                names = tuple([index.name_in_chain(side_group, hit.blocks, number) for number in numbers])
                if names:
                    self.append(BlocksHit(names, side_group.group, self.medium, hit.sequence.sequence_id))
            if hit.checkpoint is not None:
                name = hit.blocks[-1].block_hash or b""
                self.append(BlocksHit((name,), index.layout.state, self.medium, hit.sequence.sequence_id))


def make_group_log(options: EventOptions, index: PrefixIndex) -> Records:
    """Return the device's log of a manager of several groups."""
    assert isinstance(index, GroupIndex), f"{index}: not of several groups"
    primary = index.layout.primary
    return GroupRecords(options, primary, is_anchored=primary is None)
