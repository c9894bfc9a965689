"""An engine with tiers in miniature: the memory machine, and beside it the bytes of every slot below the device.

Transfers are carried out at any time between `take_transfers` and `complete`, and in any order. They are answered in
any order, perhaps twice, perhaps as failed; a failed transfer may leave garbage where it was to write. Nothing is taken
from the manager on trust: each hit, on the device and in tiers, must hold what its sequence needs.
"""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import kvblocks
from kvblocks import (
    BlockHold,
    BlockIdentity,
    CacheHit,
    KVCacheBlock,
    KVCacheManager,
    Loaded,
    Pin,
    PinBudgetError,
    SequenceStateError,
    StaleHitError,
    Tier,
    TierHit,
    Transfer,
)
from kvblocks.core.layout import GroupLayout
from kvblocks.core.loading import Loads
from kvblocks.hashing.extra_keys import decode_salt_and_lora
from kvblocks.tiers.hit import hit_with_loads
from kvblocks.tiers.pool import TierPool
from kvblocks.tiers.prefix import prefix_of
from model.kv_memory import GARBAGE
from model.sight import first_seen
from model.tier_memory import TierMemory
from model.told import Told, cached
from model.where import where

MAX_TOKENS = 24
MAX_RUNNING = 4
MAX_WAITING = 5
SALTS = ["salt", "other"]


@dataclass(eq=False)
class Moving:
    """A transfer that was taken. is_done: whether its bytes were copied."""

    transfer: Transfer
    is_done: bool = False


