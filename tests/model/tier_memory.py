"""The memory of an engine with tiers: windows may lack what comes before a load's end while it is on its way."""

import kvblocks
from model.kv_memory import GARBAGE, LOST, KVMemory, Slot


class TierMemory(KVMemory):
    """`KVMemory` whose loads are begun before their slots are looked at."""

    def wait(self, sequence: kvblocks.Sequence, first: int) -> None:
        """A sequence that is about to be scheduled waits for a transfer from position `first` on."""
        self.loading.setdefault(sequence, []).append(first)

    def bring(self, block_id: int, row: list[int]) -> None:
        """A load writes a block."""
        self.now[block_id] = list(row)

    def arrive(self, sequence: kvblocks.Sequence, num_tokens: int) -> None:
        """The first tokens of a sequence that is in no step are there, as its loads have ended."""
        for position in range(num_tokens):
            for _, slot in self._live_slots(sequence, position):
                self.num_uses[slot[0]] += not slot[1]
                self.unknown.pop(slot, None)

    def restart(self) -> None:
        """Another process begins, with memory of its own."""
        for sequence in list(self.computed_with):
            self.forget(sequence)
        self.copies = []
        self.unknown.clear()
        self.now = [[GARBAGE] * len(row) for row in self.now]
        self.project()

    def slots(self, sequence: kvblocks.Sequence, position: int) -> list[tuple[int, Slot]]:
        """As in `KVMemory`; for a position that is being loaded, without the groups whose window has passed it."""
        if position < self.first_loading(sequence):
            return super().slots(sequence, position)
        return [
            (group, (sequence.group_block_ids(group)[position // spec.block_size], position % spec.block_size))
            for group, spec in enumerate(self.groups)
            if position // spec.block_size >= sequence.first_live_block(group)
        ]

    def _check_visible(self, sequence: kvblocks.Sequence, position: int) -> None:
        if sequence not in self.loading:
            super()._check_visible(sequence, position)

    def row_size(self, row: list[int]) -> int:
        """How many numbers of a block mean anything: its group's tokens."""
        return len(row) if row[0] == GARBAGE else self.groups[row[0] % len(self.groups)].block_size

    def is_garbage(self, row: list[int]) -> bool:
        return GARBAGE in row[: self.row_size(row)]

    def is_bad(self, block_id: int) -> bool:
        """Whether anything in a block is lost."""
        size = self.row_size(self.now[block_id])
        return any(self.unknown.get((block_id, offset)) == LOST for offset in range(size))

    def is_same(self, one: list[int], other: list[int]) -> bool:
        """Whether two blocks hold the same."""
        size = self.row_size(one)
        return one[:size] == other[:size]

    def in_group(self, group: int, numbers: list[int]) -> list[int]:
        return [self._in_group(group, number) for number in numbers]
