"""An engine's KV memory in miniature for several groups, as `kv_memory` is for one.

All groups share one memory: a slot is (block id, offset), whichever group's block it is. What a query of a step may see
must be in live places of its group's table, and right, and everything else may be anything.
"""

import kvblocks
from kvblocks import Group


class GroupMemory:
    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.slots: dict[tuple[int, int], object] = {}
        self.num_written: dict[kvblocks.Sequence, int] = {}
        self.num_copied = 0
        self.num_dead = 0

    def run_step(self, copies: list[tuple[int, int]], sequences: list[kvblocks.Sequence]) -> None:
        """Copy blocks, store all tokens that got slots since the last step, then look at what their queries see."""
        self.num_copied += len(copies)
        for source, destination in copies:
            for offset in range(max(group.block_size for group in self.groups)):
                self.slots[destination, offset] = self.slots.get((source, offset))
        for sequence in sequences:
            for position in range(self.num_written.get(sequence, 0), sequence.num_computed_tokens):
                if position >= sequence.num_readonly_tokens:
                    for number in range(len(self.groups)):
                        slot = self.slot(sequence, number, position)
                        assert slot is not None, f"{sequence}: no slot for {position} in group {number}"
                        self.slots[slot] = number, self.content(sequence, position)
        for sequence in sequences:
            end = sequence.num_computed_tokens  # a sequence that is new here computes what comes after its hit
            first = self.num_written.get(sequence, min(sequence.num_readonly_tokens, end - 1))
            for position in range(first, end):
                self.check_query(sequence, position)
        self.num_written = {sequence: sequence.num_computed_tokens for sequence in sequences}

    def truncate(self, sequence: kvblocks.Sequence) -> None:
        num_written = self.num_written.get(sequence, 0)
        self.num_written[sequence] = min(num_written, sequence.num_computed_tokens)

    def check(self) -> None:
        """What the next token of each sequence will see is there."""
        for sequence in self.num_written:
            self.check_query(sequence, sequence.num_computed_tokens)

    def check_query(self, sequence: kvblocks.Sequence, position: int) -> None:
        for number, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            self.num_dead += sequence.first_live_block(number)
            for seen in range(first, min(position + 1, sequence.num_computed_tokens)):
                slot = self.slot(sequence, number, seen)
                assert slot is not None, f"{sequence}: {position} sees {seen} in group {number}, which is dead"
                found = self.slots.get(slot)
                assert found == (number, self.content(sequence, seen)), f"{sequence}: wrong KV at {seen}"

    def slot(self, sequence: kvblocks.Sequence, number: int, position: int) -> tuple[int, int] | None:
        place, offset = divmod(position, self.groups[number].block_size)
        if place < sequence.first_live_block(number):
            return None
        return sequence.group_block_ids(number)[place], offset

    @staticmethod
    def content(sequence: kvblocks.Sequence, position: int) -> object:
        keys = tuple(sorted(key for key in sequence.extra_keys if key[0] <= position))
        return sequence.salt, sequence.lora, tuple(sequence.token_ids(0, position + 1)), keys
