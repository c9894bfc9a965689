"""Operations of a history in which not only steps read and write blocks: loads, holds, evictions by id.

A load writes external tokens at some time after its call, to the slots that they had at the call, and may fail. With a
write hold it goes on after its sequence was freed; without one it ends with its sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import kvblocks
from kvblocks import BlockHold, BlockStateError, KVCacheManager, SequenceStateError
from model.kv_memory import KVMemory, Slot
from model.reference_model import ModelSequence, ReferenceModel

Pair = tuple[kvblocks.Sequence, ModelSequence]


@dataclass(eq=False)
class Load:
    """A transfer of tokens first to end - 1. pairs: who waits for it, the one that it was begun for first."""

    pairs: list[Pair]
    first: int
    end: int
    arriving: list[tuple[int, Slot, int]]
    hold: "Held | None" = None


@dataclass(eq=False)
class Held:
    """A hold, and what its blocks must contain until it ends; None: not checked."""

    hold: BlockHold
    tables: list[list[int]]
    contents: dict[int, list[int]] = field(default_factory=dict)


class Transfers:
    """What `History` knows of them; it is one itself."""

    manager: KVCacheManager
    model: ReferenceModel
    memory: KVMemory
    pairs: list[Pair]
    pick: Callable[..., Pair | None]
    pick_longer: Callable[..., Pair | None]
    attempt: Callable[..., Any]
    unchanged: Callable[..., Any]
    delayed: Callable[..., Any]
    grow: Callable[..., bool]

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.held: list[Held] = []
        self.num_loaded = self.num_failed_loads = self.num_orphans = self.num_dropped = self.num_rewound = 0
        self.num_second_loads = self.num_forked_loads = self.num_loads_at_reset = self.num_held_truncations = 0
        self.num_lost_hits = 0

    # Loads.

    def begin_load(self, pair: Pair, first: int, end: int, *, is_held: bool) -> None:
        """A call gave a sequence slots for external tokens first to end - 1."""
        sequence, model = pair
        self.schedule()
        self.num_second_loads += sequence in self.memory.loading
        load = Load([pair], first, end, self.memory.begin_load(sequence, first, end))
        if is_held:
            hold = self.manager.holds.write(sequence, end)
            load.hold = Held(hold, self.model.full_tables(model, end))
            self.take_hold(load.hold)
        self.loads.append(load)

    def end_a_load(self, chooser: Any) -> None:
        """A transfer ends, in any order: all of it arrived, or only a part."""
        if self.loads:
            load = chooser.choose(self.loads)
            arrived = load.end if chooser.integer(0, 1) else chooser.integer(load.first, load.end - 1)
            self.end_load(load, arrived, says_so=chooser.integer(0, 4) > 0)

    def end_load(self, load: Load, arrived: int, *, says_so: bool = True) -> None:
        self.loads.remove(load)
        is_here = [slot for slot in load.arriving if slot[0] < arrived and self.is_still_there(load, slot)]
        self.memory.end_load([sequence for sequence, _ in load.pairs], load.first, is_here)
        self.num_orphans += not load.pairs
        for sequence, model in load.pairs:
            if arrived < load.end and model.is_allocated:
                self.num_failed_loads += 1
                self.go_back((sequence, model), arrived)
            elif says_so and model.is_allocated:
                self.num_loaded += 1
                end = min(load.end, self.memory.first_loading(sequence))
                self.attempt(partial(self.manager.cache_blocks, sequence, end))
                self.model.commit(model, end)
                self.memory.vouch(sequence, end)
                if model.written < end:  # it has a part of its hit no more
                    self.num_lost_hits += 1
                    self.go_back((sequence, model), model.written)
        if load.hold is not None:
            self.let_go(load.hold)
        self.abort_lost()

    def is_still_there(self, load: Load, slot: tuple[int, Slot, int]) -> bool:
        """Whether the transfer may write to a slot: its sequence is there, or a hold of that block."""
        block = slot[1][0]
        return bool(load.pairs) or (load.hold is not None and any(block in table for table in load.hold.tables))

    def leave_loads(self, pair: Pair, behind: int = 0) -> None:
        """A sequence no longer waits for loads that end behind its first `behind` tokens."""
        for load in [load for load in self.loads if pair in load.pairs and load.end > behind]:
            is_owner = load.pairs[0] is pair
            load.pairs.remove(pair)
            self.memory.end_load([pair[0]], load.first, [])
            if is_owner:  # the others can't rely on it any more
                others, load.pairs = load.pairs, []
                if load.hold is None:
                    self.loads.remove(load)
                self.memory.end_load([sequence for sequence, _ in others], load.first, [])
                for other in others:
                    if other[1].is_allocated:
                        self.go_back(other, load.first)

    def finish_loads(self) -> None:
        for load in list(self.loads):
            if load in self.loads:
                self.end_load(load, load.end)

    def load_more(self, chooser: Any) -> None:
        """Load tokens behind what a sequence has, which may be loading, too."""
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        sequence, model = pair
        in_flight = self.get_ready(chooser, pair)
        num_left = len(model.tokens) - model.num_computed
        if not model.is_allocated or not num_left:
            return
        start, num_external = model.num_computed, chooser.integer(1, num_left)
        num_new = chooser.choose([0, chooser.integer(0, num_left - num_external)])
        options = {"num_external_computed_tokens": num_external, "num_in_flight_tokens": in_flight}
        model.in_flight = in_flight
        call = partial(self.manager.allocate_slots, sequence, num_new, **options)
        with self.delayed(True, (model, start)):
            done = self.grow(sequence, model, start + num_external + num_new, [], call)
        if done:
            self.begin_load(pair, start, start + num_external, is_held=chooser.integer(0, 1) == 1)

    # Going back.

    def rewind(self, chooser: Any) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is not None:
            firsts = [load.first for load in self.loads if pair in load.pairs]
            self.leave_loads(pair)
            self.go_back(pair, chooser.integer(0, min([pair[1].num_computed, *firsts])))
            self.abort_lost(chooser)

    def go_back(self, pair: Pair, number: int) -> None:
        """Rewind a sequence, or abort it where a window has passed what it would need."""
        sequence, model = pair
        alignment = self.manager.alignment
        end = number // alignment * alignment
        if not self.can_go_back(model, end):
            with self.unchanged(), pytest.raises(SequenceStateError, match="rewind: expected to keep"):
                self.manager.rewind(sequence, number)
            self.drop(pair, min(end, self.memory.start_of_step(sequence)))
            return
        self.num_rewound += 1
        self.leave_loads(pair, end)
        self.memory.cancel(sequence, end)
        self.memory.lose_behind(sequence, end)
        assert self.manager.rewind(sequence, number) == end
        self.model.rewind(model, end)
        self.memory.truncate(sequence)

    def can_go_back(self, model: ModelSequence, end: int) -> bool:
        return True

    # Holds.

    def hold(self, chooser: Any) -> None:
        pair = self.pick_longer(chooser) if chooser.integer(0, 1) else self.pick(chooser, allocated=True)
        if pair is None or len(self.held) > 3:
            return
        sequence, model = pair
        if chooser.integer(0, 1):
            most, call = self.memory.num_written(sequence), self.manager.holds.read
            num_tokens = chooser.integer(0, min(most, model.written))
            held = Held(call(sequence, num_tokens), self.model.full_tables(model, num_tokens))
            blocks = [block for table in held.tables for block in table if block is not None]
            held.contents = {block: list(self.memory.now[block]) for block in blocks}
        else:
            num_tokens = chooser.integer(0, model.num_computed)
            held = Held(self.manager.holds.write(sequence, num_tokens), self.model.full_tables(model, num_tokens))
        self.take_hold(held)

    def num_held_blocks(self, pair: Pair, first: int) -> int:
        """How many blocks of a sequence's primary table from token `first` on are held."""
        held = {block for hold in self.held for table in hold.tables for block in table}
        return len(held.intersection(pair[1].table[first // self.model.block_size :]))

    def take_hold(self, held: Held) -> None:
        self.model.hold([block for table in held.tables for block in table if block is not None])
        self.held.append(held)

    def release_hold(self, chooser: Any) -> None:
        free = [held for held in self.held if all(load.hold is not held for load in self.loads)]
        if free:
            self.let_go(chooser.choose(free))

    def let_go(self, held: Held) -> None:
        self.held.remove(held)
        self.manager.holds.release(held.hold)
        self.model.release(held.tables)
        with self.unchanged(), pytest.raises(BlockStateError, match="hasn't ended"):
            self.manager.holds.release(held.hold)

    def detach(self, chooser: Any) -> None:
        """Free a sequence, whose blocks are given back later."""
        pair = self.pick(chooser, allocated=True)
        if pair is None or pair[0] in self.memory.unwritten or len(self.held) > 3:
            return
        sequence, model = pair
        self.leave_loads(pair)
        tables = self.model.all_tables(model)
        held = Held(self.manager.holds.detach(sequence), tables)
        self.memory.forget(sequence)
        self.take_hold(held)
        self.model.free(model)

    def evict(self, chooser: Any) -> None:
        ids = [block.block_id for block in self.manager._pool.blocks]  # noqa: SLF001
        self.evict_ids(sorted({chooser.choose(ids) for _ in range(chooser.integer(1, 3))}))

    def evict_ids(self, blocks: list[int]) -> None:
        before = self.manager.stats.num_cached_blocks
        self.memory.lose(blocks)
        losing, expected = self.manager.evict_blocks(blocks), self.model.evict(blocks)
        assert [sequence.sequence_id for sequence in losing] == [model.name for model in expected]
        self.num_dropped += before - self.manager.stats.num_cached_blocks

    def check_holds(self) -> None:
        assert list(self.manager.holds) == [held.hold for held in self.held]
        for held in self.held:
            ids = [[block for block in table if block is not None] for table in held.tables]
            assert [held.hold.group_block_ids(group) for group in range(len(ids))] == ids
            for block, content in held.contents.items():
                assert self.memory.now[block] == content, f"{held.hold}: block {block} was written"

    # What `History` does.

    def get_ready(self, chooser: Any, pair: Pair) -> int:
        raise NotImplementedError

    def schedule(self) -> None:
        raise NotImplementedError

    def abort_lost(self, chooser: Any = None) -> None:
        raise NotImplementedError

    def drop(self, pair: Pair, num_computed: int) -> None:
        raise NotImplementedError
