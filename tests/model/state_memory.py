"""The memory of an engine whose model has recurrent layers: live states in slots, and checkpoints in blocks.

A slot holds the number of the context that its state is after. Each page of a checkpoint holds (its place in the
checkpoint, that number, the position). So a mixed, stale, foreign or half-written checkpoint shows, and so does a step
that begins with another state than the one after all tokens before it.

A slot whose sequence ends is poisoned, and so is all that a step which dies was to write: its live states, the slots
that it had not copied to yet, and the checkpoints that it was to save. Nothing here is read from the manager but block
tables, `state_slot` and the copies that it orders.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import kvblocks
from kvblocks import Group
from model.kv_memory import GARBAGE
from model.tier_memory import TierMemory

NOTHING = -2
"""The state after no tokens."""


class StateMemory(TierMemory):
    """`TierMemory` of `groups` that attend, with `num_slots` live states. num_pages: the blocks of a checkpoint.

    num_kept: how many states before the newest of a step a slot keeps.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[Group, ...],
        block_size: int,
        num_slots: int,
        num_pages: int,
        num_kept: int = 0,
    ) -> None:
        super().__init__(num_blocks, groups, block_size)
        self.num_pages, self.num_kept = num_pages, num_kept
        self.states = [GARBAGE] * num_slots
        self.position = [0] * num_slots  # of these states
        self.kept: list[dict[int, int]] = [{} for _ in range(num_slots)]  # by slot and position: the other states there
        self.slot_of: dict[kvblocks.Sequence, int] = {}
        self.before: list[Any] = []  # the copies that were taken for the next step
        self.after: list[Any] = []
        self.starting: set[kvblocks.Sequence] = set()  # whose slots the next step writes before it computes
        self.pages: dict[int, tuple[int, int, int]] = {}  # by number: place, context, position
        self.num_restored = self.num_cleared = 0

    def take(self, before: Iterable[Any], after: Iterable[Any]) -> None:
        """Note the copies of states that the next step makes."""
        before = list(before)
        self.before += before
        self.after += after
        self.num_cleared += sum(copy.kind == "clear" for copy in before)
        self.num_restored += sum(copy.kind == "restore" for copy in before)

    # Steps.

    def schedule(self, copies: Iterable[tuple[int, int]], running: Iterable[kvblocks.Sequence]) -> None:
        copies, running = list(copies), list(running)
        super().schedule(copies, running)
        for sequence in running:
            for _, copied in copies:
                if copied in sequence.block_ids and sequence in self.first_own:  # the whole block is its own now
                    first = sequence.block_ids.index(copied) * self.block_size
                    self.first_own[sequence] = min(self.first_own[sequence], first)
            slot = sequence.state_slot
            assert slot is not None, f"{sequence}: it runs, and has no slot"
            if sequence not in self.slot_of:
                self.slot_of[sequence] = slot
                self.starting.add(sequence)  # even if it loads: then it starts once that has arrived
            assert self.slot_of[sequence] == slot, f"{sequence}: its slot has changed to {slot}"
        slots = list(self.slot_of.values())
        assert len(set(slots)) == len(slots), f"two sequences have one slot: {self.slot_of}"

    def run_step(self) -> None:
        """Make the copies before the step, compute with each sequence's state, then make the copies after it."""
        before, after = self.before, self.after
        self.before, self.after = [], []
        self._make_copies()
        for copy in before:
            self._restore(copy)
        self._poison_free_slots()
        ready = {sequence for sequence in self.starting if sequence not in self.loading}
        for sequence in ready:
            found = self.states[self.slot_of[sequence]]
            expected = self.context(sequence, self.start_of_step(sequence))
            assert found == expected, f"{sequence}: a step begins, and its slot holds {self.what(found)}"
        self.starting -= ready
        for sequence, positions in self.coming():
            self._advance(sequence, positions)
        super().run_step()
        for copy in after:
            self._save(copy)
        self.project()

    def _poison_free_slots(self) -> None:
        """Nobody may read the slot of a sequence that has ended. Copies that were ordered before could do so still."""
        for slot in set(range(len(self.states))) - set(self.slot_of.values()):
            self.states[slot] = GARBAGE
            self.kept[slot] = {}

    def _restore(self, copy: Any) -> None:
        """Carry out a copy to a slot."""
        self.position[copy.slot] = copy.position
        kept: dict[int, int] = {}
        if copy.kind == "clear":
            assert copy.position == 0, f"{copy}: cleared"
            self.states[copy.slot] = NOTHING
        elif copy.kind == "fork":
            there = self.kept[copy.source] | {self.position[copy.source]: self.states[copy.source]}
            self.states[copy.slot] = there.get(copy.position, GARBAGE)
            kept = {position: state for position, state in there.items() if position < copy.position}
        else:
            assert copy.kind == "restore", copy
            self.states[copy.slot] = self.read(copy.block_ids, copy.position)
        self.kept[copy.slot] = kept

    def read(self, block_ids: Sequence[int], position: int) -> int:
        """Return the state that a checkpoint in these blocks holds, all of it and after `position` tokens."""
        assert len(block_ids) == self.num_pages, f"a checkpoint in blocks {block_ids}, not in {self.num_pages}"
        return self.read_rows([self.now[block_id] for block_id in block_ids], position)

    def read_rows(self, rows: list[list[int]], position: int) -> int:
        """As `read`, of what the blocks hold, or slots of a tier."""
        found = [self._page(row) for row in rows]
        what = f"the checkpoint after {position} tokens in {rows}"
        assert None not in found, f"{what}: its pages are {found}"
        parts = [page for page in found if page is not None]
        assert [place for place, _, _ in parts] == [*range(len(parts))], f"{what}: its pages are {parts}"
        assert len({page[1:] for page in parts}) == 1 and parts[0][2] == position, f"{what}: its pages are {parts}"
        return parts[0][1]

    def page_in(self, block_id: int) -> tuple[int, int, int] | None:
        """The page of a checkpoint that a block holds: its place, its context and its position."""
        return self._page(self.now[block_id])

    def _page(self, row: list[int]) -> tuple[int, int, int] | None:
        return self.pages.get(row[0]) if len({*row}) == 1 else None

    def _advance(self, sequence: kvblocks.Sequence, positions: list[int]) -> None:
        """A step computes a sequence's tokens at `positions`, from its live state on."""
        slot = sequence.state_slot
        assert slot is not None
        first, end = positions[0], positions[-1] + 1
        assert positions == [*range(first, end)], f"{sequence}: a step computes {positions}"
        assert self.states[slot] == self.context(sequence, first), (
            f"{sequence}: it computes from {first} on, and slot {slot} holds {self.what(self.states[slot])}"
        )
        passed = self.kept[slot] | {position: self.context(sequence, position) for position in range(first, end)}
        self.kept[slot] = {p: state for p, state in passed.items() if end - self.num_kept <= p < end}
        self.states[slot], self.position[slot] = self.context(sequence, end), end

    def _save(self, copy: Any) -> None:
        """Carry out a copy of a slot to a checkpoint's blocks."""
        assert copy.kind == "save", copy
        owners = [sequence for sequence, slot in self.slot_of.items() if slot == copy.slot]
        assert owners, f"{copy}: nobody has the slot"
        owner, position = owners[0], copy.position
        state = self.kept[copy.slot].get(position, self.states[copy.slot])
        assert state == self.context(owner, position), f"{copy}: the slot holds {self.what(state)}, of {owner}"
        assert len(copy.block_ids) == self.num_pages == len({*copy.block_ids}), f"{copy}: in {copy.block_ids}"
        for place, block_id in enumerate(copy.block_ids):
            number = -3 - self.contexts.root("page", place, state, position)
            self.pages[number] = place, state, position
            self.now[block_id] = [number] * len(self.now[block_id])
            self.num_uses[block_id] += 1
            for offset in range(len(self.now[block_id])):
                self.unknown.pop((block_id, offset), None)

    def bring(self, block_id: int, row: list[int]) -> None:
        super().bring(block_id, row)
        if row[0] in self.pages:
            self.num_uses[block_id] += 1
            for offset in range(len(row)):
                self.unknown.pop((block_id, offset), None)

    def in_step(self) -> list[kvblocks.Sequence]:
        """Whose tokens or states the next step reads or writes."""
        slots = {copy.slot for copy in [*self.before, *self.after]}
        computed = [sequence for sequence, _ in self.coming()]
        return computed + [s for s, slot in self.slot_of.items() if slot in slots and s not in computed]

    def die(self, num_copies: int) -> None:
        """As in `KVMemory`. All that the step was to write of states is poisoned."""
        for copy in self.before:
            self.states[copy.slot] = GARBAGE
        for sequence, _ in self.coming():
            self.states[self.slot_of[sequence]] = GARBAGE
        for copy in self.after:
            for block_id in copy.block_ids:
                self.now[block_id] = [GARBAGE] * len(self.now[block_id])
        self.before, self.after = [], []
        self.starting.clear()
        self._poison_free_slots()
        super().die(num_copies)

    # What becomes of sequences.

    def fork(self, sequence: kvblocks.Sequence, child: kvblocks.Sequence) -> None:
        super().fork(sequence, child)
        assert child.state_slot is not None and child.state_slot != sequence.state_slot, (
            f"{child}: it has no slot of its own"
        )
        self.slot_of[child] = child.state_slot
        self.starting.add(child)

    def forget(self, sequence: kvblocks.Sequence) -> None:
        super().forget(sequence)
        self.starting.discard(sequence)
        self.slot_of.pop(sequence, None)

    def select(self, sequence: kvblocks.Sequence, num_tokens: int) -> None:
        """Go back to the state after `num_tokens` tokens, which the engine kept. The newer ones stay for a while."""
        slot = self.slot_of[sequence]
        self.kept[slot][self.position[slot]] = self.states[slot]
        self.states[slot], self.position[slot] = self.kept[slot].pop(num_tokens, GARBAGE), num_tokens

    def lose_state(self, sequence: kvblocks.Sequence) -> None:
        """A sequence goes back further than its live state can: the next step has to restore one first."""
        self.starting.add(sequence)

    def restart(self) -> None:
        super().restart()
        self.before, self.after = [], []
        self.num_restored = self.num_cleared = 0  # as another manager counts

    # Questions.

    def context(self, sequence: kvblocks.Sequence, num_tokens: int) -> int:
        """What the state after a sequence's first tokens is."""
        return self.numbers(sequence)[num_tokens - 1] if num_tokens else NOTHING

    def has_state(self, sequence: kvblocks.Sequence, num_tokens: int) -> bool:
        """Whether a sequence's slot holds the state after `num_tokens` tokens, or kept it."""
        slot = self.slot_of[sequence]
        state = self.context(sequence, num_tokens)
        if num_tokens == self.position[slot]:
            return self.states[slot] == state
        return num_tokens < self.position[slot] and self.kept[slot].get(num_tokens) == state

    def what(self, state: int) -> str:
        """What a state is, for messages."""
        for sequence in self.slot_of:
            numbers = [NOTHING, *self.numbers(sequence)]
            if state in numbers:
                return f"the state after {numbers.index(state)} tokens of {sequence}"
        return {GARBAGE: "garbage", NOTHING: "the state after no tokens"}.get(state, f"a foreign state, {state}")

    def must_run_before(self, sequence: kvblocks.Sequence) -> bool:
        """As in `KVMemory`. A sequence is computed in one piece of a step, since its state has one place."""
        return sequence in self.in_step() or super().must_run_before(sequence)

    def is_lost(self, sequence: kvblocks.Sequence) -> bool:
        return super().is_lost(sequence) or self._has_lost_state(sequence)

    def _has_lost_state(self, sequence: kvblocks.Sequence) -> bool:
        if sequence not in self.slot_of or sequence in self.starting:
            return False
        return self.states[self.slot_of[sequence]] != self.context(sequence, self.start_of_step(sequence))

    def row_size(self, row: list[int]) -> int:
        return len(row) if row[0] < 0 else super().row_size(row)
