"""How sequences of a model with recurrent layers get slots, and when their states become checkpoints.

docs/states.md says how engines use this, and docs/design/states-elsewhere.md which faults of other engines it avoids.
The rules that this module keeps:

- A save is noted when a call ends at a place where one is wanted. It takes its blocks in `take_copies`, when all calls
  of the step have been made, and only if enough blocks are free. So a save never takes blocks that a step needs.
- A checkpoint can be found from the moment its save was taken or, if its tokens are delayed, once they are cached:
  nobody starts from a state of its own step.
- A checkpoint is attached only while the sequence's own block still stands for its prefix.
- The sequence owns the blocks of the checkpoint that it starts with, until the engine has taken that copy.
"""

from collections.abc import Iterable
from typing import Any, SupportsIndex

from kvblocks.core.arriving_states import begin_arriving, check_twin, end_arriving, fork_arriving, leave_arriving
from kvblocks.core.attached import GroupIndex
from kvblocks.core.block import Epoch, KVCacheBlock
from kvblocks.core.change import Change
from kvblocks.core.checkpoints import Checkpoint, Checkpoints
from kvblocks.core.group_pool import GroupPool
from kvblocks.core.hit import CacheHit
from kvblocks.core.hooks import Digests
from kvblocks.core.layout import GroupLayout
from kvblocks.core.live_states import LiveState, States, WaitingSave
from kvblocks.core.loading import LoadingHit
from kvblocks.core.longest_hit import GroupHit
from kvblocks.core.need import Need
from kvblocks.core.recurrent import RecurrentState
from kvblocks.core.sequence import Sequence
from kvblocks.core.side_tables import GroupSlots
from kvblocks.core.slots import LostBlocks, SlotAllocator, TableChange
from kvblocks.core.state_copy import StateCopy
from kvblocks.core.tables import tables_of
from kvblocks.errors import InvalidArgumentError, SequenceStateError
from kvblocks.hashing.scheme import HashScheme
from kvblocks.retention.group_pins import GroupPins
from kvblocks.stats import Refusal

MAX_ROUNDING = 1024
"""Places where later prompts may diverge are rounded down to a multiple of at most this many tokens."""

MAX_SHARE = 32
"""At most 1 / MAX_SHARE of a prompt is computed again because places are rounded down."""


