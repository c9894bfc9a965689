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

from typing import TYPE_CHECKING

from kvblocks.core.arriving_states import begin_arriving, check_child, end_arriving, fork_arriving, leave_arriving
from kvblocks.core.block import Epoch, KVCacheBlock
from kvblocks.core.checkpoints import Checkpoint
from kvblocks.core.component import Component, LostBlocks
from kvblocks.core.hit import CacheHit
from kvblocks.core.live_states import LiveState, States, WaitingSave
from kvblocks.core.sequence import Sequence
from kvblocks.core.state_copy import StateCopy
from kvblocks.core.tables import SideTables, side_tables_of
from kvblocks.errors import InvalidArgumentError, SequenceStateError

if TYPE_CHECKING:
    from kvblocks.core.slots import SlotAllocator

MAX_ROUNDING = 1024
"""Places where later prompts may diverge are rounded down to a multiple of at most this many tokens."""

MAX_SHARE = 32
"""At most 1 / MAX_SHARE of a prompt is computed again because places are rounded down."""


class RecurrentStates(Component):
    """The states of the sequences of `slots`, of which one group keeps them. Only for the allocator and the manager."""

    def __init__(self, slots: "SlotAllocator") -> None:
        attached = slots.pool.index.attached
        assert attached is not None and attached.checkpoints is not None, "no group keeps a state"
        kind = attached.layout.state_kind
        assert kind is not None, "no group keeps a state"
        self._slots = slots
        self._pool = slots.pool
        self._index = slots.pool.index
        self._block_size = slots.pool.index.block_size
        self._attached = attached
        self._checkpoints = attached.checkpoints
        self._alignment = attached.layout.alignment
        self.live = States(kind.num_slots, kind.checkpoint_blocks, kind.every or 0, kind.num_kept)
        """The slots, and the live states in them."""

    # What the allocator tells.

    def start(self, sequence: Sequence, side: SideTables, hit: CacheHit | None, epoch: Epoch | None) -> None:
        """Give a sequence that was just given blocks a slot, which must be free. O(blocks of checkpoints)."""
        parts = None if hit is None else hit.parts
        loads = None if parts is None else parts.loads
        if parts is not None and loads is not None:
            start = loads.end
            blocks = self._slots.take(loads.num_state_blocks, sequence)
            state = begin_arriving(self._pool, self.live, sequence, parts, blocks)
        else:
            checkpoint = None if parts is None else parts.checkpoint
            start = 0 if hit is None else hit.num_tokens
            state = self.live.begin(sequence, start, [] if checkpoint is None else checkpoint.blocks)
            if checkpoint is not None:
                checkpoint.is_likely_end = True
                state.made.append(checkpoint)
        if epoch is not None:
            state.plan(self._places(sequence, hit), self.live.every, start)
        side.live_state = state
        self.note_slots(sequence, side)

    def note_slots(self, sequence: Sequence, side: SideTables) -> None:
        """Record that a step is scheduled up to the sequence's last token with slots. While it loads, none is. O(1)."""
        state, end = side.live_state, sequence.num_computed_tokens
        if state is None or state.next_place > end:  # None: the sequence starts, and comes here again
            return
        while state.next_place < end + (state.arriving is not None):
            self.live.num_passed += 1
            state.go_to(state.next_place)
        if state.next_place == end:
            self.live.wanted[sequence] = end
            state.go_to(end)

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Give the fork of a sequence a slot, and a copy of the state. O(blocks of checkpoints)."""
        state = self._state_of(sequence)
        if state.arriving is not None:
            copy = fork_arriving(self._pool, self.live, state, child)
        else:
            copy = self.live.fork(state, child, sequence.num_computed_tokens)
            self._pool.touch(copy.restoring)
        copy.made += state.made
        copy.start = state.start
        copy.plan(state.places, state.every, child.num_computed_tokens)
        side_tables_of(child).live_state = copy

    def note_rewinding(self, sequence: Sequence, num_tokens: int) -> int:
        """As `Component.note_rewinding`."""
        state = self._state_of(sequence)
        state.start = max(state.start, sequence.num_computed_tokens - self.live.num_kept)
        return num_tokens

    def note_rewound(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: ARG002  # what is computed counts
        """Record that a sequence was rewound, to where its state wasn't yet, or is kept or restored. O(saves)."""
        state, num_computed = self._state_of(sequence), sequence.num_computed_tokens
        state.num_taken = min(state.num_taken, num_computed)
        self._drop_waiting(state, num_computed)
        state.go_to(num_computed)

    def first_lost_in(self, sequence: Sequence, lost: LostBlocks) -> list[int]:
        """Return from which tokens on a sequence's state is lost with these blocks; [] if it isn't. O(blocks).

        A state that comes from one of these blocks counts from the token before it, so that it is lost even if no token
        follows it.
        """
        state, starts = self._state_of(sequence), list[int]()
        if not lost.keys().isdisjoint(state.restoring):
            assert state.origin is not None, f"{sequence}: reads blocks for nothing"
            starts.append(state.origin.copy.position - 1)
        if state.arriving is not None and not lost.keys().isdisjoint(state.arriving.fallback):
            starts.append(state.arriving.start - 1)
        return starts

    def lose(self, sequence: Sequence, lost: LostBlocks) -> None:
        """Drop the saves of a sequence that wait in these blocks, or come after what is lost. O(saves)."""
        state = self._state_of(sequence)
        bad = [save for save in state.waiting if not lost.keys().isdisjoint(save.blocks)]
        if bad:
            self._drop_waiting(state, min([save.position for save in bad]) - 1)
        if sequence.lost_from is not None:
            self._drop_waiting(state, sequence.lost_from)

    def note_full(self, sequence: Sequence, first: int) -> None:  # noqa: ARG002  # saves know where they are
        """Let lookups find the checkpoints that waited for their tokens to be cached. O(saves)."""
        state = self._state_of(sequence)
        waiting, state.waiting = state.waiting, []
        for save in waiting:
            if save.position > sequence.num_cached_blocks * self._block_size:
                state.waiting.append(save)
                continue
            if self._can_attach(sequence, save.position):
                checkpoint = Checkpoint(save.blocks, save.position, is_likely_end=save.is_likely_end)
                self._attach(sequence, state, save.position, checkpoint)
            self._release(save.blocks, is_likely_end=save.is_likely_end)

    def end_loads(self, sequence: Sequence) -> None:
        """Have a sequence's slot restored from the checkpoint that its loads brought. O(blocks + copies)."""
        end_arriving(self._pool, self.live, self._state_of(sequence))

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's slot, and the blocks of its state, which are reused after those of the sequence."""
        state = self._state_of(sequence)
        for blocks in state.tables():
            self._pool.release_table(blocks)
        state.restoring, state.arriving = [], None
        for checkpoint in state.made:
            if checkpoint.is_cached and checkpoint.is_likely_end and not checkpoint.blocks[0].ref_cnt:
                self._pool.touch(checkpoint.blocks)
                self._pool.release_table(checkpoint.blocks)
        self.live.end(sequence, state)

    def check(self) -> None:
        """Raise AssertionError unless each slot is free or has one sequence. O(slots)."""
        self.live.check()

    # What the manager asks.

    def check_room(self, sequence: Sequence, hit: CacheHit | None, num_external: int, num_total: int | None) -> None:
        """Raise InvalidArgumentError for external tokens without their state, or more drafts than can be undone."""
        if num_external and not _loads(hit):  # loads bring the state, too
            raise InvalidArgumentError(
                "num_external_computed_tokens: expected 0 where layers keep a state, since the state after these tokens"
                f" would be missing, got {num_external}"
            )
        most = sequence.num_tokens + self.live.num_kept
        if num_total is not None and num_total > most:
            raise InvalidArgumentError(
                f"num_total_tokens: expected at most {most}, the known tokens and num_kept={self.live.num_kept}"
                f" drafts that a recurrent state can take back, got {num_total}"
            )

    def check_fork(self, sequence: Sequence) -> None:
        """Raise SequenceStateError if no slot is free, or, when debugging, if the sequence's state isn't computed."""
        state = self._state_of(sequence)
        if not self.live.free_slots:
            raise SequenceStateError("fork: expected a free slot for the state of the new sequence, got none")
        check_child(sequence, state)
        if self._slots.is_debugging and state.arriving is None and sequence.num_computed_tokens != state.num_taken:
            raise SequenceStateError(
                f"fork: expected a sequence whose tokens are all computed, since its state is copied before the next"
                f" step; got {sequence}, which got slots since copies of states were last taken"
            )

    def check_kept(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise SequenceStateError if a state can't go back to `num_tokens` tokens."""
        least = max(sequence.num_computed_tokens - self.live.num_kept, self._state_of(sequence).start)
        if num_tokens < least:
            raise SequenceStateError(
                f"truncate: expected to keep at least {least} tokens with slots, since a recurrent state can't go back"
                f" further (num_kept={self.live.num_kept}), got {num_tokens} of {sequence}: rewind it first"
            )

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
        blocks = leave_arriving(self._pool, state, num_tokens)
        if blocks is None:
            if num_tokens:
                found = self._checkpoints.at(sequence.blocks[num_tokens // self._block_size - 1])
                assert found is not None, f"{sequence}: went back to where no checkpoint is"
            blocks = [] if found is None else found.blocks
            self._pool.touch(blocks)
        self._pool.release_table(state.restoring)
        self.live.restart(state, num_tokens, blocks)
        if found is not None:
            found.is_likely_end = True
            if found not in state.made:
                state.made.append(found)
        self.live.wanted.pop(sequence, None)

    # What the engine asks for.

    def next_cut(self, sequence: Sequence, max_end: int, hit: CacheHit | None) -> int:
        """Return the first place to save after the sequence's state, or the hit's, at most `max_end`."""
        if sequence.owner is not None:
            place = self._state_of(sequence).first_after(sequence.num_computed_tokens)
        else:
            start, every = 0 if hit is None else hit.num_tokens, self.live.every
            places = [place for place in self._places(sequence, hit) if place > start]
            places += [(start // every + 1) * every] if every else []
            place = min(places, default=max_end)
        return min(place, max_end)

    def mark(self, sequence: Sequence, position: int) -> int:
        """Have a sequence's state saved at a position, rounded down to the alignment, and return that. O(marks)."""
        place = position // self._alignment * self._alignment
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
        states = self.live
        starting = [origin.state for origin in states.pending if origin.state is not None]
        before = states.take()
        for state in starting:
            restoring, state.restoring = state.restoring, []
            self._pool.release_table(restoring)
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
            self._release(checkpoint.blocks, is_likely_end=checkpoint.is_likely_end)
        if self._slots.is_debugging:
            for sequence, state in states.running.items():
                state.num_taken = sequence.num_computed_tokens
        return before, after

    # Parts of the above.

    def _state_of(self, sequence: Sequence) -> LiveState:
        state = side_tables_of(sequence).live_state
        assert state is not None, f"{sequence}: has no state"
        return state

    def _places(self, sequence: Sequence, hit: CacheHit | None) -> set[int]:
        """Return where to save a starting sequence's state: where later prompts will probably diverge from it.

        These are the end of what is known, since a later turn goes on there; the end of the primary group's prefix, on
        the device or in a tier, since two prompts have diverged there; the ends of pins that lack blocks; and the
        engine's marks.
        """
        step, num_tokens = self._alignment, sequence.num_tokens
        while 2 * step <= min(num_tokens // MAX_SHARE, MAX_ROUNDING):
            step *= 2  # a prompt's end often changes a little until the next turn
        last = (num_tokens - 1) // step * step
        places = {last, *sequence.state_marks}
        if self._slots.soft_holds is not None:
            places.update(self._slots.soft_holds.ends_in(sequence))
        if hit is not None and hit.parts is not None:
            places.add(min(last, max(hit.num_matched_tokens, hit.parts.num_tier_tokens) // step * step))
        return places - {0}

    def _save(self, sequence: Sequence, position: int, after: list[StateCopy], saved: list[Checkpoint]) -> None:
        """Have a sequence's state copied after the step, unless that is of no use or there is no room.

        Appends the copy to `after`, and the checkpoint to `saved` if it can be found from now on.
        """
        states, state = self.live, self._state_of(sequence)
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
        if self._pool.queue.num_free_blocks < states.num_blocks:
            states.num_without_room += 1
            return
        blocks, is_likely_end = self._slots.take(states.num_blocks, sequence), state.is_likely_end(position)
        after.append(StateCopy("save", position, state.slot, -1, tuple([block.block_id for block in blocks])))
        if waits:
            state.waiting.append(WaitingSave(position, blocks, is_likely_end=is_likely_end))
            return
        checkpoint = Checkpoint(blocks, position, is_likely_end=is_likely_end)
        self._attach(sequence, state, position, checkpoint)
        saved.append(checkpoint)

    def _can_attach(self, sequence: Sequence, position: int) -> bool:
        """Whether a checkpoint can be found at a position from now on. If not, the reason is counted."""
        number = position // self._block_size
        if number > sequence.num_cached_blocks or not sequence.blocks[number - 1].is_cached:
            self.live.num_taken_back += 1  # by another sequence's abort or rewind
            return False
        if self._checkpoints.at(sequence.blocks[number - 1]) is not None:
            self.live.num_present += 1
            return False
        return True

    def _attach(self, sequence: Sequence, state: LiveState, position: int, checkpoint: Checkpoint) -> None:
        number = position // self._block_size
        self._attached.attach_checkpoint(sequence.blocks[number - 1], checkpoint)
        if self._index.events is not None:
            first = 4 * (position - self._alignment)
            tokens = bytes(sequence.packed_tokens()[first : 4 * position])
            self._attached.note_checkpoint(sequence.blocks, number, checkpoint, tokens, sequence.sequence_id)
        state.made.append(checkpoint)
        self.live.num_saved += 1
        if self._slots.soft_holds is not None:
            self._slots.soft_holds.extend(sequence)  # now, since nobody owns the checkpoint later

    def _release(self, blocks: list[KVCacheBlock], *, is_likely_end: bool) -> None:
        if not blocks[0].is_cached:
            self._pool.release_table(blocks)
        elif is_likely_end:
            self._pool.release_table(blocks, len(blocks))
        else:
            self._pool.release_passed(blocks, [])

    def _drop_waiting(self, state: LiveState, num_tokens: int) -> None:
        """Drop the waiting saves of states after more than `num_tokens` tokens."""
        waiting, state.waiting = state.waiting, []
        for save in waiting:
            if save.position > num_tokens:
                self._pool.release_table(save.blocks)
            else:
                state.waiting.append(save)


def _loads(hit: CacheHit | None) -> bool:
    return hit is not None and hit.parts is not None and hit.parts.loads is not None
