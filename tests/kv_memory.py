"""An engine's KV memory in miniature: what stands in every slot, as the prefix that it was computed from.

Runs what the manager's answers tell an engine to do (copy, then store) and looks whether every computed token of every
allocated sequence then stands where its block table says.
"""

import kvblocks


class KVMemory:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], object] = {}
        self.num_written: dict[kvblocks.Sequence, int] = {}
        self.num_copied = 0

    def run_step(self, copies: list[tuple[int, int]], sequences: list[kvblocks.Sequence]) -> None:
        """Copy blocks, then store the KV of all tokens that got slots since the last step, none to read-only ones."""
        self.num_copied += len(copies)
        for source, destination in copies:
            for offset in range(self.block_size):
                self.slots[destination, offset] = self.slots.get((source, offset))
        for sequence in sequences:
            for position in range(self.num_written.get(sequence, 0), sequence.num_computed_tokens):
                if position >= sequence.num_readonly_tokens:
                    self.slots[self.slot(sequence, position)] = self.content(sequence, position)
        self.num_written = {sequence: sequence.num_computed_tokens for sequence in sequences}

    def truncate(self, sequence: kvblocks.Sequence) -> None:
        """What comes after the tokens that the sequence has left is to be written anew."""
        num_written = self.num_written.get(sequence, 0)
        self.num_written[sequence] = min(num_written, sequence.num_computed_tokens)

    def check(self) -> None:
        for sequence in self.num_written:
            for position in range(sequence.num_computed_tokens):
                found = self.slots.get(self.slot(sequence, position))
                assert found == self.content(sequence, position), f"{sequence}: wrong KV at {position}"

    def slot(self, sequence: kvblocks.Sequence, position: int) -> tuple[int, int]:
        return sequence.block_ids[position // self.block_size], position % self.block_size

    @staticmethod
    def content(sequence: kvblocks.Sequence, position: int) -> object:
        keys = tuple(sorted(key for key in sequence.extra_keys if key[0] <= position))
        return sequence.salt, sequence.lora, tuple(sequence.token_ids(0, position + 1)), keys
