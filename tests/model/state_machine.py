"""An engine with live states in miniature: `TierMachine`, whose memory has the states of recurrent layers.

Each step copies states as it was told, computes each sequence's tokens with its live state, and saves what it was told
to save. Chunks end where the manager says, or anywhere. Steps die, sequences end at any time, and whatever a lookup
finds must be there: the KV of all groups, and a checkpoint that holds the state after exactly these tokens.
"""

from typing import Any

import pytest

import kvblocks
from kvblocks import CacheHit, Group, RecurrentState, SequenceStateError, Tier, TierHit
from kvblocks.core.loading import Loads
from kvblocks.core.tables import side_tables_of
from model.kv_memory import ENDLESS
from model.state_memory import StateMemory
from model.tier_machine import MAX_RUNNING, MAX_TOKENS, TierMachine


class StateMachine(TierMachine):
    """Random operations on a manager of `groups` that attend, and of a `state`. tiers: perhaps none."""

    memory: StateMemory

    def __init__(
        self, seed: int, num_blocks: int, groups: list[Group], state: RecurrentState, tiers: list[Tier], **options: Any
    ) -> None:
        self.attending, self.state = tuple(groups), state
        self.is_checked = options.get("debug", False)
        super().__init__(seed, num_blocks, None, tiers, groups=[*groups, state], **options)
        self.num_prompts = 3

    def weight_of(self, operation: str) -> int:
        if not self.tiers and operation in _OF_TIERS:
            return 0
        if self.tiers and operation == "do_crowd":
            return 12
        if self.tiers and operation in {"do_load", "do_lose_a_hit"}:
            return 8
        return _WEIGHTS.get(operation, super().weight_of(operation))

    def make_memory(self, num_blocks: int) -> StateMemory:
        state, size = self.state, self.manager.block_size
        return StateMemory(num_blocks, self.attending, size, state.num_slots, state.checkpoint_blocks, state.num_kept)

    # Lookups.

    def look_up(self, sequence: kvblocks.Sequence) -> tuple[CacheHit, list[TierHit]]:
        hit, loads = super().look_up(sequence)
        self.check_state(sequence, hit)
        return hit, loads

    def check_state(self, sequence: kvblocks.Sequence, hit: Any) -> None:
        """A hit ends before the last token, where a checkpoint has the state after exactly its tokens."""
        end = hit.num_tokens
        assert end < sequence.num_tokens and end % self.manager.alignment == 0, f"{sequence}: a hit of {end} tokens"
        assert end <= hit.num_matched_tokens <= sequence.num_tokens
        assert hit.num_readonly_tokens == end, f"{sequence}: {hit.num_readonly_tokens} are read-only, and {end} hit"
        if not end:
            assert hit.checkpoint_block_ids == (), f"{sequence}: an empty hit has a checkpoint"
            return
        found = self.memory.read(hit.checkpoint_block_ids, end)
        numbers = self.memory.chain(sequence.salt, sequence.lora, sequence.token_ids(), sequence.extra_keys)
        assert found == numbers[end - 1], f"{sequence}: its checkpoint at {end} holds {self.memory.what(found)}"
        self.count("hits")
        self.count("limited hits", hit.num_matched_tokens - end >= self.manager.alignment)

    def do_load(self) -> None:
        """A prompt is computed and stored, and the device forgets it. Another sequence loads it, or a part of it."""
        while len(self.running) > 1:
            self.end(self.random.choice(self.running))
        self.do_new()
        other = self.waiting[-1]
        self.compute(other)
        if other in self.running:
            self.end(other)
        for _ in range(self.random.randint(1, 3)):
            self.do_take_transfers()
            for moving in list(self.moving):
                self.answer(moving)
        if self.random.random() < 0.5:
            self.do_crowd()
        self.do_crowd()
        if self.random.random() < 0.4 and not other.extra_keys:  # the device has the beginning again
            self.add(other.token_ids(0, self.random.randint(1, other.num_tokens)), other.salt, [])
            self.compute(self.waiting[-1])
        num_tokens = self.random.choice([other.num_tokens, self.random.randint(1, other.num_tokens)])
        if all(end <= num_tokens for _, end, _ in other.extra_keys):
            self.add([*other.token_ids(0, num_tokens), 1], other.salt, list(other.extra_keys))
            later = self.waiting[-1]
            self.start(later, num_loads=2)
            is_behind_hit = self.waits_from.get(later, 0) > 0
            self.count("hit and loads", is_behind_hit)
            if is_behind_hit and self.random.random() < 0.4:
                how = self.random.choice(
                    ["reset", "salt", "lost", "step dies", "rewind", "truncate", "give up", "fork"]
                )
                if how == "reset":
                    self.manager.reset_prefix_cache()
                    self.found.clear()
                elif how == "salt":
                    self.manager.forget_salt(later.salt)
                elif how == "lost":
                    self.lose_some(later)
                else:
                    getattr(self, {"step dies": "do_step_dies"}.get(how, f"do_{how.replace(' ', '_')}"))()

    def compute(self, sequence: kvblocks.Sequence) -> None:
        """Compute a waiting sequence to its end, if there is room, with all the cuts that the manager asks for."""
        self.start(sequence, num_loads=0)
        while sequence in self.running and sequence.num_computed_tokens < sequence.num_tokens:
            self.step()
            end = self.manager.states.next_cut(sequence, sequence.num_tokens)
            if self.manager.allocate_slots(sequence, end - sequence.num_computed_tokens) is None:
                break
            self.schedule()
        self.step()

    def check_arriving(self, load: TierHit, loads: Loads, below: list[list[int]], number: int) -> None:
        end = load.first_token + load.num_tokens
        if loads.arriving is None:
            assert len(below) == self.state.checkpoint_blocks == loads.num_state_blocks, f"{load}: a part of a state"
            found = self.memory.read_rows(below, end)
        else:
            assert not below and not loads.num_state_blocks, f"{load}: brings what the device has"
            found = self.memory.read([block.block_id for block in loads.arriving.blocks], end)
        assert found == number, f"{load}: its checkpoint at {end} holds {self.memory.what(found)}"
        self.count("states found below", bool(below))
        self.count("states found on the device, with windows below", not below)

    # Chunks.

    def first_chunk(self, sequence: kvblocks.Sequence, hit: CacheHit, loads: list[TierHit], left: int) -> int | None:
        if loads:
            return super().first_chunk(sequence, hit, loads, left)
        start = sequence.num_tokens - left
        least = start if hit.blocks else start + 1
        return self.cut(sequence, start, self.end_of_chunk(sequence, least), hit) - start

    def next_chunk(self, sequence: kvblocks.Sequence) -> int:
        start = sequence.num_computed_tokens
        return self.cut(sequence, start, self.end_of_chunk(sequence, start + 1)) - start

    def end_of_chunk(self, sequence: kvblocks.Sequence, least: int) -> int:
        return sequence.num_tokens if self.random.random() < 0.6 else self.random.randint(least, sequence.num_tokens)

    def cut(self, sequence: kvblocks.Sequence, start: int, end: int, hit: CacheHit | None = None) -> int:
        """Return where a chunk ends: at most at `end`, mostly where the manager says."""
        if end <= start or self.random.random() < 0.2:
            return end
        found = self.manager.states.next_cut(sequence, end, hit)
        assert start < found <= end, f"{sequence}: a chunk from {start} to {end} ends at {found}"
        assert found == end or found % self.manager.alignment == 0, f"{sequence}: a chunk ends at {found}"
        self.count("cuts", found < end)
        return found

    def do_mark(self) -> None:
        sequence = self.random.choice(self.running + self.waiting) if self.running + self.waiting else None
        if sequence is not None:
            position = self.random.randint(1, sequence.num_tokens)
            found = self.manager.states.mark(sequence, position)
            assert found == position // self.manager.alignment * self.manager.alignment
            self.count("marks", found > sequence.num_computed_tokens)

    def do_append(self) -> None:
        sequence = self.pick(loading=False)
        if sequence is None or not sequence.num_computed_tokens == sequence.num_tokens < MAX_TOKENS:
            return
        self.prepare(sequence)
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(1, 2 + self.state.num_kept))]
        late = self.random.random() < 0.4
        if self.manager.append_slots(sequence, tokens, late) is not None and late:
            self.memory.delay(sequence)
        self.schedule()

    # Steps.

    def begin_step(self) -> None:
        self.schedule()
        before, after = self.manager.states.take_copies()
        self.memory.take(before, after)
        assert self.manager.states.take_copies() == ([], []), "copies are told once"

    def prepare(self, sequence: kvblocks.Sequence) -> None:
        super().prepare(sequence)
        if sequence in self.running and self.memory.must_run_before(sequence):
            self.step()

    # What becomes of sequences.

    def do_fork(self) -> None:
        """Fork between steps; perhaps without a free slot."""
        sequence = self.pick()
        if sequence is not None:
            self.fork(sequence)

    def fork(self, sequence: kvblocks.Sequence) -> None:
        if len(self.running) >= MAX_RUNNING:
            return
        is_computed = sequence not in self.memory.in_step()
        if sequence in self.waits_from:
            is_computed = sequence.num_computed_tokens == end_of_loads(sequence)
            if not is_computed and not self.is_checked:
                return
        if not is_computed and not self.is_checked:
            self.step()
        if not self.manager.states.num_free_slots or (not is_computed and self.is_checked):
            self.count("forks without a slot", is_computed)
            before = self.manager.inspect.free_block_ids(), self.manager.states.stats, self.manager.stats
            with pytest.raises(SequenceStateError):
                self.manager.fork(sequence, "no child")
            assert (self.manager.inspect.free_block_ids(), self.manager.states.stats, self.manager.stats) == before
            return
        self.count("forks before a copy", sequence in self.memory.starting)
        super_fork = self.manager.fork(sequence, self.num_made + 1)
        self.num_made += 1
        self.running.append(super_fork)
        self.memory.fork(sequence, super_fork)
        if sequence in self.waits_from:
            self.count("forks while loading")
            self.waits_from[super_fork] = self.waits_from[sequence]
            assert self.manager.tiers.is_loading(super_fork)
        self.schedule()

    def do_truncate(self) -> None:
        sequence = self.pick()
        self.step()
        if sequence is None or sequence not in self.running:
            return
        end = self.random.randint(min(sequence.num_prompt_tokens, sequence.num_tokens), sequence.num_tokens)
        computed = sequence.num_computed_tokens
        left = min(end, computed)
        is_kept = self.memory.has_state(sequence, left) or self.keeps_load(sequence, left)
        before = sequence.token_ids()
        try:
            self.manager.truncate(sequence, end)
        except SequenceStateError:
            is_loading = sequence in self.waits_from
            assert is_loading or self.memory.has_windows or left < computed - self.state.num_kept or not is_kept
            assert sequence.token_ids() == before and sequence.num_computed_tokens == computed
            self.count("truncations refused", left < computed)
            return
        assert is_kept, f"{sequence}: truncated from {computed} to {left}, and that state isn't there"
        if left < computed and sequence not in self.waits_from:
            self.memory.select(sequence, left)
            self.count("truncated to a kept state")
        self.memory.cancel(sequence, left)
        self.went_back(sequence)
        self.abort_lost()

    def keeps_load(self, sequence: kvblocks.Sequence, num_tokens: int) -> bool:
        """Whether a sequence that waits for loads may be cut to `num_tokens` tokens and wait on."""
        return sequence in self.waits_from and num_tokens >= end_of_loads(sequence)

    def do_rewind(self) -> None:
        sequence = self.pick()
        self.step()
        if sequence is None or sequence not in self.running:
            return
        computed, slots = sequence.num_computed_tokens, self.memory.own_slots(sequence)
        first = self.memory.first_own.get(sequence, ENDLESS)
        end = self.random.randint(0, computed)
        try:
            left = self.manager.rewind(sequence, end)
        except SequenceStateError:
            assert self.memory.has_windows, f"{sequence}: not rewound to {end}"
            self.count("rewinds refused")
            return
        assert 0 <= left <= end and left == sequence.num_computed_tokens, f"{sequence}: rewound to {left}, not {end}"
        self.drop_copies(self.memory.lose_slots(slots, max(first, left)))
        self.count("rewound to a checkpoint", 0 < left < computed)
        self.count("rewound while loading", left < computed and sequence in self.waits_from)
        self.count("rewound to the beginning", left == 0)
        if left < computed:
            self.memory.lose_state(sequence)
        self.memory.cancel(sequence, left)
        self.went_back(sequence)
        self.abort_lost()
        if sequence in self.running and self.random.random() < 0.3:
            self.fork(sequence)

    def do_quota_below(self) -> None:
        if self.tiers:
            super().do_quota_below()

    # Checks.

    def check(self) -> None:
        super().check()
        states = self.manager.states
        assert states.num_slots == self.state.num_slots
        assert states.num_free_slots == self.state.num_slots - len(self.running)

    def finish(self) -> None:
        super().finish()
        assert self.manager.states.num_free_slots == self.state.num_slots
        stats = self.manager.states.stats
        memory = self.memory
        assert stats.num_restored == memory.num_restored and stats.num_cleared == memory.num_cleared
        for name in ("restored", "cleared", "saved", "without_room", "present", "taken_back", "passed"):
            self.count(name, getattr(stats, f"num_{name}"))


def end_of_loads(sequence: kvblocks.Sequence) -> int:
    """The token at which the loads of a sequence that waits for some end."""
    state = side_tables_of(sequence).live_state
    assert state is not None and state.arriving is not None, f"{sequence}: waits for no state"
    return state.arriving.end


_WEIGHTS = {"do_start": 30, "do_grow": 30, "do_append": 8, "do_append_step": 4, "do_step": 8, "do_free": 12}

_OF_TIERS = {
    *("do_take_transfers", "do_move", "do_answer", "do_answer_twice", "do_give_up", "do_restore", "do_restart"),
    *("do_hit_and_load", "do_lose_a_hit", "do_quota_below", "do_load"),
}