class StateSlots(GroupSlots):
    """`GroupSlots` where one group keeps a state.

    states: the live ones. fills_quickly: whether a decoded token that fills or begins a block may take `append_one`,
    because there is one other group, which comes first.
    """

    def __init__(self, pool: GroupPool, change: Change, kind: RecurrentState, checkpoints: Checkpoints) -> None:
        super().__init__(pool, change)
        self.states = States(kind.num_slots, kind.checkpoint_blocks, kind.every or 0, kind.num_kept)
        self.fills_quickly = self.primary_group == 0 and len(self._layout.groups) == 2
        self._checkpoints = checkpoints

    # Room for tokens.

    def start(
        self,
        sequence: Sequence,
        epoch: Epoch | None,
        end: int,
        num_slots: int,
        hit: CacheHit | None,
        *,
        delayed: bool,
    ) -> list[KVCacheBlock] | None:
        """As `GroupSlots.start`. It also returns None if no slot is free."""
        if not self.states.free_slots:
            num_free = self.pool.queue.num_free_blocks
            self.last_refusal = Refusal(self.count_missing(sequence, num_slots, hit), num_free, 0, 0, "slots")
            return None
        blocks = super().start(sequence, epoch, end, num_slots, hit, delayed=delayed)
        if blocks is None:
            return None
        found = hit if isinstance(hit, GroupHit) else None
        checkpoint = None if found is None else found.checkpoint
        start = 0 if found is None else found.num_tokens
        if isinstance(hit, LoadingHit):
            start = hit.end
            state = begin_arriving(self.pool, self.states, sequence, hit, self._take(hit.num_state_blocks, sequence))
        else:
            state = self.states.begin(sequence, start, [] if checkpoint is None else checkpoint.blocks)
            if checkpoint is not None:
                checkpoint.is_landmark = True
                state.made.append(checkpoint)
        if epoch is not None:
            state.plan(self._places(sequence, found), self.states.every, start)
        tables = tables_of(sequence)
        tables.state_slot = state.slot
        tables.live_state = state
        self._pass(sequence, state)
        return blocks

    def append_one(self, sequence: Sequence, token: int) -> list[KVCacheBlock] | None:
        """As `SlotAllocator.append_one`. Only if `fills_quickly`."""
        blocks = super().append_one(sequence, token)
        if blocks is None:
            return None
        tables = tables_of(sequence)
        tables.new_blocks = [blocks, []]
        state = tables.live_state
        if state is not None and sequence.num_computed_tokens >= state.next_place:
            self._pass(sequence, state)
        if self.soft_holds is not None:
            self._extend_pins(sequence)
        return blocks

    def append_step(
        self,
        sequences: list[Sequence],
        tokens: list[Any],
        at_boundary: list[Sequence],
        indices: dict[Sequence, int],
        *,
        delayed: bool,
    ) -> list[TableChange] | None:
        """As the core's `append_step` where that is enough; otherwise as that of `GroupSlots`."""
        if self.fills_quickly:
            changes = SlotAllocator.append_step(self, sequences, tokens, at_boundary, indices, delayed=delayed)
        else:
            changes = super().append_step(sequences, tokens, at_boundary, indices, delayed=delayed)
        if changes is None:
            return None
        for sequence in at_boundary:
            state = self._state_of(sequence)
            if sequence.num_computed_tokens >= state.next_place:
                self._pass(sequence, state)
        if self.fills_quickly:
            for index, _, position, _ in changes:
                tables_of(sequences[index]).new_blocks = [[sequences[index].blocks[position]], []]
            if self.soft_holds is not None:
                for sequence in at_boundary:
                    self._extend_pins(sequence)
        return changes

    def count_missing(self, sequence: Sequence, num_slots: int, hit: CacheHit | None) -> int:
        """As `GroupSlots.count_missing`, with the free blocks of the hit's checkpoint."""
        num_missing = super().count_missing(sequence, num_slots, hit)
        if sequence.owner is None and isinstance(hit, GroupHit) and hit.checkpoint is not None:
            num_missing += sum([block.ref_cnt == 0 for block in hit.checkpoint.blocks])
        return num_missing

    def check_room(self, sequence: Sequence, hit: CacheHit | None, num_external: int, num_total: int | None) -> None:
        """Raise InvalidArgumentError for external tokens without their state, or more drafts than can be undone."""
        if num_external and not isinstance(hit, LoadingHit):  # loads bring the state, too
            raise InvalidArgumentError(
                "num_external_computed_tokens: expected 0 where layers keep a state, since the state after these tokens"
                f" would be missing, got {num_external}"
            )
        most = sequence.num_tokens + self.states.num_kept
        if num_total is not None and num_total > most:
            raise InvalidArgumentError(
                f"num_total_tokens: expected at most {most}, the known tokens and num_kept={self.states.num_kept}"
                f" drafts that a recurrent state can take back, got {num_total}"
            )

    # Sequences that part, go back and end.

    def check_fork(self, sequence: Sequence) -> None:
        """Raise SequenceStateError if no slot is free, or, when debugging, if the sequence's state isn't computed."""
        state = self._state_of(sequence)
        if not self.states.free_slots:
            raise SequenceStateError("fork: expected a free slot for the state of the new sequence, got none")
        check_twin(sequence, state)
        if self._change.rest and state.arriving is None and sequence.num_computed_tokens != state.num_taken:
            raise SequenceStateError(
                f"fork: expected a sequence whose tokens are all computed, since its state is copied before the next"
                f" step; got {sequence}, which got slots since copies of states were last taken"
            )

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """As `GroupSlots.fork`. The twin gets a slot, and a copy of the state."""
        super().fork(sequence, twin)
        state, tables = self._state_of(sequence), tables_of(twin)
        if state.arriving is not None:
            copy = fork_arriving(self.pool, self.states, state, twin)
        else:
            copy = self.states.fork(state, twin, sequence.num_computed_tokens)
            self.pool.touch(copy.restoring)
        copy.made += state.made
        copy.start = state.start
        copy.plan(state.places, state.every, twin.num_computed_tokens)
        tables.state_slot = copy.slot
        tables.live_state = copy

    def check_kept(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise SequenceStateError if a state can't go back to `num_tokens` tokens."""
        least = max(sequence.num_computed_tokens - self.states.num_kept, self._state_of(sequence).start)
        if num_tokens < least:
            raise SequenceStateError(
                f"truncate: expected to keep at least {least} tokens with slots, since a recurrent state can't go back"
                f" further (num_kept={self.states.num_kept}), got {num_tokens} of {sequence}: rewind it first"
            )

    def rewind(self, sequence: Sequence, num_tokens: int) -> None:
        """As `GroupSlots.rewind`, to a position that the state has not passed or whose state the engine has kept."""
        state = self._state_of(sequence)
        state.start = max(state.start, sequence.num_computed_tokens - self.states.num_kept)
        super().rewind(sequence, num_tokens)
        state.num_taken = min(state.num_taken, sequence.num_computed_tokens)
        self._drop_waiting(state, sequence.num_computed_tokens)
        state.go_to(sequence.num_computed_tokens)

    def floor_of(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the last position, at most `num_tokens` and a multiple of the alignment, whose state can be had again.

        0 if there is no checkpoint. O(runs + checkpoints of a run).
        """
        if num_tokens == sequence.num_computed_tokens:
            return num_tokens
        if sequence.epoch is not self._index.epoch:
            return 0
        num_blocks = min(num_tokens // self._block_size, sequence.num_cached_blocks)
        return self._checkpoints.num_up_to_last(sequence.blocks, num_blocks) * self._block_size

    def go_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence that was rewound to `num_tokens` tokens the state after them. O(blocks of a checkpoint)."""
        state, found = self._state_of(sequence), None
        blocks = leave_arriving(self.pool, state, num_tokens)
        if blocks is None:
            if num_tokens:
                found = self._checkpoints.at(sequence.blocks[num_tokens // self._block_size - 1])
                assert found is not None, f"{sequence}: went back to where no checkpoint is"
            blocks = [] if found is None else found.blocks
            self.pool.touch(blocks)
        self.pool.release_table(state.restoring)
        self.states.restart(state, num_tokens, blocks)
        if found is not None:
            found.is_landmark = True
            if found not in state.made:
                state.made.append(found)
        self.states.wanted.pop(sequence, None)

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> int | None:
        """As `GroupSlots.first_lost_in`. A state that comes from one of these blocks counts from the token before it,
        so that it is lost even if no token follows it.
        """
        state, first = self._state_of(sequence), super().first_lost_in(sequence, lost)
        starts = [] if first is None else [first]
        if not lost.keys().isdisjoint(state.restoring):
            assert state.origin is not None, f"{sequence}: reads blocks for nothing"
            starts.append(state.origin.copy.position - 1)
        if state.arriving is not None and not lost.keys().isdisjoint(state.arriving.fallback):
            starts.append(state.arriving.start - 1)
        return min(starts, default=None)

    def lose(self, lost: LostBlocks, sequences: Iterable[Sequence]) -> None:
        """As `SlotAllocator.lose`. Saves that wait in these blocks, or come after what is lost, are dropped."""
        running = list(sequences)
        super().lose(lost, running)
        for sequence in running:
            state = self._state_of(sequence)
            bad = [save for save in state.waiting if not lost.keys().isdisjoint(save.blocks)]
            if bad:
                self._drop_waiting(state, min([save.position for save in bad]) - 1)
            if sequence.lost_from is not None:
                self._drop_waiting(state, sequence.lost_from)

    def cache_from(self, sequence: Sequence, first: int, num_tokens: int, digests: Digests | None) -> None:
        """As `GroupSlots.cache_from`. The checkpoints that waited for this can be found from now on."""
        super().cache_from(sequence, first, num_tokens, digests)
        state = self._state_of(sequence)
        waiting, state.waiting = state.waiting, []
        for save in waiting:
            if save.position > sequence.num_cached_blocks * self._block_size:
                state.waiting.append(save)
                continue
            if self._can_attach(sequence, save.position):
                checkpoint = Checkpoint(save.blocks, save.position, is_landmark=save.is_landmark)
                self._attach(sequence, state, save.position, checkpoint)
            self._release(save.blocks, is_landmark=save.is_landmark)

    def end_loads(self, sequence: Sequence) -> None:
        """As `GroupSlots.end_loads`. The sequence's slot is restored from the checkpoint that the loads brought."""
        super().end_loads(sequence)
        end_arriving(self.pool, self.states, self._state_of(sequence))

    def tables(self, sequence: Sequence) -> list[list[KVCacheBlock]]:
        """As `GroupSlots.tables`, with the blocks that the state owns."""
        return super().tables(sequence) + self._state_of(sequence).tables()

    def check(self) -> None:
        """Raise AssertionError unless each slot is free or has one sequence. O(slots)."""
        self.states.check()

    # What the engine asks for.

    def next_cut(self, sequence: Sequence, max_end: int, hit: CacheHit | None) -> int:
        """Return the first place to save after the sequence's state, or the hit's, at most `max_end`."""
        if sequence.owner is not None:
            place = self._state_of(sequence).first_after(sequence.num_computed_tokens)
        else:
            found = hit if isinstance(hit, GroupHit) else None
            start, every = 0 if found is None else found.num_tokens, self.states.every
            places = [place for place in self._places(sequence, found) if place > start]
            places += [(start // every + 1) * every] if every else []
            place = min(places, default=max_end)
        return min(place, max_end)

    def mark(self, sequence: Sequence, position: int) -> int:
        """Have a sequence's state saved at a position, rounded down to the alignment, and return that. O(marks)."""
        place = position // self.alignment * self.alignment
        if place and place not in sequence.state_marks:
            sequence.state_marks = (*sequence.state_marks, place)
        if place and sequence.owner is not None and sequence.epoch is not None:
            self._state_of(sequence).add_place(place, sequence.num_computed_tokens)
        return place

    def take_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """Return the copies to make before and after the step, and forget them. The checkpoints can be found from now
        on.

        O(copies + blocks of checkpoints), and O(sequences) when debugging.
        """
        states = self.states
        starting = [origin.state for origin in states.pending if origin.state is not None]
        before = states.take()
        for state in starting:
            restoring, state.restoring = state.restoring, []
            self.pool.release_table(restoring)
        for copy in before:
            states.num_cleared += copy.kind == "clear"
            states.num_restored += copy.kind == "restore"
            states.num_forked += copy.kind == "fork"
        wanted, states.wanted = states.wanted, {}
        after: list[StateCopy] = []
        saved: list[Checkpoint] = []
        for sequence, position in wanted.items():
            self._save(sequence, position, after, saved)
        for checkpoint in saved:  # last, so that no save takes the blocks of another one in the same step
            self._release(checkpoint.blocks, is_landmark=checkpoint.is_landmark)
        if self._change.rest:
            for sequence, state in states.running.items():
                state.num_taken = sequence.num_computed_tokens
        return before, after

    # Parts of the above.

    def _finish(self, need: Need, end: int, digests: Digests | None) -> list[KVCacheBlock]:
        blocks = super()._finish(need, end, digests)
        state = need.tables.live_state
        if state is not None:  # None: the sequence starts
            self._pass(need.sequence, state)
        return blocks

    def _release_tables(self, sequence: Sequence) -> None:
        """Release the blocks, and then those of the state: its checkpoints are reused after the sequence's blocks."""
        super()._release_tables(sequence)
        state = self._state_of(sequence)
        for blocks in state.tables():
            self.pool.release_table(blocks)
        state.restoring, state.arriving = [], None
        for checkpoint in state.made:
            if checkpoint.is_cached and checkpoint.is_landmark and not checkpoint.blocks[0].ref_cnt:
                self.pool.touch(checkpoint.blocks)
                self.pool.release_table(checkpoint.blocks)
        self.states.end(sequence, state)

    def _state_of(self, sequence: Sequence) -> LiveState:
        state = tables_of(sequence).live_state
        assert state is not None, f"{sequence}: has no state"
        return state

    def _places(self, sequence: Sequence, hit: GroupHit | None) -> set[int]:
        """Return where to save a starting sequence's state: where later prompts will probably diverge from it.

        These are the end of what is known, since a later turn goes on there; the end of the primary group's prefix, on
        the device or in a tier, since two prompts have diverged there; the ends of pins that lack blocks; and the
        engine's marks.
        """
        step, num_tokens = self.alignment, sequence.num_tokens
        while 2 * step <= min(num_tokens // MAX_SHARE, MAX_ROUNDING):
            step *= 2  # a prompt's end often changes a little until the next turn
        last = (num_tokens - 1) // step * step
        places = {last, *sequence.state_marks}
        if isinstance(self.soft_holds, GroupPins):
            places.update(self.soft_holds.ends_in(sequence))
        if hit is not None:
            places.add(min(last, max(hit.num_matched_tokens, hit.num_tier_tokens) // step * step))
        return places - {0}

    def _pass(self, sequence: Sequence, state: LiveState) -> None:
        """Record that a step is scheduled up to the sequence's last token with slots. While it loads, none is."""
        end = sequence.num_computed_tokens
        while state.next_place < end + (state.arriving is not None):
            self.states.num_passed += 1
            state.go_to(state.next_place)
        if state.next_place == end:
            self.states.wanted[sequence] = end
            state.go_to(end)

    def _save(self, sequence: Sequence, position: int, after: list[StateCopy], saved: list[Checkpoint]) -> None:
        """Have a sequence's state copied after the step, unless that is of no use or there is no room.

        Appends the copy to `after`, and the checkpoint to `saved` if it can be found from now on.
        """
        states, state = self.states, self._state_of(sequence)
        if sequence.num_computed_tokens != position:
            states.num_passed += 1
            return
        waits = sequence.delayed_from is not None and sequence.delayed_from < position
        is_lost = sequence.lost_from is not None and sequence.lost_from < position
        if sequence.epoch is not self._index.epoch or is_lost:
            states.num_taken_back += 1
            return
        if not waits and not self._can_attach(sequence, position):
            return
        if self.pool.queue.num_free_blocks < states.num_blocks:
            states.num_without_room += 1
            return
        blocks, is_landmark = self._take(states.num_blocks, sequence), state.is_landmark(position)
        after.append(StateCopy("save", position, state.slot, -1, tuple([block.block_id for block in blocks])))
        if waits:
            state.waiting.append(WaitingSave(position, blocks, is_landmark=is_landmark))
            return
        checkpoint = Checkpoint(blocks, position, is_landmark=is_landmark)
        self._attach(sequence, state, position, checkpoint)
        saved.append(checkpoint)

    def _can_attach(self, sequence: Sequence, position: int) -> bool:
        """Whether a checkpoint can be found at a position from now on. If not, the reason is counted."""
        number = position // self._block_size
        if number > sequence.num_cached_blocks or not sequence.blocks[number - 1].is_cached:
            self.states.num_taken_back += 1  # by another sequence's abort or rewind
            return False
        if self._checkpoints.at(sequence.blocks[number - 1]) is not None:
            self.states.num_present += 1
            return False
        return True

    def _attach(self, sequence: Sequence, state: LiveState, position: int, checkpoint: Checkpoint) -> None:
        number = position // self._block_size
        self._group_index.attach_checkpoint(sequence.blocks[number - 1], checkpoint)
        if self._index.events is not None:
            first = 4 * (position - self.alignment)
            tokens = bytes(sequence.packed_tokens()[first : 4 * position])
            self._group_index.note_checkpoint(sequence.blocks, number, checkpoint, tokens, sequence.sequence_id)
        state.made.append(checkpoint)
        self.states.num_saved += 1
        if self.soft_holds is not None:
            self.soft_holds.extend(sequence)  # now, since nobody owns the checkpoint later

    def _release(self, blocks: list[KVCacheBlock], *, is_landmark: bool) -> None:
        if not blocks[0].is_cached:
            self.pool.release_table(blocks)
        elif is_landmark:
            self.pool.release_table(blocks, len(blocks))
        else:
            self._group_pool.release_passed(blocks, [])

    def _extend_pins(self, sequence: Sequence) -> None:
        """Let pins hold the block that a token has filled, if it is cached now, as `_cache` does."""
        is_cached = sequence.num_cached_blocks * self._block_size == sequence.num_computed_tokens
        if self.soft_holds is not None and is_cached:
            self.soft_holds.extend(sequence)

    def _drop_waiting(self, state: LiveState, num_tokens: int) -> None:
        """Drop the waiting saves of states after more than `num_tokens` tokens."""
        waiting, state.waiting = state.waiting, []
        for save in waiting:
            if save.position > num_tokens:
                self.pool.release_table(save.blocks)
            else:
                state.waiting.append(save)


def make_state_slots(
    num_blocks: SupportsIndex,
    layout: GroupLayout,
    hash_scheme: HashScheme,
    change: Change,
    first_block_id: SupportsIndex,
) -> StateSlots:
    """Return the slot allocator of a manager with a group that keeps a state. As `groups.slots.make_slots`."""
    index, kind = GroupIndex(layout, hash_scheme), layout.state_kind
    assert kind is not None and index.checkpoints is not None, "no group keeps a state"
    slots = StateSlots(GroupPool(num_blocks, index, first_block_id), change, kind, index.checkpoints)
    slots.groups = layout.groups
    return slots
