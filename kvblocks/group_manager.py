"""What a manager of several groups answers beside what every manager does."""

from collections.abc import Sequence as Items

from kvblocks.branching import BranchingManager
from kvblocks.errors import InvalidArgumentError
from kvblocks.groups import FullAttention, Group
from kvblocks.sequence import Sequence
from kvblocks.stats import GroupUsage
from kvblocks.tokens import TokenIds


class GroupManager(BranchingManager):
    """`BranchingManager` with groups. A part of `KVCacheManager`; not made by itself."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers, by their numbers; one of full attention unless others were given. O(1)."""
        if self._group_index is not None:
            return self._group_index.layout.groups
        return (FullAttention(self.block_size),)

    @property
    def hit_size(self) -> int:
        """Hits are multiples of so many tokens: the largest block size of a group. O(1)."""
        return self._largest_size

    def append_group_step(
        self, sequences: Items[Sequence], token_ids: TokenIds
    ) -> list[tuple[int, int, int, int]] | None:
        """Add one decoded token to each of `sequences`, as `append_step`, whatever the groups are.

        Returns (place in `sequences`, group, position in its table, block id) for each table entry that changed, other
        than those that became dead; None, with nothing changed, when the pool can't serve all. Raises as `append_step`.
        O(sequences x groups).
        """
        changes = self._append_step(sequences, token_ids)
        if changes is None or self._group_slots is None:
            return None if changes is None else [(i, 0, position, block_id) for i, position, block_id in changes]
        return self._group_slots.step_changes if sequences else []

    def take_group_copies(self) -> list[tuple[int, int, int]]:
        """Return the copies since the last call, as `take_copies`, with the group whose layers have them: (group,
        source, destination). A block id stands for the same memory in each group, so copying all of it does no harm.
        """
        self.check_whole()
        groups = [0] * len(self._slots.copies) if self._group_slots is None else self._group_slots.copy_groups
        return [(group, *pair) for group, pair in zip(groups, self.take_copies(), strict=True)]

    def group_usage(self) -> list[GroupUsage]:
        """Return what each group uses of the pool, by group. For people and metrics: O(pool)."""
        self.check_whole()
        num_cached = [self._pool.num_cached_blocks]
        if self._group_index is not None:
            num_cached = self._group_index.num_cached_by_group()
        held: list[set[int]] = [set() for _ in self.groups]
        for sequence in self._sequences.values():
            for group, blocks in enumerate(held):
                blocks |= {block.block_id for block in sequence.group_blocks(group) if block is not None}
        return [
            GroupUsage(group, len(blocks), number)
            for group, (blocks, number) in enumerate(zip(held, num_cached, strict=True))
        ]

    def _check_has_primary(self, call: str) -> None:
        if self._group_index is not None and self._group_index.layout.primary is None:
            raise InvalidArgumentError(f"{call}: expected a manager with a group of full attention, got {self.groups}")
