"""`History` of a manager of several groups: the same operations, with the reference model of all groups beside it."""

from collections.abc import Callable
from typing import Any

import pytest

import kvblocks
from kvblocks import (
    BlockRemoved,
    BlockStored,
    Group,
    KVCacheManager,
    PinBudgetError,
    SequenceStateError,
    StaleHitError,
)
from model.history import MAX_TOKENS, OPERATIONS, Chooser, History
from model.kv_memory import KVMemory
from model.reference_groups import ReferenceGroups
from model.reference_model import ModelPin, ModelSequence, Prefix


class GroupHistory(History):
    manager: KVCacheManager
    model: ReferenceGroups

    def __init__(self, num_blocks: int, groups: list[Group], *, enable_caching: bool = True, **options: Any) -> None:
        manager = KVCacheManager(num_blocks, groups=groups, enable_caching=enable_caching, **options)
        super().__init__(num_blocks, manager.block_size, enable_caching=enable_caching, **options)
        self.manager, first_block = manager, manager.first_block_id
        self.memory = KVMemory(first_block + num_blocks, manager.groups, manager.block_size)
        keeping = frozenset(number for number, group in enumerate(groups) if group.keeps_passed)
        uncached = frozenset(number for number, group in enumerate(groups) if not group.is_cached)
        self.model = ReferenceGroups(num_blocks, tuple(groups), enable_caching, first_block, keeping, uncached)
        self.group_stored: set[tuple[int, bytes]] = set()
        self.num_limited = self.num_refused_truncations = self.num_attached = 0

    def allocate(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=False)
        if pair is None:
            return
        sequence, model = pair
        mode = chooser.choose(["fresh", "fresh", "old", "none"]) if self.starting is None else "fresh"
        found = self.manager.get_computed_blocks(sequence) if mode == "fresh" else None
        hit = self.hits.get(model.name) if mode == "old" else found
        if hit is not None and chooser.integer(0, 4) == 0:
            hit = hit.cut(chooser.integer(0, len(model.tokens)))
        held = [] if hit is None else [block.block_id for block in hit.blocks]
        if hit is not None and (hit.num_tokens >= len(model.tokens) or self.is_stale(model, hit)):
            assert mode == "old"
            self.num_stale_hits += 1
            with self.unchanged(), pytest.raises(StaleHitError):
                self.manager.allocate_slots(sequence, hit=hit)
            return
        start = 0 if hit is None else hit.num_tokens
        num_new = self.num_new(chooser, model, start, hit)
        num_external = self.num_external(chooser, model, hit)
        if num_external and self.starting is not None:
            num_new = 0  # it is in no step
        elif num_external:
            num_new = chooser.choose([None, 0, chooser.integer(0, len(model.tokens) - start - num_external)])
        end = len(model.tokens) if num_new is None else start + num_external + num_new
        self.num_hits += bool(held)
        num_drafts = self.num_drafts(chooser)

        late = self.is_late(chooser)

        def call() -> Any:
            return self.manager.allocate_slots(
                sequence,
                num_new,
                hit=hit,
                num_total_tokens=end + num_drafts if num_drafts else None,
                num_external_computed_tokens=num_external,
                delay_cache_blocks=late,
            )

        num_held = 0 if hit is None else len(hit.blocks)
        with self.delayed(late or num_external > 0, (model, num_held * self.model.block_size)):
            done = self.start(sequence, model, end, hit, call, num_drafts)
        if done and num_external:
            self.begin_load(pair, start, start + num_external, is_held=chooser.integer(0, 1) == 1)

    def num_new(self, chooser: Chooser, model: ModelSequence, start: int, hit: Any) -> int | None:
        """How many tokens behind a hit get slots at first; None: all."""
        return chooser.choose([None, None, chooser.integer(1, len(model.tokens) - start)])

    def num_drafts(self, chooser: Chooser) -> int:
        return chooser.choose([0, 0, 0, 1, 4])

    def is_stale(self, model: ModelSequence, hit: Any) -> bool:
        if self.model.match(model)[: len(hit.blocks)] != [block.block_id for block in hit.blocks]:
            return True
        ids = self.model.hit_tables(model, [block.block_id for block in hit.blocks], self.num_looked_up(hit))
        return any(table != self.ids(hit.group_blocks(group)) for group, table in ids.items())

    def start(
        self,
        sequence: kvblocks.Sequence,
        model: ModelSequence,
        end: int,
        hit: Any,
        call: Callable[[], Any],
        num: int = 0,
    ) -> bool:
        held, ends, is_whole = [], frozenset(), False
        if hit is not None:
            held = [block.block_id for block in hit.blocks]
            ends = frozenset({hit.num_readonly_tokens, hit.num_matched_tokens})
            is_whole = hit.num_tokens != hit.num_readonly_tokens
            self.num_limited += hit.num_matched_tokens - hit.num_readonly_tokens >= self.manager.alignment
        done = self.answer(self.model.grow(model, end, held, num, ends, is_whole), call)
        if done and hit is not None:
            self.memory.start(sequence, hit.num_tokens)
        return done

    def allocate_child(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        tokens = [*pair[1].tokens[: chooser.integer(1, len(pair[1].tokens))], chooser.integer(0, 1)]
        spans = {(start, end, key) for start, end, key in pair[1].keys if end <= len(tokens)}
        self.add(tokens[:MAX_TOKENS], pair[1].salt, pair[1].lora, spans)
        self.start_whole(*self.pairs[-1])

    def preempt_and_resume(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        self.end(chooser, pair)
        self.start_whole(*pair)

    def start_whole(self, sequence: kvblocks.Sequence, model: ModelSequence) -> None:
        hit = self.manager.get_computed_blocks(sequence)
        self.start(sequence, model, len(model.tokens), hit, lambda: self.manager.allocate_slots(sequence, hit=hit))

    def append(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is None or len(pair[1].tokens) > MAX_TOKENS:
            return
        sequence, model = pair
        tokens = [chooser.integer(0, 1) for _ in range(chooser.choose([1, 1, 2, 3]))]
        if model.num_computed < len(model.tokens):
            with self.unchanged(), pytest.raises(SequenceStateError, match="expected slots for all tokens"):
                self.manager.append_slots(sequence, tokens)
            return
        self.prepare(sequence)
        if not model.is_allocated or model.num_computed < len(model.tokens):
            return  # a load ended badly
        late = self.is_late(chooser)
        call = lambda: self.manager.append_slots(sequence, tokens, delay_cache_blocks=late)  # noqa: E731
        is_quick = len(tokens) == 1 and not self.model.is_edge(model) and not late
        with self.delayed(late, (model, len(model.tokens))):
            model.tokens += tokens
            if is_quick:  # looks at no window
                assert call() == []
                model.num_computed += 1
            elif not self.grow(sequence, model, len(model.tokens), [], call):
                del model.tokens[-len(tokens) :]

    def take_model_step(self, models: list[ModelSequence], tokens: list[int]) -> Any:
        return self.model.group_step(models, tokens)

    def can_go_back(self, model: ModelSequence, end: int) -> bool:
        return self.model.can_truncate(model, end)

    def truncate(self, chooser: Chooser) -> None:
        pair = self.pick_longer(chooser)
        if pair is None:
            return
        if pair[0] in self.memory.loading:
            self.finish_loads()
        if not pair[1].is_allocated:
            return
        sequence, model = pair
        num_tokens = chooser.integer(model.num_prompt, len(model.tokens))
        if not self.model.can_truncate(model, num_tokens):
            self.num_refused_truncations += 1
            with self.unchanged(), pytest.raises(SequenceStateError, match="sees no token before"):
                self.manager.truncate(sequence, num_tokens)
            return
        self.truncate_to(chooser, pair, num_tokens)

    def pin(self, chooser: Chooser) -> None:
        if not self.pairs or not self.model.enable_caching:
            return
        _, model = chooser.choose(self.pairs)
        size = self.model.block_size
        if len(model.tokens) < size or model.keys:
            return
        tokens = model.tokens[: chooser.integer(size, len(model.tokens))]
        priority, expires_at = chooser.choose([0, 50, 99, 100]), chooser.choose([None, self.now + 2])
        prefix = ModelSequence("pin", list(tokens), model.salt, model.lora)
        num_full = len(tokens) // size
        used = sum(self.model.num_wanted(pin.prefix, len(pin.priorities)) for _, pin in self.pins)
        options = {"salt": model.salt, "lora": model.lora, "expires_at": expires_at, "priority": priority}
        if used + self.model.num_wanted(prefix, num_full) > self.manager.num_blocks // 2:
            with self.unchanged(), pytest.raises(PinBudgetError):
                self.manager.pins.pin(tokens, **options)
            return
        pin = self.manager.pins.pin(tokens, **options)
        self.pins.append((pin, ModelPin(prefix, [priority] * num_full, expires_at)))
        self.model.pin(self.pins[-1][1])

    # Parts of the operations.

    def grow(
        self,
        sequence: kvblocks.Sequence,
        model: ModelSequence,
        end: int,
        held: list[int],
        call: Callable[[], Any],
        num_lookahead: int = 0,
    ) -> bool:
        assert model.is_allocated and not held
        return self.answer(self.model.grow(model, end, [], num_lookahead), call)

    def answer(self, could_serve: bool, call: Callable[[], Any]) -> bool:
        if not could_serve:
            self.num_refused += 1
            with self.unchanged():
                assert call() is None
            return False
        blocks = self.attempt(call)
        assert [block.block_id for block in blocks] == [block for part in self.model.new for block in part]
        return True

    def snapshot(self) -> object:
        tables = [
            [list(s.group_block_ids(group)) for group in range(len(self.model.specs))]
            for s, _ in self.pairs
            if s.is_allocated
        ]
        attached = [pin.attached_blocks for pin in self.manager.pins]
        return super().snapshot(), tables, attached, self.manager.inspect.group_usage()

    @staticmethod
    def ids(blocks: list[Any]) -> list[int | None]:
        return [None if block is None else block.block_id for block in blocks]

    @staticmethod
    def num_looked_up(hit: Any) -> int:
        """The least number of tokens that were known at the lookup, which is all that matters."""
        return hit.num_readonly_tokens + (hit.num_tokens == hit.num_readonly_tokens)

    def check(self) -> None:
        manager, model = self.manager, self.model
        manager.check()
        self.check_memory()
        assert manager.inspect.free_block_ids() == model.order()
        assert manager.num_free_blocks == len(model.early) + len(model.late)
        self.check_holds()
        assert manager.stats.num_cached_blocks == len([block for block in model.content if block < model.num_real])
        for sequence, expected in self.pairs:
            assert sequence.token_ids() == expected.tokens
            assert self.ids(sequence.blocks) == expected.table
            assert sequence.num_computed_tokens == expected.num_computed
            assert sequence.num_written_tokens == expected.written
            if expected.is_allocated:
                self.check_tables(sequence, expected)
            else:
                self.check_hit(sequence, expected)
        self.num_checks += 1
        self.check_usage()
        self.check_pins()
        if self.has_events:
            self.replay_events()

    def check_tables(self, sequence: kvblocks.Sequence, expected: ModelSequence) -> None:
        for group in range(len(self.model.specs)):
            table = expected.table if group == self.model.primary else self.model.tables[expected][group]
            blocks = sequence.group_blocks(group)
            assert self.ids(blocks) == table
            assert sequence.group_block_ids(group) == [block or 0 for block in table]
            num_dead = sequence.first_live_block(group)
            assert num_dead == len([1 for block in table if block is None])
            assert all(block is None for block in table[:num_dead])
            for block in blocks[num_dead:]:
                assert block is not None
                assert block.ref_cnt == self.model.owners[block.block_id]
                assert block.is_cached == (block.block_id in self.model.content)

    def check_hit(self, sequence: kvblocks.Sequence, expected: ModelSequence) -> None:
        hit = self.manager.get_computed_blocks(sequence)
        held = self.model.hit(expected)
        assert self.ids(hit.blocks) == held
        self.memory.check_hit(sequence, hit)
        assert hit.num_matched_tokens == len(self.model.match(expected)) * self.model.block_size
        for group, table in self.model.hit_tables(expected, held, len(expected.tokens)).items():
            assert self.ids(hit.group_blocks(group)) == table
        self.check_cut(hit, expected)
        if (self.num_checks + len(expected.name)) % 5 == 0:
            self.check_pending(hit, expected)
            self.check_explanation(sequence, expected)

    def check_explanation(self, sequence: kvblocks.Sequence, model: ModelSequence) -> None:
        if not self.model.enable_caching:
            return
        end = len(self.model.match(model)) * self.model.block_size // self.model.alignment * self.model.alignment
        group = self.model.missing_group(model, end)
        explanation = self.manager.inspect.explain(sequence)
        self.causes.add(explanation.cause)
        assert explanation.num_cached_blocks == len(self.model.hit(model))
        assert (explanation.cause == "group") == (group is not None)
        assert explanation.group == (self.model.primary if group is None else group)
        assert str(explanation)

    def check_usage(self) -> None:
        for usage in self.manager.inspect.group_usage()[: len(self.model.specs)]:
            table = None if usage.group == self.model.primary else usage.group
            tables = [
                s.table if table is None else self.model.tables[s][table] for _, s in self.pairs if s.is_allocated
            ]
            assert usage.num_owned_blocks == len({block for row in tables for block in row if block is not None})
            lengths = [4 if table is None else 6]
            cached = self.model.content.values()
            contents = [c for c in cached if len(c) in lengths and (table is None or c[4] == table)]
            assert usage.num_cached_blocks == len(contents)

    def check_pins(self) -> None:
        assert list(self.manager.pins) == [pin for pin, _ in self.pins]
        for pin, expected in self.pins:
            assert self.ids(pin.blocks) == expected.held
            assert self.ids(pin.attached_blocks) == self.model.attached_blocks[expected], (
                f"{pin}: attached are {self.ids(pin.attached_blocks)}, not {self.model.attached_blocks[expected]}"
            )
            self.num_given_up += len(pin.blocks) < pin.num_blocks
            self.num_attached += bool(pin.attached_blocks)

    def schedule(self) -> None:
        copies = self.manager.take_copies()
        expected = zip(self.model.copy_groups, self.model.copies, strict=True)
        assert copies == [(group, *pair) for group, pair in expected]
        self.model.copies, self.model.copy_groups = [], []
        running = [sequence for sequence, model in self.pairs if model.is_allocated]
        self.memory.schedule([(source, destination) for _, source, destination in copies], running)

    def check_memory(self) -> None:
        self.schedule()
        self.memory.check()
        for block, prefix in self.model.content.items():
            if len(prefix) > 6:
                self.check_page(block, prefix)
            elif len(prefix) > 4:
                group, end = prefix[4:]
                self.memory.check_cached(block, group, prefix[:4], end)  # type: ignore[arg-type]
            elif self.model.primary is not None:
                self.memory.check_cached(block, self.model.primary, prefix, len(prefix[2]))  # type: ignore[arg-type]

    def check_page(self, block: int, content: Prefix) -> None:
        """A block holds what a reference model with states says."""

    def replay_events(self) -> None:
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                assert event.group_idx is not None
                assert event.block_size == self.told_size(event.group_idx)
                names = {(event.group_idx, name) for name in event.block_hashes}
                assert not self.group_stored & names
                self.group_stored |= names
            elif isinstance(event, BlockRemoved):
                assert event.group_idx is not None
                names = {(event.group_idx, name) for name in event.block_hashes}
                assert self.group_stored >= names
                self.group_stored -= names
            else:
                self.group_stored.clear()
        assert len(self.group_stored) == len(self.told_contents())

    def told_size(self, group: int) -> int:
        return self.manager.groups[group].block_size

    def told_contents(self) -> list[Prefix]:
        """What is cached, as far as events tell it."""
        return [content for content in self.model.cached if len(content) == 6 or not self.model.has_virtual]


_REPLACED = {
    name: getattr(GroupHistory, name)
    for name in ("allocate", "allocate_child", "preempt_and_resume", "append", "append_step", "truncate", "pin")
}
GROUP_OPERATIONS = tuple(
    [
        (_REPLACED.get(operation.__name__, operation), weight)
        for operation, weight in OPERATIONS
        if operation.__name__ != "set_quota"
    ]
)
"""As `history.OPERATIONS`, without quotas: tests/groups/test_groups.py has those."""
GroupHistory.operations = GROUP_OPERATIONS