class TierMachine:
    """Random operations on a manager of tiers. `walk` makes so many, and checks after each."""

    are_names_shared = False  # otherwise what a record says beside a name is of the first prefix that had it

    def __init__(self, seed: int, num_blocks: int, block_size: int | None, tiers: list[Tier], **options: Any) -> None:
        self.seed, self.num_steps = seed, 0
        self.random = random.Random(seed)
        self.make_manager = partial(KVCacheManager, num_blocks, block_size, tiers=tiers, **options)
        self.manager = self.make_manager()
        first = self.manager.first_block_id
        self.memory = self.make_memory(first + num_blocks)
        self.groups = self.memory.groups  # that attend
        self.is_grouped = len(self.manager.groups) > 1
        self.tiers = tiers
        self.event_options = options.get("enable_events", False)
        self.told = Told()
        self.remembered: dict[str, dict[int, BlockIdentity]] = {t.name: {} for t in tiers if t.is_persistent}
        self.salt_of: dict[BlockIdentity, str | None] = {}
        self.garbage = [GARBAGE] * max(group.block_size for group in self.groups)
        self.below = {tier.name: [list(self.garbage) for _ in range(tier.num_blocks)] for tier in tiers}
        self.running: list[kvblocks.Sequence] = []
        self.waiting: list[kvblocks.Sequence] = []
        self.past: list[kvblocks.Sequence] = []  # the last that ended
        self.moving: list[Moving] = []
        self.ended: list[Transfer] = []
        self.copied: dict[tuple[str, int], tuple[int, int]] = {}  # by slot: the block that it is a copy of, and its use
        self.storing: dict[tuple[str, int], int] = {}  # by slot: the block that is stored there; jobs may be over
        self.waits_from: dict[kvblocks.Sequence, int] = {}  # the first token that a loading sequence waits for
        self.found: dict[kvblocks.Sequence, tuple[CacheHit, list[TierHit]]] = {}
        self.pins: list[Pin] = []
        self.holds: list[tuple[BlockHold, dict[int, list[int]]]] = []
        self.num_made = 0
        self.num_prompts = 5 if len(self.groups) == 1 else 2  # windows are hit where prompts end alike
        self.counts: dict[str, int] = {}
        names = [name for name in dir(self) if name.startswith("do_")]
        self._operations = [name for name in names for _ in range(self.weight_of(name))]

    def weight_of(self, operation: str) -> int:
        """How often a walk does an operation."""
        return WEIGHTS.get(operation, 2)

    def make_memory(self, num_blocks: int) -> TierMemory:
        return TierMemory(num_blocks, self.manager.groups, self.manager.block_size)

    def walk(self, num_steps: int, *, check_every: int = 1) -> None:
        for number in range(num_steps):
            operation = self.random.choice(self._operations)
            with where(self.seed, self.num_steps, operation):
                getattr(self, operation)()
                if number % check_every == 0:
                    self.check()
            self.num_steps += 1
        self.check()

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    # Sequences.

    def do_new(self) -> None:
        chosen = random.Random(self.random.randrange(self.num_prompts))  # of few, so that they come again
        tokens = [chosen.randrange(2) for _ in range(self.random.randint(8, 20))]
        salt = self.random.choice([None] * 7 + SALTS)
        spans = []
        if self.random.random() < 0.06 * self.num_prompts:
            start = self.random.randrange(len(tokens))
            spans = [(start, self.random.randint(start + 1, len(tokens)), "image")]
        self.add(tokens, salt, spans)

    def do_new_like_another(self) -> None:
        others = self.running + self.waiting
        if others:
            other = self.random.choice(others)
            tokens = other.token_ids(0, self.random.randint(1, other.num_tokens))
            tokens += [self.random.randrange(2) for _ in range(self.random.randint(0, 6))]
            tokens = tokens[:MAX_TOKENS]
            spans = [(start, end, key) for start, end, key in other.extra_keys if end <= len(tokens)]
            self.add(tokens, other.salt, spans)

    def do_new_like_ended(self) -> None:
        """A new sequence that continues an ended one, and finds what was stored at its end."""
        if self.past:
            other = self.random.choice(self.past)
            tokens = other.token_ids() + [self.random.randrange(2) for _ in range(self.random.randint(1, 3))]
            self.add(tokens[: MAX_TOKENS + 2], other.salt, list(other.extra_keys))

    def add(self, tokens: list[int], salt: str | None, spans: list[Any]) -> None:
        self.num_made += 1
        num_prompt = max([self.random.randint(1, len(tokens)), *(end for _, end, _ in spans)])
        sequence = kvblocks.Sequence(self.num_made, tokens[:num_prompt], salt=salt, extra_keys=spans)
        if num_prompt < len(tokens):  # as if it came back: it may be truncated down to its prompt
            sequence.append_tokens(tokens[num_prompt:])
        self.waiting.append(sequence)
        for dropped in self.waiting[:-MAX_WAITING]:
            self.found.pop(dropped, None)
        del self.waiting[:-MAX_WAITING]

    def do_look_up(self) -> None:
        """Take hits and keep them, for when they are stale."""
        for sequence in self.waiting:
            self.found[sequence] = self.look_up(sequence)

    def look_up(self, sequence: kvblocks.Sequence) -> tuple[CacheHit, list[TierHit]]:
        hit = self.manager.get_computed_blocks(sequence)
        if self.random.random() < 0.2:
            hit = hit.cut(self.random.randint(0, sequence.num_tokens))
        loads = self.manager.tiers.find(hit)
        self.memory.check_hit(sequence, hit)
        self.check_below(sequence, hit, loads)
        return hit, loads

    def check_below(self, sequence: kvblocks.Sequence, hit: CacheHit, loads: list[TierHit]) -> None:
        """What a lookup found in the tiers holds what the sequence needs, and begins where the hit ends."""
        size, position = self.manager.block_size, len(hit.blocks) * self.manager.block_size
        numbers = self.memory.chain(sequence.salt, sequence.lora, sequence.token_ids(), sequence.extra_keys)
        for load in loads:
            assert load.first_token == position and load.num_tokens > 0 and load.num_bytes > 0
            layout = self.manager._slots.layout  # noqa: SLF001
            if layout is None:
                for _, index, pool, slot in load.pieces:
                    expected = numbers[index * size : (index + 1) * size]
                    assert self.below[pool.name][slot.block_id] == expected, f"{load}: wrong KV at {index}"
            else:
                self.check_pieces(load, numbers, layout)
            position += load.num_tokens
        assert not loads or position < sequence.num_tokens
        self.count("found below", bool(loads))

    def check_pieces(self, load: TierHit, numbers: list[int], layout: GroupLayout) -> None:
        """What a load of several groups finds, on the device and below, holds what a start behind it sees."""
        groups, end = self.groups, load.first_token + load.num_tokens
        of_table = [side_group.group for side_group in layout.side_groups] + [layout.primary]
        found: dict[tuple[int, int], list[int]] = {}
        of_state: list[list[int]] = []
        for table, index, pool, slot in load.pieces:
            if table < len(of_table):
                found[of_table[table], index] = self.below[pool.name][slot.block_id]
            else:
                assert index == len(of_state), f"{load}: the parts of its checkpoint are in disorder"
                of_state.append(self.below[pool.name][slot.block_id])
        hit = hit_with_loads(load, load.hit)
        assert hit is not None and hit.parts is not None and hit.parts.loads is not None
        loads = hit.parts.loads
        self.count("pieces of windows alone", all(table < len(of_table) - 1 for table, _, _, _ in load.pieces))
        self.check_arriving(load, loads, of_state, numbers[end - 1])
        for index, block in enumerate([*hit.blocks, *loads.more]):
            found[layout.primary, index] = self.memory.then[block.block_id]
        for side_group, (first, blocks) in zip(layout.side_groups, loads.mixed, strict=True):
            for index, held in enumerate(blocks, first):
                if held is not None:
                    found[side_group.group, index] = self.memory.then[held.block_id]
        for group, spec in enumerate(groups):
            for index in range(first_seen(spec, end) // spec.block_size, -(-end // spec.block_size)):
                expected = numbers[index * spec.block_size : (index + 1) * spec.block_size]
                held = found[group, index][: spec.block_size]
                assert held == self.memory.in_group(group, expected), f"{load}: wrong KV in group {group} at {index}"

    def check_arriving(self, load: TierHit, loads: Loads, below: list[list[int]], number: int) -> None:
        """A load's end has the state after its tokens, whose last one has `number`. below: what tiers have of it."""
        assert not below and load.checkpoint is None, f"{load}: brings a state"

    def do_start(self) -> None:
        if self.waiting and len(self.running) < MAX_RUNNING:
            self.start(self.random.choice(self.waiting), self.random.choice([0, 1, 2, 2, 2]))

    def start(self, sequence: kvblocks.Sequence, num_loads: int) -> None:
        found = self.found.get(sequence)
        is_old = found is not None and self.random.random() < 0.5
        hit, loads = found if is_old and found is not None else self.look_up(sequence)
        loads = loads[:num_loads]
        num_loaded = sum(load.num_tokens for load in loads)
        left = sequence.num_tokens - hit.num_tokens - num_loaded
        if left < 0:
            return
        num_new = self.first_chunk(sequence, hit, loads, left)
        late = self.random.random() < 0.4
        if loads:
            call = lambda: self.manager.tiers.allocate(sequence, hit, loads, num_new)  # noqa: E731
        else:
            call = lambda: self.manager.allocate_slots(sequence, num_new, hit=hit, delay_cache_blocks=late)  # noqa: E731
        if is_old:
            try:
                blocks = call()
            except StaleHitError:
                self.count("stale")
                return
            self.check_below(sequence, hit, loads)
        else:
            blocks = call()
        if blocks is None:
            self.count("refused")
            return
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if loads:
            self.count("loads")
            self.count("loads of two tiers", len(loads) > 1)
            first = loads[0].first_token
            self.waits_from[sequence] = first
            self.memory.wait(sequence, first)
        if loads or late:
            self.memory.delay(sequence)
        self.schedule()
        if loads:
            assert sequence.num_computed_tokens >= hit.num_tokens + num_loaded
            assert self.manager.tiers.is_loading(sequence)

    def first_chunk(self, sequence: kvblocks.Sequence, hit: CacheHit, loads: list[TierHit], left: int) -> int | None:
        """Return how many of the `left` tokens behind a hit and its loads a sequence gets slots for at first."""
        return self.random.choice([None, 0, self.random.randint(0, left)]) if loads else None

    def do_hit_and_load(self) -> None:
        """One sequence computes the beginning of a stored prefix; another one hits that, and loads the rest."""
        if not self.past or len(self.running) + 2 > MAX_RUNNING:
            return
        self.do_crowd()
        other = self.random.choice(self.past)
        self.add([*other.token_ids(), 1], other.salt, list(other.extra_keys))
        later = self.waiting.pop()
        loads = self.manager.tiers.find(self.manager.get_computed_blocks(later))
        most = sum(load.num_tokens for load in loads) - 1
        if most < self.manager.alignment:
            return
        num_tokens = self.random.randint(self.manager.alignment, most)
        spans = [key for key in other.extra_keys if key[0] < num_tokens]
        if any(end > num_tokens for _, end, _ in spans):
            return
        self.add(other.token_ids(0, num_tokens), other.salt, spans)
        self.start(self.waiting[-1], num_loads=0)
        self.waiting.append(later)
        self.start(later, num_loads=2)
        self.count("hit and loads", later in self.waits_from and self.waits_from[later] > 0)

    def do_lose_a_hit(self) -> None:
        """A sequence that loads loses a part of its hit: who was to write it fails, or it turns out to be bad."""
        self.do_hit_and_load()
        loading = [sequence for sequence, first in self.waits_from.items() if first]
        if not loading:
            return
        sequence = self.random.choice(loading)
        hidden = self.random.choice(["", "", "reset", "salt"])
        if hidden == "reset":
            self.manager.reset_prefix_cache()
            self.found.clear()
        elif hidden == "salt":
            self.manager.forget_salt(sequence.salt)
        num_hit = self.waits_from[sequence]
        table = set(sequence.group_block_ids(0)[: max(1, num_hit // self.groups[0].block_size)])
        writers = [s for s, _ in self.memory.coming() if table.intersection(s.group_block_ids(0))]
        how = self.random.choice(["dies", "ends", "bad"])
        if how == "bad" or not writers:
            self.lose_some(sequence)
        elif how == "dies":
            self.do_step_dies()
        else:
            self.drop(writers[0], self.random.randint(0, self.memory.start_of_step(writers[0])))
            self.abort_lost()
        self.count("hits lost while loading", self.kept_of(sequence) < num_hit)
        then = self.random.choice(["", "do_rewind", "do_truncate", "do_give_up", "do_cache_blocks", "do_renew"])
        if then:
            getattr(self, then)()

    def do_crowd(self) -> None:
        """Run and drop a sequence that evicts what was cached on the device."""
        self.schedule()
        room = self.manager.num_free_blocks * self.manager.block_size // len(self.groups)
        num_tokens = self.random.randint(1, max(1, room))
        self.num_made += 1
        crowd = kvblocks.Sequence(self.num_made, [7] * num_tokens)
        if self.manager.allocate_slots(crowd, delay_cache_blocks=True) is not None:
            self.count("crowds")
            self.manager.abort(crowd, 0)

    def pick(self, *, loading: bool | None = None) -> kvblocks.Sequence | None:
        found = [s for s in self.running if loading is None or (s in self.waits_from) == loading]
        return self.random.choice(found) if found else None

    def do_grow(self) -> None:
        """The rest of a prompt, or a part of it; also behind what is loading."""
        sequence = self.pick()
        if sequence is None or sequence.num_computed_tokens == sequence.num_tokens:
            return
        self.prepare(sequence)
        if sequence not in self.running or sequence.num_computed_tokens == sequence.num_tokens:
            return
        num_new = self.next_chunk(sequence)
        late = self.random.random() < 0.4
        if self.manager.allocate_slots(sequence, num_new, delay_cache_blocks=late) is not None and late:
            self.memory.delay(sequence)
        self.schedule()

    def next_chunk(self, sequence: kvblocks.Sequence) -> int:
        return self.random.randint(1, sequence.num_tokens - sequence.num_computed_tokens)

    def do_append(self) -> None:
        sequence = self.pick(loading=False)
        if sequence is None or sequence.num_tokens >= MAX_TOKENS:
            return
        if sequence.num_computed_tokens < sequence.num_tokens:
            return
        self.prepare(sequence)
        tokens = [self.random.randrange(2) for _ in range(self.random.choice([1, 1, 2]))]
        late = self.random.random() < 0.4
        if self.manager.append_slots(sequence, tokens, late) is not None and late:
            self.memory.delay(sequence)
        self.schedule()

    def do_append_step(self) -> None:
        batch = [s for s in self.running if s not in self.waits_from and s.num_computed_tokens == s.num_tokens]
        batch = [s for s in batch if s.num_tokens < MAX_TOKENS]
        for sequence in batch:
            self.prepare(sequence)
        batch = [s for s in batch if s in self.running]
        if batch:
            self.manager.append_step(batch, [self.random.randrange(2) for _ in batch])
            self.schedule()

    def do_cache_blocks(self) -> None:
        """Say how much is written; perhaps less than was said before, which changes nothing."""
        sequence = (self.pick(loading=True) if self.random.random() < 0.4 else None) or self.pick()
        if sequence is None:
            return
        if self.random.random() < 0.7:
            self.step()
        number = self.memory.num_written(sequence)
        number = self.random.choice([number, self.random.randint(0, number)])
        self.count("smaller commits", number < self.memory.vouched[sequence])
        self.manager.cache_blocks(sequence, number)
        self.memory.vouch(sequence, min(number, self.waits_from.get(sequence, number)))

    def do_fork(self) -> None:
        sequence = self.pick()
        if sequence is None or len(self.running) >= MAX_RUNNING:
            return
        self.num_made += 1
        child = self.manager.fork(sequence, self.num_made)
        self.running.append(child)
        self.memory.fork(sequence, child)
        if sequence in self.waits_from:
            self.count("forks while loading")
            self.waits_from[child] = self.waits_from[sequence]
            assert self.manager.tiers.is_loading(child)
        self.schedule()

    def do_truncate(self) -> None:
        """Go back to what is written, or is loading."""
        sequence = self.pick(loading=True) or self.pick()
        if sequence is None:
            return
        end = self.random.randint(min(sequence.num_prompt_tokens, sequence.num_tokens), sequence.num_tokens)
        written = None
        if sequence not in self.waits_from and self.random.random() < 0.3:
            written = self.random.randint(min(end, sequence.num_computed_tokens), sequence.num_computed_tokens)
        self.go_back(sequence, lambda: self.manager.truncate(sequence, end, num_computed_tokens=written), end, written)

    def do_rewind(self) -> None:
        sequence = self.pick(loading=True) or self.pick()
        if sequence is None:
            return
        end = self.random.randint(0, sequence.num_computed_tokens)
        written = end // self.manager.alignment * self.manager.alignment
        self.go_back(sequence, lambda: self.manager.rewind(sequence, end), end, written)

    def go_back(self, sequence: kvblocks.Sequence, call: Any, end: int, written: int | None) -> None:
        """Cut a sequence. written: how many tokens the call says to be written; None: it says nothing of that."""
        self.step()
        if sequence not in self.running:
            return
        known_tokens = self.memory.vouched[sequence]
        has_lost_hit = known_tokens < self.waits_from.get(sequence, 0)
        if sequence in self.waits_from:
            self.count("back while loading")
            self.count("back while loading, with a lost hit", has_lost_hit)
        known = dict(self.memory.unknown), dict(self.memory.vouched), dict(self.memory.lost_given)
        lost = [] if written is None else self.memory.lose_behind(sequence, written)
        try:
            call()
        except SequenceStateError:
            assert self.memory.has_windows, f"{sequence}: goes back to {end} of {self.groups}"
            self.count("too far back")
            self.memory.unknown, self.memory.vouched, self.memory.lost_given = known
            return
        self.drop_copies(lost)
        if has_lost_hit:
            left, is_waiting = sequence.num_computed_tokens, self.manager.tiers.is_loading(sequence)
            what = f"{sequence}: cut, it has {left} tokens, of {known_tokens} before what it lost"
            assert is_waiting or left <= known_tokens, what
        self.memory.cancel(sequence, min(end, sequence.num_computed_tokens))
        self.went_back(sequence)
        self.abort_lost()

    def kept_of(self, sequence: kvblocks.Sequence) -> int:
        """How many tokens a sequence has without its load: fewer than its hit if it lost a part of that."""
        known = self.memory.vouched[sequence]
        if sequence not in self.waits_from or known >= self.waits_from[sequence]:
            return known
        return 0 if self.is_grouped else known // self.manager.block_size * self.manager.block_size

    def went_back(self, sequence: kvblocks.Sequence) -> None:
        """The manager has fewer slots for a sequence, which may wait for nothing any more."""
        self.memory.cut([sequence])
        if sequence in self.waits_from and not self.manager.tiers.is_loading(sequence):
            self.memory.end_load([sequence], self.waits_from.pop(sequence), [])

    def do_give_up(self) -> None:
        sequence = self.pick()
        if sequence is None:
            return
        if sequence not in self.waits_from:
            with pytest.raises(SequenceStateError, match="expected a sequence that is loading"):
                self.manager.tiers.give_up(sequence)
            return
        kept = self.kept_of(sequence)
        self.count("given up")
        self.count("given up, with a lost hit", kept < self.waits_from[sequence])
        left = self.manager.tiers.give_up(sequence)
        assert left == sequence.num_computed_tokens, f"{sequence}: {left} tokens are left, as it was told"
        # None are left where a block of a window that the hit needs was lost.
        assert left == kept or (self.is_grouped and not left), f"{sequence}: gives up, keeps {left} tokens, of {kept}"
        self.went_back(sequence)

    def do_free(self) -> None:
        sequence = self.pick()
        if sequence is not None:
            self.end(sequence)

    def do_detach(self) -> None:
        self.step()
        sequence = self.pick(loading=False)
        if sequence is not None:
            self.keep(self.manager.holds.detach(sequence))
            self.leave(sequence)

    def end(self, sequence: kvblocks.Sequence) -> None:
        if sequence in self.memory.unwritten:
            self.drop(sequence, self.memory.start_of_step(sequence))
            self.abort_lost()
            return
        self.manager.free(sequence)
        self.leave(sequence)

    def drop(self, sequence: kvblocks.Sequence, num_computed: int) -> None:
        written = min(num_computed, self.waits_from.get(sequence, num_computed))
        self.memory.cancel(sequence)
        lost = self.memory.lose_behind(sequence, written)
        self.manager.abort(sequence, written)
        self.drop_copies(lost)
        self.leave(sequence)

    def leave(self, sequence: kvblocks.Sequence) -> None:
        self.count("freed while loading", sequence in self.waits_from)
        self.running.remove(sequence)
        self.waits_from.pop(sequence, None)
        self.memory.forget(sequence)
        self.past = [*self.past[-4:], sequence]
        assert not self.manager.tiers.is_loading(sequence)
        if self.random.random() < 0.5:
            self.waiting.append(sequence)

    def abort_lost(self) -> None:
        """Abort sequences that rely on KV that no step will write.

        Those that wait for a load are in no step. They go on waiting, and are told at its end what they lost.
        """
        while lost := [s for s in self.running if s not in self.waits_from and self.memory.is_lost(s)]:
            sequence = self.random.choice(lost)
            self.drop(sequence, self.memory.start_of_step(sequence))

    # Steps.

    def schedule(self) -> None:
        self.memory.schedule([pair for _, *pair in self.manager.take_copies()], self.running)

    def begin_step(self) -> None:
        self.schedule()

    def step(self) -> None:
        self.begin_step()
        self.memory.run_step()

    def prepare(self, sequence: kvblocks.Sequence) -> None:
        """Run the step first where an engine must; what still loads is waited for."""
        if self.memory.would_copy_unwritten(sequence):
            while self.waits_from:
                self.do_take_transfers()
                self.answer(self.random.choice(self.moving))
            self.step()
        elif self.memory.has_windows and sequence not in self.waits_from and sequence in self.memory.unwritten:
            self.step()

    def do_step(self) -> None:
        self.step()

    def do_step_dies(self) -> None:
        """A step dies. Stores that were taken for it may be answered before its sequences are aborted."""
        self.begin_step()
        starts = {s: self.memory.start_of_step(s) for s in self.running}
        in_step = self.memory.in_step()
        if self.random.random() < 0.6:
            self.take_transfers()
        self.memory.die(self.random.randint(0, len(self.memory.copies)))
        for moving in list(self.moving):
            if not moving.transfer.is_load and self.random.random() < 0.6:
                self.count("stores answered before an abort")
                self.move(moving)
                self.moving.remove(moving)
                self.ended.append(moving.transfer)
                assert self.manager.tiers.complete(moving.transfer, ok=True) == []
        if in_step and self.random.random() < 0.3:
            self.lose_some(self.random.choice(in_step))
        self.random.shuffle(in_step)
        for sequence in in_step:
            if sequence in self.running:
                self.drop(sequence, starts[sequence])
        self.abort_lost()

    def do_reset(self) -> None:
        if self.random.random() < 0.25:
            if self.random.random() < 0.5:  # else the reset has another reason, and sequences may be renewed
                self.step()
                self.memory.change_weights()
            self.manager.reset_prefix_cache()
            self.found.clear()
            assert not any(tier.num_cached_blocks for tier in self.manager.tiers)

    def do_renew(self) -> None:
        sequence = self.pick()
        if sequence is None or not self.memory.is_of_these_weights(sequence):
            return
        try:
            self.manager.renew(sequence)
        except SequenceStateError:
            return
        self.count("renewed")

    def do_evict_blocks(self) -> None:
        """Some KV turns out to be bad, on the device and in tiers: no lookup may find it any more."""
        used = {block.block_id for sequence in self.running for block in self.blocks_of(sequence)}
        used |= {block_id for _, contents in self.holds for block_id in contents}
        bad = [block for block in self.manager.blocks if block.is_cached and block.block_id not in used]
        if not bad:
            return
        block = self.random.choice(bad)
        self.step()
        content = self.memory.now[block.block_id]
        if self.memory.row_size(content) < self.manager.block_size:
            return  # prefixes that part behind it have blocks of their own that hold the same, and may be good
        good = {key for key, block_id in self.storing.items() if block_id != block.block_id}  # of another block
        for name, slots in self.below.items():
            for slot in [number for number, held in enumerate(slots) if self.memory.is_same(content, held)]:
                if (name, slot) not in good:
                    slots[slot] = list(self.garbage)
                    self.spoil_loads(name, slot)
        self.memory.now[block.block_id] = list(self.garbage)
        self.memory.project()
        self.manager.evict_blocks([block.block_id])

    def do_lose_some(self) -> None:
        """Some KV that sequences hold turns out to be bad, cached or not. They go on."""
        sequence = self.pick()
        if sequence is not None and self.random.random() < 0.5:
            self.lose_some(sequence)

    def lose_some(self, sequence: kvblocks.Sequence) -> None:
        blocks = [block for group in range(len(self.groups)) for block in sequence.group_blocks(group)]
        held = [block.block_id for block in blocks if block is not None]
        lost = self.random.sample(held, min(len(held), self.random.randint(1, 2)))
        self.count("blocks lost while held", len(lost))
        self.count("uncached blocks lost", sum(not self.manager.blocks[block_id].is_cached for block_id in lost))
        self.memory.lose(lost)
        self.manager.evict_blocks(lost)
        self.drop_copies(lost)

    def drop_copies(self, block_ids: list[int]) -> None:
        """What was stored of lost blocks is lost, too: no lookup may find it any more."""
        for (name, slot), (block_id, use) in self.copied.items():
            if block_id in block_ids and use == self.memory.num_uses[block_id]:
                self.count("copies lost", not self.memory.is_garbage(self.below[name][slot]))
                self.below[name][slot] = list(self.garbage)
                self.spoil_loads(name, slot)

    def blocks_of(self, sequence: kvblocks.Sequence) -> list[KVCacheBlock]:
        """All blocks that a sequence holds, including those for the case that its loads fail."""
        held = [block for group in range(len(self.groups)) for block in sequence.group_blocks(group)]
        if sequence.side_tables is not None and sequence.side_tables.fallback is not None:
            held += [block for _, blocks in sequence.side_tables.fallback.tables for block in blocks]
        return [block for block in held if block is not None]

    def spoil_loads(self, tier: str, bad: int) -> None:
        """What was loaded of a bad slot, and not answered yet, is bad as well."""
        for moving in self.moving:
            transfer = moving.transfer
            if transfer.is_load and moving.is_done and transfer.tier == tier:
                for block_id, slot in zip(transfer.block_ids, transfer.slots, strict=True):
                    if slot == bad:
                        self.memory.now[block_id] = list(self.garbage)

    # Who else holds blocks.

    def do_pin(self) -> None:
        others = self.running + self.waiting
        if others:
            other = self.random.choice(others)
            if other.num_tokens >= self.manager.block_size:
                try:
                    pin = self.manager.pins.pin(
                        other.token_ids(),
                        salt=other.salt,
                        extra_keys=other.extra_keys,
                        priority=self.random.choice([50, 100]),
                    )
                except PinBudgetError:
                    return
                self.pins.append(pin)

    def do_unpin(self) -> None:
        if self.pins:
            self.manager.pins.unpin(self.pins.pop(self.random.randrange(len(self.pins))))

    def do_quota(self) -> None:
        self.manager.quotas.set(self.random.choice([None, *SALTS]), self.random.choice([None, 0, 2, 5]))

    def do_quota_below(self) -> None:
        tier, number = self.random.choice(self.tiers).name, self.random.choice([None, None, 0, 3, 20])
        if self.random.random() < 0.3:
            self.manager.tiers.set_default_quota(tier, number)
        else:
            self.manager.tiers.set_quota(tier, self.random.choice([None, *SALTS]), number)

    def do_forget_salt(self) -> None:
        """No lookup finds a tenant's data any more, on the device, in tiers or after a restart."""
        if self.random.random() > 0.2:
            return
        salt = self.random.choice([None, *SALTS, *SALTS, *SALTS])
        if self.random.random() < 0.5:  # else its sequences may be renewed
            self.step()
            self.memory.forget_salt(salt)
        before = self.num_cached()
        assert self.manager.forget_salt(salt) == before - self.num_cached()
        self.count("forgotten", before - self.num_cached())
        for sequence in self.waiting:
            if sequence.salt == salt:
                hit = self.manager.get_computed_blocks(sequence)
                assert (hit.num_tokens, hit.pending_tokens, self.manager.tiers.find(hit)) == (0, 0, [])
        self.remember()
        for name, slots in self.remembered.items():
            assert all(self.salt_of[identity] != salt for identity in slots.values()), f"{name}: {salt} is remembered"

    def num_cached(self) -> int:
        below = sum(tier.num_cached_blocks for tier in self.manager.tiers)
        return self.manager.stats.num_cached_blocks + below

    # What outlives the manager.

    def remember(self) -> None:
        """Somebody takes note of what became of the slots."""
        for name, changes in self.manager.tiers.take_changes().items():
            remembered = self.remembered[name]
            for slot, identity in changes.items():
                remembered.pop(slot, None)
                if identity is not None:
                    remembered[slot] = identity

    def do_restore(self) -> None:
        """As if the manager ended now: from what was remembered, another one finds the same as this one."""
        self.remember()
        for name, remembered in self.remembered.items():
            fresh = self.make_manager()
            assert fresh.tiers.restore(name, remembered.items()) == len(remembered), "all of it can be found"
            self.count("restored", len(remembered))
            assert not fresh.tiers.take_changes()[name]
            if self.event_options:
                told = Told()
                told.replay(fresh.take_events())
                expected = cached(fresh)
                assert told.blocks.keys() == expected.keys()
                assert self.are_names_shared or told.blocks == expected
            fresh.check()
            for other in self.running + self.waiting:
                sequence = kvblocks.Sequence("new", other.token_ids(), salt=other.salt, extra_keys=other.extra_keys)
                hit = fresh.get_computed_blocks(sequence)
                loads = fresh.tiers.find(hit)
                self.check_below(sequence, hit, loads)
                self.count("found again", bool(loads))
            self.check_restored(name, fresh)

    def check_restored(self, name: str, fresh: KVCacheManager) -> None:
        """Check that a new manager finds in each tier the same as this one."""
        old, new = (tier_pool(manager, name) for manager in (self.manager, fresh))
        for run in old.index.runs():
            prefix = prefix_of(run, len(run.blocks))
            found = new.match(prefix.token_view(), prefix.extra_keys, len(prefix.blocks))
            assert len(found) == len(prefix.blocks), f"{name}: {len(found)} of {len(prefix.blocks)} blocks are restored"
            pairs = list(zip(prefix.blocks, found, strict=True))
            before, after = old.index.attached, new.index.attached
            if before is not None and after is not None:
                for there, here in list(pairs):
                    rows = [attached.row(slot) for attached, slot in ((before, there), (after, here))]
                    assert [slot is None for slot in rows[0]] == [slot is None for slot in rows[1]]
                    if before.checkpoints is not None and after.checkpoints is not None:
                        states = [before.checkpoints.at(there), after.checkpoints.at(here)]
                        assert (states[0] is None) == (states[1] is None), f"{name}: a state is lost, or made up"
                        parts = [[] if state is None else state.blocks for state in states]
                        pairs += [*zip(*parts, strict=True)]
                    pairs += [pair for pair in zip(*rows, strict=True) if pair[0] is not None]
            slots = self.below[name]
            assert all(slots[one.block_id] == slots[other.block_id] for one, other in pairs)
            self.count("attached found again", len(pairs) - len(found))

    def do_restart(self) -> None:
        """The process dies, and a new one goes on with what was remembered and the bytes of slots that outlive it.

        What was being written is there, there in part, or missing. Some of what was remembered may be lost.
        """
        if not self.remembered or self.random.random() > 0.15:
            return
        self.count("restarted")
        for moving in self.moving:
            if not moving.transfer.is_load and self.random.random() < 0.7:
                self.random.choice([self.move, lambda moving: self.spoil(moving.transfer)])(moving)
        for name in self.below.keys() - self.remembered.keys():
            self.below[name] = [list(self.garbage) for _ in self.below[name]]
        self.waiting = [
            kvblocks.Sequence(
                (other.sequence_id, "again"), other.token_ids(), salt=other.salt, extra_keys=other.extra_keys
            )
            for other in (self.running + self.waiting)[-MAX_WAITING:]
        ]
        for left in (
            self.running,
            self.moving,
            self.ended,
            self.storing,
            self.copied,
            self.waits_from,
            self.found,
            self.pins,
            self.holds,
        ):
            left.clear()
        self.memory.restart()
        self.manager, self.told = self.make_manager(), Told()
        for name, remembered in self.remembered.items():
            if self.random.random() < 0.3:
                for slot in self.random.sample(sorted(remembered), self.random.randint(0, len(remembered) // 4)):
                    del remembered[slot]
            number = self.manager.tiers.restore(name, remembered.items())
            forgotten = self.manager.tiers.take_changes()[name]
            assert len(forgotten) == len(remembered) - number and not any(forgotten.values())
            for slot in forgotten:
                del remembered[slot]
        self.count("found after a restart", sum(bool(self.look_up(sequence)[1]) for sequence in self.waiting))

    def do_hold(self) -> None:
        self.step()
        sequence = self.pick(loading=False)
        if sequence is not None:
            self.keep(self.manager.holds.read(sequence))

    def keep(self, hold: BlockHold) -> None:
        ids = {block.block_id for table in hold.tables for block in table}
        self.holds.append((hold, {block_id: list(self.memory.now[block_id]) for block_id in ids}))

    def do_release(self) -> None:
        if self.holds:
            hold, contents = self.holds.pop(self.random.randrange(len(self.holds)))
            for block_id, content in contents.items():
                assert self.memory.now[block_id] == content, f"{hold}: block {block_id} was written"
            self.manager.holds.release(hold)

    # Transfers.

    def do_take_transfers(self) -> None:
        """All that was scheduled runs first: see the order of a step."""
        self.step()
        self.take_transfers()

    def take_transfers(self) -> None:
        taken = self.manager.tiers.take_transfers()
        unanswered = self.manager.tiers.unanswered
        assert unanswered[len(unanswered) - len(taken) :] == taken
        for transfer in taken:
            salt, _ = decode_salt_and_lora((transfer.prefix.extra_keys or {}).get(0))
            self.salt_of.update(dict.fromkeys(transfer.identities(), salt))
            if not transfer.is_load:
                self.storing.update(
                    {
                        (transfer.tier, slot): block_id
                        for block_id, slot in zip(transfer.block_ids, transfer.slots, strict=True)
                    }
                )
        self.moving += [Moving(transfer) for transfer in taken]
        self.count("stores", sum(not transfer.is_load for transfer in taken))

    def do_move(self) -> None:
        """Somebody copies a transfer's bytes."""
        if self.moving:
            self.move(self.random.choice(self.moving))

    def move(self, moving: Moving) -> None:
        if moving.is_done:
            return
        moving.is_done = True
        transfer, slots = moving.transfer, self.below[moving.transfer.tier]
        for block_id, slot in zip(transfer.block_ids, transfer.slots, strict=True):
            if transfer.is_load:
                self.memory.bring(block_id, slots[slot])
            else:
                slots[slot] = list(self.garbage if self.memory.is_bad(block_id) else self.memory.now[block_id])
                self.copied[transfer.tier, slot] = block_id, self.memory.num_uses[block_id]
        self.memory.project()

    def do_answer(self) -> None:
        if self.moving:
            self.answer(self.random.choice(self.moving))

    def answer(self, moving: Moving) -> None:
        transfer = moving.transfer
        is_damaged = transfer.is_load and any(
            self.memory.is_garbage(self.below[transfer.tier][slot]) for slot in transfer.slots
        )
        ok = self.random.random() < 0.85 and not is_damaged  # who loads looks at what he loads
        if ok:
            self.move(moving)
        elif self.random.random() < 0.5:
            self.spoil(transfer)
        self.moving.remove(moving)
        self.ended.append(transfer)
        self.count("failed" if not ok else "arrived")
        ended = self.manager.tiers.complete(transfer, ok)
        self.memory.cut([loaded.sequence for loaded in ended])
        for loaded in ended:
            self.end_load(loaded)
        self.abort_lost()
        moving_slots = sum(tier.num_moving_blocks for tier in self.manager.tiers)
        if not moving_slots:
            self.storing.clear()

    def spoil(self, transfer: Transfer) -> None:
        """A transfer that fails leaves garbage in what it was to write; a load perhaps since its slots are damaged."""
        is_damaged = not transfer.is_load or self.random.random() < 0.5
        for block_id, slot in zip(transfer.block_ids, transfer.slots, strict=True):
            if transfer.is_load:
                self.memory.now[block_id] = list(self.garbage)
            if is_damaged:
                self.below[transfer.tier][slot] = list(self.garbage)
        self.memory.project()

    def end_load(self, loaded: Loaded) -> None:
        sequence = loaded.sequence
        kept, first = self.kept_of(sequence), self.waits_from.pop(sequence)
        self.count("loaded in part" if not loaded.is_whole else "loaded")
        self.count("loaded, with a lost hit", kept < first)
        if kept < first:
            assert loaded.num_tokens == kept and not loaded.is_whole, f"{loaded}: it lost its hit behind {kept} tokens"
        else:
            assert loaded.num_tokens >= first or (self.is_grouped and not loaded.num_tokens), f"{loaded}: of {first}"
        found = sequence.num_written_tokens
        assert found >= loaded.num_tokens, f"{loaded}: {found} tokens count as written"
        assert loaded.is_whole or sequence.num_computed_tokens == loaded.num_tokens, f"{loaded}: not cut"
        arrived = [
            (position, slot, self.memory.now[slot[0]][slot[1]])
            for position in range(first, loaded.num_tokens)
            for _, slot in self.memory.slots(sequence, position)
        ]
        self.memory.end_load([sequence], first, arrived)
        self.memory.vouch(sequence, loaded.num_tokens)

    def do_answer_twice(self) -> None:
        """An answer that comes again, or late, changes nothing."""
        if self.ended:
            before = [*self.manager.tiers]
            number = self.manager.tiers.num_stale_answers
            assert self.manager.tiers.complete(self.random.choice(self.ended[-20:]), self.random.random() < 0.5) == []
            assert [*self.manager.tiers] == before
            assert self.manager.tiers.num_stale_answers == number + 1

    # Checks.

    def check(self) -> None:
        self.schedule()
        self.manager.check()
        self.memory.check()
        self.check_numbers()
        self.check_owners()
        self.remember()
        if self.event_options:
            self.told.replay(self.manager.take_events())
            expected = cached(self.manager)
            assert self.told.blocks.keys() == expected.keys()
            assert self.are_names_shared or self.told.blocks == expected
            self.count("told below", sum(medium != "GPU" for medium, _, _ in self.told.blocks))
            self.counts["hits told"], self.counts["removals told"] = self.told.num_hits, self.told.num_removed_below
        assert set(self.waits_from) == {s for s in self.running if self.manager.tiers.is_loading(s)}

    def check_numbers(self) -> None:
        """The manager counts as written what is said to be written, and one who comes now finds nothing else."""
        for sequence in self.running:
            counted, vouched = sequence.num_written_tokens, self.memory.vouched[sequence]
            # The windows that a hit behind which it loads needs may be lost. They stand in no table that shows it.
            may_be_less = self.manager.tiers.is_loading(sequence) and counted < vouched
            # A writer that goes back loses its blocks as a whole, with the tokens that a copy on write had put there.
            size = self.manager.block_size
            may_be_less |= sequence.lost_from == counted == vouched // size * size
            assert counted == vouched or may_be_less, (
                f"{sequence}: the manager counts {counted} tokens as written, not {vouched}"
            )
        if self.running:
            other = self.random.choice(self.running)
            same = kvblocks.Sequence("same", other.token_ids(), salt=other.salt, extra_keys=other.extra_keys)
            hit = self.manager.get_computed_blocks(same)
            self.memory.check_hit(same, hit)
            self.check_below(same, hit, self.manager.tiers.find(hit))

    def check_owners(self) -> None:
        """What nobody has is free: sequences, pins, holds, loads that are waited for, and transfers without answer."""
        slots, traffic = self.manager._slots, self.manager._transfers  # noqa: SLF001
        loading = {} if traffic is None else traffic._loading  # noqa: SLF001
        tables = [table for sequence in self.manager.sequences() for table in slots.tables(sequence)]
        tables += [] if slots.soft_holds is None else slots.soft_holds.tables()
        had = {block.block_id for table in [*tables, *[job.held for job in loading.values()]] for block in table}
        had.update(*[contents for _, contents in self.holds], *[moving.transfer.block_ids for moving in self.moving])
        owned = {block.block_id for block in self.manager.blocks if block.ref_cnt}
        assert owned <= had, f"blocks {sorted(owned - had)} are held, and nobody has them"
        under_way = {moving.transfer.prefix for moving in self.moving}
        for is_load in (False, True):
            parts = [t.block_ids for t in self.ended if t.prefix in under_way and t.is_load == is_load]
            self.count(
                f"blocks of {'loads' if is_load else 'stores'} free before others", len(set().union(*parts) - had)
            )

    def finish(self) -> None:
        """End everything: nothing is lost, nothing leaks."""
        while self.moving or self.waits_from:
            self.do_take_transfers()
            for moving in list(self.moving):
                self.answer(moving)
        while self.holds:
            self.do_release()
        while self.pins:
            self.do_unpin()
        for sequence in list(self.running):
            if sequence in self.running:
                self.end(sequence)
        for _ in range(100):
            self.do_take_transfers()
            for moving in list(self.moving):
                self.answer(moving)
        self.manager.check()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert not any(tier.num_moving_blocks for tier in self.manager.tiers)
        for transfer in self.ended[-5:]:
            assert self.manager.tiers.complete(transfer, ok=True) == []
        self.do_restore()


def tier_pool(manager: KVCacheManager, name: str) -> TierPool:
    return next(pool for pool in manager._transfers.pools if pool.name == name)  # noqa: SLF001


WEIGHTS = {
    "do_new": 6,
    "do_new_like_another": 5,
    "do_new_like_ended": 5,
    "do_start": 12,
    "do_grow": 5,
    "do_append": 5,
    "do_step": 5,
    "do_free": 10,
    "do_take_transfers": 16,
    "do_move": 8,
    "do_answer": 24,
    "do_reset": 1,
    "do_crowd": 3,
    "do_evict_blocks": 1,
    "do_lose_some": 1,
    "do_lose_a_hit": 4,
    "do_pin": 1,
    "do_quota": 1,
    "do_quota_below": 1,
    "do_forget_salt": 1,
    "do_restore": 1,
    "do_restart": 1,
}
