"""`GroupHistory` of a manager with recurrent states: the same operations but loads, and the states of all sequences."""

from collections.abc import Callable
from typing import Any

import pytest

import kvblocks
from kvblocks import Group, InvalidArgumentError, KVCacheManager, RecurrentState, SequenceStateError
from model.group_history import GROUP_OPERATIONS, GroupHistory
from model.history import MAX_RUNNING, Chooser, Pair
from model.kv_memory import ENDLESS
from model.reference_model import ModelSequence, Prefix
from model.reference_states import ReferenceStates
from model.state_memory import StateMemory


class StateHistory(GroupHistory):
    model: ReferenceStates
    memory: StateMemory

    def __init__(
        self,
        num_blocks: int,
        groups: list[Group],
        state: RecurrentState,
        *,
        enable_caching: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, groups, enable_caching=enable_caching, **options)
        manager = KVCacheManager(num_blocks, groups=[*groups, state], enable_caching=enable_caching, **options)
        self.manager, self.state, first = manager, state, manager.first_block_id
        slots = state.num_slots, state.checkpoint_blocks, state.num_kept
        self.memory = StateMemory(first + num_blocks, tuple(groups), manager.block_size, *slots)
        keeping, uncached = self.model.keeping, self.model.uncached
        self.model = ReferenceStates(num_blocks, tuple(groups), state, enable_caching, first, keeping, uncached)
        self.max_ahead = state.num_kept
        self.num_cuts = self.num_forks_refused = self.num_rewound_to_checkpoint = self.num_slots_refused = 0
        self.num_forked_before_copies = self.num_kept_truncations = self.num_refused_rewinds = 0

    # Chunks, which end where the manager says or anywhere.

    def cut(self, chooser: Chooser, pair: Pair, start: int, end: int, hit: Any = None) -> int:
        sequence, model = pair
        if end <= start:
            return end
        num_matched = 0 if hit is None else hit.num_matched_tokens
        expected = self.model.next_cut(model, start, end, num_matched)
        with self.unchanged():
            found = self.manager.states.next_cut(sequence, end, hit)
        assert found == expected, f"{sequence}: a chunk from {start} to {end} is to end at {found}, not {expected}"
        self.num_cuts += found < end
        return found if chooser.integer(0, 3) else end

    def num_new(self, chooser: Chooser, model: ModelSequence, start: int, hit: Any) -> int | None:
        sequence = next(sequence for sequence, other in self.pairs if other is model)
        end = self.cut(chooser, (sequence, model), start, chooser.integer(start + 1, len(model.tokens)), hit)
        return chooser.choose([None, end - start, end - start])

    def num_external(self, chooser: Chooser, model: ModelSequence, hit: Any) -> int:
        return 0

    def num_drafts(self, chooser: Chooser) -> int:
        return chooser.integer(0, self.state.num_kept)

    def mark(self, chooser: Chooser) -> None:
        if self.pairs:
            sequence, model = chooser.choose(self.pairs)
            position = chooser.integer(1, len(model.tokens))
            assert self.manager.states.mark(sequence, position) == self.model.mark(model, position)

    def reserve(self, chooser: Chooser) -> None:
        """Room for drafts, unless the engine keeps no state to go back to."""
        if self.max_ahead:
            super().reserve(chooser)
            return
        pair = self.pick(chooser, allocated=True)
        if pair is not None:
            total = len(pair[1].tokens) + chooser.integer(1, 4)
            with self.unchanged(), pytest.raises(InvalidArgumentError):
                self.manager.allocate_slots(pair[0], 0, num_total_tokens=total)

    # What becomes of sequences.

    def fork(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is not None and len([1 for _, model in self.pairs if model.is_allocated]) <= MAX_RUNNING:
            self.fork_pair(pair)

    def rewind_and_fork(self, chooser: Chooser) -> None:
        """Fork a sequence whose slot still waits for its state, and perhaps end it before it gets that."""
        pairs = [pair for pair in self.pairs if pair[1].is_allocated and pair[1].num_computed]
        pairs = [pair for pair in pairs if self.model.floor(pair[1], pair[1].num_computed - 1)] or pairs
        if not pairs:
            return
        pair = chooser.choose(pairs)
        self.go_back(pair, pair[1].num_computed - 1)
        self.abort_lost(chooser)
        if not pair[1].is_allocated or pair[0] not in self.memory.starting:
            return
        self.num_forked_before_copies += 1
        self.fork_pair(pair)
        if chooser.integer(0, 1):
            self.drop(pair, pair[1].num_computed)

    def reset(self, chooser: Chooser) -> None:
        super().reset(chooser)
        self.schedule()
        for _ in range(chooser.integer(0, 2)):
            self.renew(chooser)

    def fork_pair(self, pair: Pair) -> None:
        if pair[0] in self.memory.in_step():
            self.step()
        if len(self.model.live) == self.state.num_slots:
            self.num_forks_refused += 1
            with self.unchanged(), pytest.raises(SequenceStateError, match="slot"):
                self.manager.fork(pair[0], "no child")
            return
        self.num_made += 1
        name = f"sequence-{self.num_made}"
        slot = pair[0].state_slot
        assert slot is not None
        child = self.manager.fork(pair[0], name)
        self.pairs.append((child, self.model.fork_state(pair[1], name, slot)))
        self.memory.fork(pair[0], child)

    def go_back(self, pair: Pair, number: int) -> None:
        """Rewind a sequence to its last checkpoint."""
        sequence, model = pair
        if sequence in self.memory.in_step():
            self.step()
        computed = model.num_computed
        number = min(number, computed)
        slots, first = self.memory.own_slots(sequence), self.memory.first_own.get(sequence, ENDLESS)
        end = self.model.floor(model, number)
        if not self.model.can_truncate(model, end):
            self.num_refused_rewinds += 1
            with self.unchanged(), pytest.raises(SequenceStateError, match="rewind: expected to keep"):
                self.manager.rewind(sequence, number)
            self.drop(pair, min(end, self.memory.start_of_step(sequence)))
            return
        found = self.manager.rewind(sequence, number)
        assert found == end, f"{sequence}: rewound from {computed} to {number}, it has {found} tokens, not {end}"
        self.num_rewound += 1
        self.num_rewound_to_checkpoint += 0 < end < computed
        self.memory.lose_slots(slots, max(first, end))
        self.memory.cancel(sequence, end)
        if end < computed:
            self.memory.lose_state(sequence)
        self.model.rewind(model, end)
        self.memory.truncate(sequence)

    def rewind(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is not None:
            self.go_back(pair, chooser.integer(0, pair[1].num_computed))
            self.abort_lost(chooser)

    def truncate(self, chooser: Chooser) -> None:
        pair = self.pick_longer(chooser)
        if pair is None:
            return
        self.step()
        sequence, model = pair
        num_tokens = chooser.integer(model.num_prompt, len(model.tokens))
        left = min(num_tokens, model.num_computed)
        if left < self.model.least_kept(model) or not self.model.can_truncate(model, num_tokens):
            self.num_refused_truncations += 1
            with self.unchanged(), pytest.raises(SequenceStateError):
                self.manager.truncate(sequence, num_tokens)
            return
        if left < model.num_computed:
            self.num_kept_truncations += 1
            self.memory.select(sequence, left)
        self.manager.truncate(sequence, num_tokens)
        self.model.truncate(model, num_tokens, None)
        self.memory.truncate(sequence)
        self.abort_lost(chooser)

    def lose_a_checkpoint(self, chooser: Chooser) -> None:
        """A checkpoint turns out to be bad, so that hits of an earlier lookup are stale, though their KV is there."""
        pages = sorted(block for block, content in self.model.content.items() if len(content) > 6)
        if pages:
            self.look_up_all(chooser)
            self.evict_ids([chooser.choose(pages)])

    def is_stale(self, model: ModelSequence, hit: Any) -> bool:
        """A checkpoint that went, and was saved anew in the same blocks, is another one. The model sees only blocks."""
        end = len(hit.blocks) * self.model.block_size
        if hit.parts is not None and hit.parts.checkpoint is not None and not hit.parts.checkpoint.is_cached:
            return True
        return super().is_stale(model, hit) or list(hit.checkpoint_block_ids) != self.model.checkpoint(model, end)

    # Steps.

    def step(self) -> None:
        self.take_states()
        super().step()

    def take_states(self) -> None:
        """Compare the copies of states with the model's, and have the next step make them."""
        self.schedule()
        found = self.manager.states.take_copies()
        expected = self.model.take_copies()
        slots = {model: sequence.state_slot for sequence, model in self.pairs if model.is_allocated}
        for copies, others in zip(found, expected, strict=True):
            seen = [(copy.kind, copy.position, copy.slot, copy.source, list(copy.block_ids)) for copy in copies]
            said = [
                (
                    *(other.kind, other.position, slots[other.sequence] if other.is_own else other.slot, other.source),
                    [] if other.kind == "fork" else other.blocks,
                )
                for other in others
            ]
            assert seen == said, f"copies {seen}, expected {said}"
        self.memory.take(*found)

    def step_dies(self, chooser: Chooser) -> None:
        self.take_states()
        starts = {pair: self.memory.start_of_step(pair[0]) for pair in self.pairs if pair[1].is_allocated}
        in_step = self.memory.in_step()
        scheduled = [pair for pair in starts if pair[0] in in_step]
        self.memory.die(chooser.integer(0, len(self.memory.copies)))
        while scheduled:
            pair = chooser.choose(scheduled)
            scheduled.remove(pair)
            if pair[1].is_allocated:
                self.drop(pair, starts[pair] if chooser.integer(0, 3) else chooser.integer(0, starts[pair]))
        self.abort_lost(chooser)

    def get_ready(self, chooser: Chooser, pair: Pair) -> int:
        self.prepare(pair[0])
        return 0

    # Parts of the operations.

    def answer(self, could_serve: bool, call: Callable[[], Any]) -> bool:
        has_slot = len(self.model.live) < self.state.num_slots
        done = super().answer(could_serve, call)
        if not done and self.manager.last_refusal is not None and self.manager.last_refusal.reason == "slots":
            self.num_slots_refused += 1
            assert not has_slot
        return done

    def check(self) -> None:
        super().check()
        states = self.manager.states
        assert states.num_free_slots == self.state.num_slots - len(self.model.live)
        for name in ("saved", "without_room", "present", "taken_back", "passed"):
            found, expected = getattr(states.stats, f"num_{name}"), getattr(self.model, f"num_{name}")
            assert found == expected, f"{found} checkpoints {name}, not {expected}"

    def check_usage(self) -> None:
        super().check_usage()
        usage = self.manager.inspect.group_usage()[-1]
        assert usage.num_cached_blocks == len([content for content in self.model.content.values() if len(content) > 6])

    def told_contents(self) -> list[Prefix]:
        """As in `GroupHistory`; a checkpoint is told once."""
        return [content for content in super().told_contents() if len(content) <= 6 or not content[-1]]

    def told_size(self, group: int) -> int:
        """As in `GroupHistory`; what is told of a checkpoint are the tokens between two of its places."""
        return super().told_size(group) if group < len(self.model.specs) else self.manager.alignment

    def check_explanation(self, sequence: kvblocks.Sequence, model: ModelSequence) -> None:
        """Explanations name the group that lacks what the longest hit needs: the state where it has no checkpoint."""
        if not self.model.enable_caching:
            return
        explanation = self.manager.inspect.explain(sequence)
        self.causes.add(explanation.cause)
        assert explanation.num_cached_blocks == len(self.model.hit(model))
        end = self.model.last_end(model)
        group = len(self.model.specs) if end and not self.model.checkpoint(model, end) else None
        group = self.model.missing_group(model, end) if group is None else group
        causes = {len(self.model.specs): "state", None: explanation.cause}
        assert explanation.cause == causes.get(group, "group"), f"{explanation.cause}: {explanation}; {group} lacks it"
        assert group is not None or explanation.cause not in ("group", "state")
        assert explanation.group == (self.model.primary if group is None else group)
        assert str(explanation)

    def check_page(self, block: int, content: Prefix) -> None:
        """A page of a checkpoint holds its part of the state after these tokens, unless its save is yet to come."""
        salt, lora, tokens, spans, _, end, place = content
        numbers = self.memory.chain(salt, lora, tokens, spans)  # type: ignore[arg-type]
        assert self.memory.page_in(block) == (place, numbers[-1], end), f"block {block} is cached for {content[-2:]}"

    def check_hit(self, sequence: kvblocks.Sequence, expected: ModelSequence) -> None:
        super().check_hit(sequence, expected)
        hit: Any = self.manager.get_computed_blocks(sequence)
        assert list(hit.checkpoint_block_ids) == self.model.checkpoint(expected, hit.num_tokens)
        if hit.num_tokens:
            state = self.memory.read(hit.checkpoint_block_ids, hit.num_tokens)
            numbers = self.memory.chain(sequence.salt, sequence.lora, sequence.token_ids(), sequence.extra_keys)
            assert state == numbers[hit.num_tokens - 1], f"{sequence}: its checkpoint holds {self.memory.what(state)}"


_LEFT_OUT = ("load_more", "end_a_load", "lose_what_a_waiting_one_hit")
StateHistory.operations = (
    *[
        (getattr(StateHistory, operation.__name__, operation), weight)
        for operation, weight in GROUP_OPERATIONS
        if operation.__name__ not in _LEFT_OUT
    ],
    (StateHistory.mark, 4),
    (StateHistory.lose_a_checkpoint, 2),
    (StateHistory.rewind_and_fork, 3),
)
