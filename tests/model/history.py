"""A history of a manager and the reference model beside it: every operation is done to both, and they must agree.

What an operation does at random it asks a `Chooser`, so that one set of operations serves a hypothesis machine, which
shrinks what it finds, and long random walks, which get deep.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import pytest

import kvblocks
from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheHit,
    InvalidArgumentError,
    KVBlocksError,
    KVCacheManager,
    Pin,
    PinBudgetError,
    SequenceStateError,
    StaleHitError,
)
from kvblocks.hashing.scheme import sha256_digest
from model.kv_memory import KVMemory
from model.reference_model import ModelPin, ModelSequence, ReferenceModel
from model.transfers import Transfers
from model.where import where

MAX_TOKENS = 20
MAX_WAITING = 6
MAX_RUNNING = 8
Pair = tuple[kvblocks.Sequence, ModelSequence]


class Chooser(Protocol):
    def choose(self, options: Sequence[Any]) -> Any: ...

    def integer(self, low: int, high: int) -> int: ...


class RandomChooser:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)

    def choose(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)


class HashError(Exception):
    pass


class FragileHash:
    """A hash function that raises once each time a test asks for it."""

    is_about_to_fail = False

    def __call__(self, preimage: bytes) -> bytes:
        if self.is_about_to_fail:
            self.is_about_to_fail = False
            raise HashError
        return sha256_digest(preimage)


class History(Transfers):
    operations: tuple[tuple[Callable[..., None], int], ...]  # each, and how often a walk does it
    max_ahead = 5  # for how many unknown tokens a call makes room at most
    sessions: tuple[Any, ...] = (None,)  # which the sequences are of, in turns
    starting: Pair | None = None  # who starts next, and loads something behind its hit; None: anybody

    def __init__(self, num_blocks: int, block_size: int, *, enable_caching: bool = True, **options: Any) -> None:
        super().__init__()
        first_block = options.get("first_block_id", 0)
        self.manager = KVCacheManager(num_blocks, block_size, enable_caching=enable_caching, **options)
        self.has_events = options.get("enable_events", False)
        self.hash = options.get("hash_algorithm")
        self.has_history = options.get("num_history_blocks", 0) > 0
        self.memory = KVMemory(first_block + num_blocks, self.manager.groups, self.manager.block_size)
        self.pins: list[tuple[Pin, ModelPin]] = []
        self.now = 0.0
        self.model = ReferenceModel(num_blocks, block_size, enable_caching, first_block)
        self.pairs: list[Pair] = []
        self.hits: dict[str, CacheHit] = {}
        self.stored: set[bytes | None] = set()
        self.num_made = 0
        self.num_stale_hits = self.num_refused = self.num_hits = self.num_detached = 0
        self.num_checks = self.num_pending = self.num_given_up = self.num_renewed = self.num_forgotten = 0
        self.num_failed_hashes = self.num_late = self.num_commits = self.num_smaller_commits = 0
        self.num_stranded = self.num_steps = 0
        self.causes: set[str] = set()

    def met(self) -> dict[str, int]:
        """How often what happened so far: the `num_...` of the history and its memory, and the causes of misses."""
        met = {f"cause: {cause}": 1 for cause in self.causes}
        for counts in (vars(self), vars(self.memory)):
            met |= {name.removeprefix("num_"): count for name, count in counts.items() if isinstance(count, int)}
        return met | {
            "taken": self.manager.stats.num_taken_blocks,
            "evicted": self.manager.stats.num_evicted_blocks,
        }

    # Operations. Each does nothing when it has nothing to work on.

    def new(self, chooser: Chooser) -> None:
        num_tokens = chooser.integer(1, 14)
        tokens = [chooser.integer(0, 1) for _ in range(num_tokens)]  # two tokens, so that prefixes meet and part often
        spans = set()
        for _ in range(chooser.choose([0, 0, 1, 2])):
            start = chooser.integer(0, num_tokens - 1)
            spans.add((start, chooser.integer(start + 1, num_tokens), chooser.choose("xy")))
        salt, lora = chooser.choose([None, None, "salt"]), chooser.choose([None, None, "lora"])
        self.add(tokens, salt, lora, spans)

    def new_like_another(self, chooser: Chooser) -> None:
        """A prompt that begins like another one, so that sequences share and duplicate blocks, and differ anywhere."""
        if not self.pairs:
            return
        _, other = chooser.choose(self.pairs)
        num_shared = chooser.integer(0, len(other.tokens))
        more = [chooser.integer(0, 1) for _ in range(chooser.integer(0, 6))]
        tokens = (other.tokens[:num_shared] + more)[:MAX_TOKENS] or [0]
        change = chooser.choose(["", "", "", "salt", "more keys", "other keys"])
        spans = {(start, min(end, len(tokens)), key) for start, end, key in other.keys if start < len(tokens)}
        if change == "more keys":
            start = chooser.integer(0, len(tokens) - 1)
            spans.add((start, chooser.integer(start + 1, len(tokens)), "z"))
        elif change == "other keys":
            spans = {(start, end, "w") for start, end, _ in spans}
        self.add(tokens, "other salt" if change == "salt" else other.salt, other.lora, spans)

    def add(self, tokens: list[int], salt: str | None, lora: str | None, spans: set[tuple[int, int, str]]) -> None:
        self.num_made += 1
        name = f"sequence-{self.num_made}"
        session = self.sessions[self.num_made % len(self.sessions)]
        sequence = kvblocks.Sequence(name, tokens, salt=salt, lora=lora, extra_keys=spans, session=session)
        model = ModelSequence(name, list(tokens), salt, lora, tuple(spans), num_prompt=len(tokens), session=session)
        self.pairs.append((sequence, model))
        waiting = [pair for pair in self.pairs if not pair[1].is_allocated]
        for pair in waiting[: len(waiting) - MAX_WAITING]:
            self.pairs.remove(pair)

    def look_up_all(self, chooser: Chooser) -> None:
        """Take hits and keep them for later, when they may be stale."""
        for sequence, model in self.pairs:
            if not model.is_allocated:
                self.hits[model.name] = self.manager.get_computed_blocks(sequence)

    def allocate(self, chooser: Chooser) -> None:
        """Start a sequence, whole or with a first chunk, with a new hit, an old one, a cut one, or none."""
        pair = self.pick(chooser, allocated=False)
        if pair is None:
            return
        sequence, model = pair
        mode = chooser.choose(["fresh", "fresh", "old", "none"]) if self.starting is None else "fresh"
        hit = self.manager.get_computed_blocks(sequence) if mode == "fresh" else None
        hit = self.hits.get(model.name) if mode == "old" else hit
        if hit is not None and chooser.integer(0, 4) == 0:
            hit = hit.cut(chooser.integer(0, len(model.tokens)))
        held = [] if hit is None else [block.block_id for block in hit.blocks]
        start = min(len(held) * self.model.block_size, len(model.tokens) - 1)
        num_new = chooser.choose([None, None, chooser.integer(1, len(model.tokens) - start)])
        num_external = self.num_external(chooser, model, hit)
        if num_external and self.starting is not None:
            num_new = 0  # it is in no step
        elif num_external:
            num_new = chooser.choose([None, 0, chooser.integer(0, len(model.tokens) - start - num_external)])
        has_shrunk = hit is not None and hit.num_tokens >= len(model.tokens)
        if has_shrunk or self.model.hit(model)[: len(held)] != held:
            assert mode == "old"
            self.num_stale_hits += 1
            with self.unchanged(), pytest.raises(StaleHitError):
                self.manager.allocate_slots(sequence, num_new, hit=hit)
            return
        if hit is not None and hit.version == self.manager.get_computed_blocks(sequence).version:
            assert mode == "old" or hit.num_tokens == start
        end = len(model.tokens) if num_new is None else min(start + num_external + num_new, len(model.tokens))
        if hit is not None and hit.num_tokens != start:  # tokens were added since the lookup: hit counts as of then
            end = len(model.tokens) if num_new is None else min(hit.num_tokens + num_new, len(model.tokens))
            num_new = None if num_new is None else end - hit.num_tokens
        self.num_hits += bool(held)
        num_drafts = chooser.choose([0, 0, 0, 1, 4])
        late = self.is_late(chooser)
        with self.delayed(late or num_external > 0, (model, len(held) * self.model.block_size)):
            done = self.grow(
                sequence,
                model,
                end,
                held,
                lambda: self.manager.allocate_slots(
                    sequence,
                    num_new,
                    hit=hit,
                    num_total_tokens=end + num_drafts if num_drafts else None,
                    num_external_computed_tokens=num_external,
                    delay_cache_blocks=late,
                ),
                num_drafts,
            )
        if done and num_external:
            self.begin_load(pair, start, start + num_external, is_held=chooser.integer(0, 1) == 1)

    def num_external(self, chooser: Chooser, model: ModelSequence, hit: CacheHit | None) -> int:
        """How many tokens to load, behind a hit that isn't full and was looked up with these tokens."""
        start = 0 if hit is None else hit.num_readonly_tokens
        is_usual = hit is None or hit.num_tokens == start < len(model.tokens)
        if not is_usual or (self.starting is None and chooser.integer(0, 2)):
            return 0
        return chooser.integer(1, len(model.tokens) - start)

    def allocate_total(self, chooser: Chooser) -> None:
        """Room for a total number of tokens, known or not."""
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        sequence, model = pair
        in_flight = self.get_ready(chooser, pair)
        if not model.is_allocated:
            return
        total, late = chooser.integer(1, len(model.tokens) + self.max_ahead), self.is_late(chooser)
        options = {"delay_cache_blocks": late, "num_in_flight_tokens": in_flight}
        call = lambda: self.manager.allocate_slots(sequence, num_total_tokens=total, **options)  # noqa: E731
        if total <= model.num_computed:
            with self.unchanged():
                assert call() == []
            return
        end, model.in_flight = min(total, len(model.tokens)), in_flight
        with self.delayed(late, (model, model.num_computed)):
            self.grow(sequence, model, end, [], call, total - end)

    def allocate_child(self, chooser: Chooser) -> None:
        """Start a sequence that shares the blocks of one that is running."""
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        tokens = [*pair[1].tokens[: chooser.integer(1, len(pair[1].tokens))], chooser.integer(0, 1)]
        spans = {(start, end, key) for start, end, key in pair[1].keys if end <= len(tokens)}
        self.add(tokens[:MAX_TOKENS], pair[1].salt, pair[1].lora, spans)
        sequence, model = self.pairs[-1]
        hit, held = self.manager.get_computed_blocks(sequence), self.model.hit(model)
        self.grow(sequence, model, len(model.tokens), held, lambda: self.manager.allocate_slots(sequence, hit=hit))

    def allocate_chunk(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        sequence, model = pair
        num_left = len(model.tokens) - model.num_computed
        if not num_left:
            with self.unchanged(), pytest.raises(InvalidArgumentError, match="none left"):
                self.manager.allocate_slots(sequence)
            return
        in_flight = self.get_ready(chooser, pair)
        if not model.is_allocated or len(model.tokens) - model.num_computed != num_left:
            return  # a load ended badly
        num_new = chooser.integer(1, num_left)
        end, late = model.num_computed + num_new, self.is_late(chooser)
        model.in_flight = in_flight
        with self.delayed(late, (model, model.num_computed)):
            self.grow(
                sequence,
                model,
                end,
                [],
                lambda: self.manager.allocate_slots(
                    sequence, num_new, num_in_flight_tokens=in_flight, delay_cache_blocks=late
                ),
            )

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
        with self.delayed(late, (model, len(model.tokens))):
            model.tokens += tokens
            if not self.grow(sequence, model, len(model.tokens), [], call):
                del model.tokens[-len(tokens) :]

    def append_step(self, chooser: Chooser) -> None:
        """One token for several sequences at once."""
        pairs = [p for p in self.pairs if p[1].is_allocated and p[1].num_computed == len(p[1].tokens) < MAX_TOKENS + 4]
        pairs = [pair for pair in pairs if chooser.integer(0, 3)]
        self.prepare(*[sequence for sequence, _ in pairs])
        pairs = [pair for pair in pairs if pair[1].is_allocated and pair[1].num_computed == len(pair[1].tokens)]
        tokens = [chooser.integer(0, 1) for _ in pairs]
        sequences = [sequence for sequence, _ in pairs]
        late, models = self.is_late(chooser), [model for _, model in pairs]
        call = lambda: self.take_step(sequences, tokens, delay_cache_blocks=late)  # noqa: E731
        with self.delayed(late, *[(model, len(model.tokens)) for model in models]):
            changes = self.take_model_step(models, tokens)
            if changes is None:
                self.num_refused += 1
                with self.unchanged():
                    assert call() is None
                return
        assert self.attempt(call) == changes

    def take_step(self, sequences: list[kvblocks.Sequence], tokens: list[int], **how: Any) -> Any:
        return self.manager.append_step(sequences, tokens, **how)

    def take_model_step(self, models: list[ModelSequence], tokens: list[int]) -> Any:
        changes = self.model.step(models, tokens)
        return None if changes is None else [(i, 0, position, block) for i, position, block in changes]

    def cache_blocks(self, chooser: Chooser) -> None:
        """Call `cache_blocks`, perhaps after a step, with at most the number of tokens that are written."""
        pairs = [pair for pair in self.pairs if pair[1].is_allocated]
        pairs = [pair for pair in pairs if pair[1].delayed is not None] or pairs
        if not pairs:
            return
        sequence, model = chooser.choose(pairs)
        if chooser.integer(0, 2):
            self.step()
        num_written = self.memory.num_written(sequence)
        number = chooser.choose([num_written, chooser.integer(0, num_written)])
        before = model.num_registered
        self.num_smaller_commits += number < model.written
        num_cached = self.attempt(lambda: self.manager.cache_blocks(sequence, number))
        self.model.commit(model, number)
        self.memory.vouch(sequence, number)
        self.num_commits += model.num_registered > before
        is_cached = self.model.enable_caching and model.is_of_this_epoch
        assert num_cached == (model.num_registered * self.model.block_size if is_cached else 0)

    def append_without_slots(self, chooser: Chooser) -> None:
        if self.pairs:
            sequence, model = chooser.choose(self.pairs)
            tokens = [chooser.integer(0, 1)]
            if len(model.tokens) < MAX_TOKENS:
                sequence.append_tokens(tokens)
                model.tokens += tokens

    def reserve(self, chooser: Chooser) -> None:
        """Room for tokens that aren't known yet, and for none that are computed."""
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        sequence, model = pair
        self.prepare(sequence)
        if not model.is_allocated:
            return
        total, start = len(model.tokens) + max(1, chooser.integer(0, self.max_ahead)), model.num_computed
        call = lambda: self.manager.allocate_slots(sequence, 0, num_total_tokens=total)  # noqa: E731
        self.grow(sequence, model, start, [], call, total - start)

    def fork(self, chooser: Chooser) -> None:
        """Fork a sequence, perhaps in the middle of a block."""
        pair = self.pick(chooser, allocated=True)
        if pair is None or len([1 for _, model in self.pairs if model.is_allocated]) > MAX_RUNNING:
            return
        self.num_made += 1
        name = f"sequence-{self.num_made}"
        child = self.manager.fork(pair[0], name)
        self.pairs.append((child, self.model.fork(pair[1], name)))
        self.memory.fork(pair[0], child)
        for load in self.loads:
            if pair in load.pairs:
                self.num_forked_loads += 1
                load.pairs.append(self.pairs[-1])

    def truncate(self, chooser: Chooser) -> None:
        pair = self.pick_longer(chooser)
        if pair is not None:
            num_tokens = chooser.integer(pair[1].num_prompt, len(pair[1].tokens))
            self.truncate_to(chooser, pair, num_tokens)

    def truncate_to(self, chooser: Chooser, pair: Pair, num_tokens: int) -> None:
        """Go back to `num_tokens`, which must be written, though what comes behind them may not be."""
        sequence, model = pair
        if sequence in self.memory.loading:
            self.finish_loads()
            if not model.is_allocated:
                return
        low = min(num_tokens, model.num_computed)
        if self.memory.num_written(sequence) < low:
            self.step()
        num_written = self.memory.num_written(sequence)
        num_computed = chooser.integer(low, num_written)
        if num_written == model.num_computed:
            num_computed = chooser.choose([None, None, num_computed])
        self.num_held_truncations += self.num_held_blocks(pair, low) > 0
        self.memory.cancel(sequence, low)
        if num_computed is not None:
            self.memory.lose_behind(sequence, num_computed)
        self.manager.truncate(sequence, num_tokens, num_computed_tokens=num_computed)
        self.model.truncate(model, num_tokens, num_computed)
        self.memory.truncate(sequence)
        self.abort_lost(chooser)

    def renew(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        sequence, model = pair
        if model.is_of_this_epoch or not self.model.enable_caching:
            with self.unchanged(), pytest.raises(SequenceStateError, match="from before a reset"):
                self.manager.renew(sequence)
            return
        if not self.memory.is_of_these_weights(sequence):
            return
        self.attempt(lambda: self.manager.renew(sequence))
        self.model.renew(model)
        self.num_renewed += 1

    def pin(self, chooser: Chooser) -> None:
        """Pin a prefix of a sequence, running, waiting or freed."""
        if not self.pairs or not self.model.enable_caching:
            return
        _, model = chooser.choose(self.pairs)
        size = self.model.block_size
        if len(model.tokens) < size or (model.keys and chooser.integer(0, 3)):
            return
        tokens = model.tokens[: chooser.integer(size, len(model.tokens))]
        keys = tuple((start, min(end, len(tokens)), key) for start, end, key in model.keys if start < len(tokens))
        priority = chooser.choose([0, 50, 99, 100])
        cut = chooser.integer(1, len(tokens))
        ranges = [(0, len(tokens), priority)] + ([] if cut == len(tokens) else [(cut, len(tokens), 70)])
        expires_at = chooser.choose([None, self.now + 2])
        options = {"salt": model.salt, "lora": model.lora, "extra_keys": keys, "expires_at": expires_at}
        num_full = len(tokens) // size
        priorities = [max(level for start, _, level in ranges if start // size < num_full)] * num_full
        used = sum(len(pin.priorities) for _, pin in self.pins)
        if used + len(priorities) > self.manager.num_blocks // 2:
            with self.unchanged(), pytest.raises(PinBudgetError):
                self.manager.pins.pin(tokens, priority=ranges, **options)
            return
        pin = self.manager.pins.pin(tokens, priority=ranges, **options)
        prefix = ModelSequence("pin", list(tokens), model.salt, model.lora, keys)
        self.pins.append((pin, ModelPin(prefix, priorities, expires_at)))
        self.model.pin(self.pins[-1][1])

    def unpin(self, chooser: Chooser) -> None:
        if self.pins:
            pair = chooser.choose(self.pins)
            self.pins.remove(pair)
            self.manager.pins.unpin(pair[0])
            self.model.unpin(pair[1])
            with self.unchanged(), pytest.raises(InvalidArgumentError, match="hasn't ended"):
                self.manager.pins.unpin(pair[0])

    def expire_pins(self, chooser: Chooser) -> None:
        self.now += 1
        expired = [pair for pair in self.pins if pair[1].expires_at is not None and pair[1].expires_at <= self.now]
        assert self.manager.pins.expire(self.now) == [pin for pin, _ in expired]
        self.model.now = self.now  # it sets the clock that policies see
        for pair in expired:
            self.pins.remove(pair)
            self.model.unpin(pair[1])

    def set_quota(self, chooser: Chooser) -> None:
        salt, quota = chooser.choose([None, "salt", "other salt", "default"]), chooser.choose([None, 0, 1, 3])
        if salt == "default":
            self.manager.quotas.set_default(quota)
            self.model.set_default_quota(quota)
            return
        self.manager.quotas.set(salt, quota)
        self.model.set_quota(salt, quota)

    def free(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is not None:
            self.end(chooser, pair)

    def preempt_and_resume(self, chooser: Chooser) -> None:
        """A freed sequence is allocated again and hits its own old blocks, its generated tokens included."""
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        sequence, model = pair
        self.end(chooser, pair)
        hit, held = self.manager.get_computed_blocks(sequence), self.model.hit(model)
        self.grow(sequence, model, len(model.tokens), held, lambda: self.manager.allocate_slots(sequence, hit=hit))

    def abort(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is not None:
            self.drop(pair, chooser.integer(0, self.memory.start_of_step(pair[0])))
            self.abort_lost(chooser)

    def abort_a_sharer(self, chooser: Chooser) -> None:
        """Abort a sequence whose own blocks another one has hit. The other goes on, though its prefix isn't cached."""
        size = self.model.block_size
        for pair in self.pairs:
            model = pair[1]
            own = model.table[model.num_readonly // size : model.num_registered]
            if any(self.model.owners[block] > 1 for block in own):
                num_computed = chooser.integer(0, min(model.num_readonly, self.memory.start_of_step(pair[0])))
                self.drop(pair, num_computed)
                self.abort_lost(chooser)
                self.num_detached += 1
                return

    def lose_what_a_waiting_one_hit(self, chooser: Chooser) -> None:
        """A sequence hits what another one wrote or is about to write, and loads what comes behind. Then that is lost.

        It goes on waiting if it is in no step, and reports what has arrived as ever.
        """
        size = self.model.block_size
        pairs = [pair for pair in self.pairs if pair[1].num_registered > pair[1].first_own // size]
        if not pairs or len([1 for _, model in self.pairs if model.is_allocated]) > MAX_RUNNING:
            return
        pair = chooser.choose(pairs)
        num_tokens = pair[1].num_registered * size
        tokens = [*pair[1].tokens[:num_tokens], *[chooser.integer(0, 1) for _ in range(chooser.integer(2, 6))]]
        spans = {(start, end, key) for start, end, key in pair[1].keys if end <= num_tokens}
        self.add(tokens, pair[1].salt, pair[1].lora, spans)
        self.starting = self.pairs[-1]
        self.allocate(chooser)
        self.starting = None
        self.schedule()
        own = pair[0].group_block_ids(0)[pair[0].first_live_block(0) :]
        how = chooser.choose([*["abort", "evict", "rewind", "step dies"] * 2, "reset"])
        if how == "step dies":
            self.step_dies(chooser)
        elif how == "evict":
            self.evict_ids([chooser.choose(own)] if own else [])
        elif pair[1].is_allocated:
            if how == "reset":
                self.reset(chooser)
            if how == "rewind":
                self.leave_loads(pair)
                self.go_back(pair, chooser.integer(0, min(pair[1].first_own, pair[1].num_computed)))
            else:
                self.drop(pair, chooser.integer(0, self.memory.start_of_step(pair[0])))
            self.abort_lost(chooser)

    def run_step(self, chooser: Chooser) -> None:
        self.step()

    def step_dies(self, chooser: Chooser) -> None:
        """A step dies: it makes at most some copies, and writes nothing. Abort all sequences that rely on it."""
        self.schedule()
        starts = {pair: self.memory.start_of_step(pair[0]) for pair in self.pairs if pair[1].is_allocated}
        in_step = [sequence for sequence, _ in self.memory.coming()]
        scheduled = [pair for pair in starts if pair[0] in in_step]
        self.memory.die(chooser.integer(0, len(self.memory.copies)))
        while scheduled:
            pair = chooser.choose(scheduled)
            scheduled.remove(pair)
            if not pair[1].is_allocated:
                continue
            self.drop(pair, starts[pair] if chooser.integer(0, 3) else chooser.integer(0, starts[pair]))
        self.abort_lost(chooser)

    def reset(self, chooser: Chooser) -> None:
        if chooser.integer(0, 1):  # after new weights, which no step under way can get
            self.step()
            self.memory.change_weights()
        self.num_loads_at_reset += len(self.loads)
        self.manager.reset_prefix_cache()
        self.model.reset([model for _, model in self.pairs])

    def forget_salt(self, chooser: Chooser) -> None:
        salt = chooser.choose([model.salt for _, model in self.pairs] or [None])
        if chooser.integer(0, 1):  # else it may be renewed
            self.step()
            self.memory.forget_salt(salt)
        before = self.manager.stats.num_cached_blocks
        num_forgotten = self.manager.forget_salt(salt)
        self.model.forget_salt(salt, [model for _, model in self.pairs])
        assert num_forgotten == before - self.manager.stats.num_cached_blocks
        self.num_forgotten += num_forgotten

    def let_the_hash_fail(self, chooser: Chooser) -> None:
        if isinstance(self.hash, FragileHash):
            self.hash.is_about_to_fail = True
            names = ["append", "append_step", "allocate", "allocate_chunk", "allocate_child", "renew", "cache_blocks"]
            getattr(self, chooser.choose(names))(chooser)
            self.hash.is_about_to_fail = False

    def use_without_blocks(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=False)
        if pair is None:
            return
        sequence, manager = pair[0], self.manager
        calls: list[Callable[[], object]] = [
            lambda: manager.free(sequence),
            lambda: manager.abort(sequence, 0),
            lambda: manager.append_slots(sequence, [0]),
            lambda: manager.cache_blocks(sequence, 0),
            lambda: manager.rewind(sequence, 0),
            lambda: manager.holds.read(sequence),
            lambda: manager.holds.write(sequence),
            lambda: manager.holds.detach(sequence),
        ]
        with self.unchanged(), pytest.raises(SequenceStateError, match="holds no blocks"):
            chooser.choose(calls)()

    def misuse(self, chooser: Chooser) -> None:
        pair = self.pick(chooser, allocated=True)
        if pair is None:
            return
        sequence, model = pair
        manager, num_left = self.manager, len(model.tokens) - model.num_computed
        calls: list[Callable[[], object]] = [
            lambda: manager.get_computed_blocks(sequence),
            lambda: manager.append_slots(sequence, []),
            lambda: manager.append_slots(sequence, [0, -1]),
            lambda: manager.allocate_slots(sequence, num_left + 1),
            lambda: manager.allocate_slots(sequence, 0),
            lambda: manager.abort(sequence, model.num_computed + 1),
            lambda: manager.abort(sequence, -1),
            lambda: manager.allocate_slots(sequence, 0, num_total_tokens=-1),
            lambda: manager.cache_blocks(sequence, model.num_computed + 1),
            lambda: manager.cache_blocks(sequence, -1),
            lambda: manager.rewind(sequence, model.num_computed + 1),
            lambda: manager.holds.read(sequence, model.written + 1),
            lambda: manager.holds.write(sequence, model.num_computed + 1),
            lambda: manager.allocate_slots(sequence, num_external_computed_tokens=num_left + 1),
            lambda: manager.allocate_slots(sequence, num_left + 1, num_total_tokens=len(model.tokens)),
            lambda: manager.allocate_slots(sequence, num_total_tokens=0),
            lambda: manager.evict_blocks([manager.first_block_id, manager.first_block_id + manager.num_blocks]),
            lambda: manager.allocate_slots(kvblocks.Sequence(sequence.sequence_id, [0])),
        ]
        with self.unchanged(), pytest.raises(KVBlocksError):
            chooser.choose(calls)()

    # Parts of the operations.

    def is_late(self, chooser: Chooser) -> bool:
        """Whether the next call delays caching."""
        return chooser.integer(0, 4) == 0

    @contextmanager
    def delayed(self, late: bool, *starts: tuple[ModelSequence, int]) -> Iterator[None]:
        """Delay the caching of sequences from some of their tokens on; not for those whose call is refused."""
        before = [(model, model.delayed, model.num_computed, model.is_allocated) for model, _ in starts]
        if late:
            for model, first in starts:
                model.delay(first)
        yield
        for model, delayed, num_computed, is_allocated in before:
            if (model.num_computed, model.is_allocated) == (num_computed, is_allocated):
                model.delayed = delayed
            elif late:
                self.num_late += 1
                self.memory.delay(next(sequence for sequence, other in self.pairs if other is model))

    def prepare(self, *sequences: kvblocks.Sequence) -> None:
        """Run the step first where an engine must."""
        if any(self.memory.must_run_before(sequence) for sequence in sequences):
            self.finish_loads()
            self.step()

    def get_ready(self, chooser: Chooser, pair: Pair) -> int:
        """Run the step first where an engine must, or return how many of a sequence's tokens it leaves in flight."""
        sequence, model = pair
        if chooser.integer(0, 1) and not self.memory.would_copy_unwritten(sequence):
            return model.num_computed - self.memory.start_of_step(sequence) + chooser.choose([0, 0, 1])
        self.prepare(sequence)
        return 0

    def schedule(self) -> None:
        """Tell the memory what the next step is going to do."""
        copies = self.manager.take_copies()
        assert copies == [(0, *pair) for pair in self.model.copies]
        self.model.copies.clear()
        self.memory.schedule(
            [pair for _, *pair in copies], [sequence for sequence, model in self.pairs if model.is_allocated]
        )

    def step(self) -> None:
        self.schedule()
        self.memory.run_step()

    def end(self, chooser: Chooser, pair: Pair) -> None:
        """Free a sequence, or abort it if a step that hasn't run was to compute some of it."""
        if pair[0] in self.memory.unwritten:
            self.drop(pair, self.memory.start_of_step(pair[0]))
            self.abort_lost(chooser)
            return
        self.leave_loads(pair)
        self.memory.forget(pair[0])
        self.manager.free(pair[0])
        self.model.free(pair[1])

    def drop(self, pair: Pair, num_computed: int) -> None:
        """Abort a sequence, and nobody else."""
        self.leave_loads(pair)
        self.memory.cancel(pair[0])
        self.memory.lose_behind(pair[0], num_computed)
        self.memory.forget(pair[0])
        self.manager.abort(pair[0], num_computed)
        self.model.abort(pair[1], num_computed)

    def abort_lost(self, chooser: Chooser | None = None) -> None:
        """Abort sequences that rely on KV that no step will write.

        Those that wait for a load are in no step. They may go on waiting, and learn at its end what they lost.
        """
        waiting: list[ModelSequence] = []
        while True:
            lost = [p for p in self.pairs if p[1].is_allocated and p[1] not in waiting and self.memory.is_lost(p[0])]
            if not lost:
                return
            pair = lost[0] if chooser is None else chooser.choose(lost)
            if self.only_waits(pair) and (chooser is None or chooser.integer(0, 3)):
                waiting.append(pair[1])
                self.num_stranded += 1
                continue
            self.drop(pair, self.memory.start_of_step(pair[0]))

    def only_waits(self, pair: Pair) -> bool:
        """Whether a sequence waits for a load, and no step writes any of it."""
        return pair[0] in self.memory.loading and pair[0] not in [sequence for sequence, _ in self.memory.coming()]

    def pick(self, chooser: Chooser, *, allocated: bool) -> Pair | None:
        if self.starting is not None:
            return self.starting
        pairs = [pair for pair in self.pairs if pair[1].is_allocated == allocated]
        return chooser.choose(pairs) if pairs else None

    def pick_longer(self, chooser: Chooser) -> Pair | None:
        """Pick a sequence with tokens behind its prompt, if possible one with held blocks there."""
        pairs = [pair for pair in self.pairs if pair[1].is_allocated and len(pair[1].tokens) > pair[1].num_prompt]
        pairs = [pair for pair in pairs if self.num_held_blocks(pair, pair[1].num_prompt)] or pairs
        return chooser.choose(pairs) if pairs else self.pick(chooser, allocated=True)

    def grow(
        self,
        sequence: kvblocks.Sequence,
        model: ModelSequence,
        end: int,
        held: list[int],
        call: Callable[[], Any],
        num_lookahead: int = 0,
    ) -> bool:
        """Do the same in the manager and in the model. Whether the pool could serve it."""
        before = list(model.table) if model.is_allocated else held
        if not self.model.grow(model, end, held, num_lookahead):
            self.num_refused += 1
            with self.unchanged():
                assert call() is None
            refusal = self.manager.last_refusal
            assert refusal is not None
            assert refusal.num_blocks > refusal.num_free_blocks + refusal.num_given_blocks
            return False
        expected = [block for i, block in enumerate(model.table) if before[i : i + 1] != [block]]
        assert [block.block_id for block in self.attempt(call)] == expected
        return True

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Make a call. If the hash function raises, check that nothing has changed, and make the call again."""
        before = self.snapshot() if isinstance(self.hash, FragileHash) else None
        try:
            return call()
        except HashError:
            self.num_failed_hashes += 1
            assert self.snapshot() == before
            return call()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.snapshot()
        yield
        assert self.snapshot() == before

    def snapshot(self) -> object:
        sequences = [
            (s.token_ids(), list(s.block_ids), s.num_computed_tokens, s.num_written_tokens, s.is_allocated)
            for s, _ in self.pairs
        ]
        blocks = [[(block.ref_cnt, block.is_cached) for block in s.blocks] for s, _ in self.pairs]
        hits = [self.manager.get_computed_blocks(s).blocks for s, _ in self.pairs if not s.is_allocated]
        pins = [(pin.blocks, pin.num_held_blocks) for pin in self.manager.pins]
        return (
            self.manager.inspect.free_block_ids(),
            self.manager.stats,
            list(self.manager.quotas),
            sequences,
            blocks,
            hits,
            pins,
        )

    def check(self) -> None:
        """The manager's own invariants hold, and all that can be seen of it is what the model says."""
        manager, model = self.manager, self.model
        manager.check()
        self.check_memory()
        assert manager.inspect.free_block_ids() == model.queue
        assert manager.num_free_blocks == len(model.queue)
        self.check_holds()
        assert manager.stats.num_cached_blocks == len(model.content)
        for sequence, expected in self.pairs:
            assert sequence.token_ids() == expected.tokens
            assert sequence.block_ids == expected.table
            assert sequence.num_computed_tokens == expected.num_computed
            assert sequence.num_written_tokens == expected.written
            for block in sequence.blocks:
                assert block.ref_cnt == model.owners[block.block_id]
                assert (block.block_hash is not None) == (block.block_id in model.content)
            if not expected.is_allocated:
                hit = manager.get_computed_blocks(sequence)
                assert [block.block_id for block in hit.blocks] == model.hit(expected)
                self.memory.check_hit(sequence, hit)
                self.check_cut(hit, expected)
                if (self.num_checks + len(expected.name)) % 5 == 0:  # these cost more than all the rest
                    self.check_pending(hit, expected)
                    self.check_explanation(sequence, expected)
        self.num_checks += 1
        self.check_pins_and_quotas()
        if self.has_events:
            self.replay_events()

    def check_cut(self, hit: CacheHit, expected: ModelSequence) -> None:
        """Check lookups with a limit, cut hits, and how many blocks starting or growing would take."""
        if (self.num_checks + len(expected.name)) % 3:
            return
        sequence, number = hit.sequence, self.num_checks % (len(expected.tokens) + 2)
        held = self.model.hit(expected, number)
        for cut in (self.manager.get_computed_blocks(sequence, number), hit.cut(number)):
            assert [block.block_id for block in cut.blocks] == held
            is_whole = len(held) * self.model.block_size == len(expected.tokens)
            assert cut.num_tokens == len(held) * self.model.block_size - is_whole
            self.memory.check_hit(sequence, cut)
            if not is_whole:
                needed = self.model.num_needed(expected, number, held)
                assert self.manager.get_num_blocks_to_allocate(sequence, number, hit=cut) == needed
        names = self.manager.inspect.block_hashes(sequence)
        assert len(names) == len(expected.tokens) // self.model.block_size
        assert names[: len(hit.blocks)] == [block.block_hash for block in hit.blocks]
        for running, model in self.pairs[:2]:
            if model.is_allocated:
                number = self.num_checks % (len(model.tokens) + 6)
                needed = self.model.num_needed(model, number, [])
                assert self.manager.get_num_blocks_to_allocate(running, number) == needed

    def check_pins_and_quotas(self) -> None:
        assert list(self.manager.pins) == [pin for pin, _ in self.pins]
        for pin, expected in self.pins:
            assert [block.block_id for block in pin.blocks] == expected.held
            assert pin.priorities == expected.priorities
            self.num_given_up += pin.num_held_blocks < pin.num_blocks
        usage = {quota.salt: (quota.max_cached_blocks, quota.num_cached_blocks) for quota in self.manager.quotas}
        assert usage == {salt: (most, self.model.num_cached(salt)) for salt, most in self.model.all_quotas().items()}

    def check_memory(self) -> None:
        self.schedule()
        self.memory.check()
        for block, prefix in self.model.content.items():
            self.memory.check_cached(block, 0, prefix, len(prefix[2]))  # type: ignore[arg-type]

    def check_pending(self, hit: CacheHit, model: ModelSequence) -> None:
        """Check that a hit says how many tokens behind it a chunked prefill will compute."""
        size, expected = self.model.block_size, 0
        for _, other in self.pairs:
            if other.is_allocated and other.written < len(other.tokens) and other.is_of_this_epoch:
                if other.lost is not None:
                    continue
                common = [
                    n
                    for n in range(1, min(len(other.tokens), len(model.tokens)) // size + 1)
                    if other.prefix(n, size) == model.prefix(n, size)
                ]
                expected = max(expected, len(common) - len(hit.blocks))
        assert hit.pending_tokens <= expected * size
        if hit.pending_tokens:
            self.num_pending += 1
            assert hit.pending_sequence is not None
            assert hit.pending_sequence.num_written_tokens < hit.pending_sequence.num_tokens

    def check_explanation(self, sequence: kvblocks.Sequence, model: ModelSequence) -> None:
        if not self.model.enable_caching:
            return
        explanation = self.manager.inspect.explain(sequence)
        num_hit = len(self.model.hit(model))
        assert explanation.num_cached_blocks == num_hit
        self.causes.add(explanation.cause)
        if num_hit == len(model.tokens) // self.model.block_size:
            assert explanation.cause == "no miss"
        elif self.has_history:
            cause = self.model.gone.get(model.prefix(num_hit + 1, self.model.block_size))
            assert cause is None or explanation.cause == cause
            assert cause is not None or explanation.cause in ("never cached", "other keys", "partly equal")

    def replay_events(self) -> None:
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.stored
                assert not self.stored & set(event.block_hashes)
                for block_id in event.block_ids:
                    prefix = self.model.content.get(block_id)
                    assert prefix is None or prefix[:2] == (event.salt, event.lora)
                assert len(event.block_ids) == len(event.block_hashes)
                self.stored |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.stored >= set(event.block_hashes)
                self.stored -= set(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.stored.clear()
        assert len(self.stored) == len(self.model.cached)
        assert {block.block_hash for s, _ in self.pairs for block in s.blocks if block.is_cached} <= self.stored


OPERATIONS: tuple[tuple[Callable[[History, Chooser], None], int], ...] = (
    (History.new, 2),
    (History.new_like_another, 9),
    (History.look_up_all, 3),
    (History.allocate, 16),
    (History.allocate_child, 5),
    (History.allocate_chunk, 6),
    (History.append, 12),
    (History.append_step, 5),
    (History.cache_blocks, 8),
    (History.allocate_total, 5),
    (History.load_more, 5),
    (History.end_a_load, 12),
    (History.rewind, 2),
    (History.hold, 3),
    (History.release_hold, 3),
    (History.detach, 1),
    (History.evict, 1),
    (History.append_without_slots, 2),
    (History.reserve, 2),
    (History.free, 15),
    (History.preempt_and_resume, 3),
    (History.abort, 3),
    (History.run_step, 20),
    (History.step_dies, 4),
    (History.abort_a_sharer, 3),
    (History.lose_what_a_waiting_one_hit, 3),
    (History.fork, 4),
    (History.truncate, 4),
    (History.renew, 4),
    (History.pin, 2),
    (History.unpin, 1),
    (History.expire_pins, 1),
    (History.set_quota, 1),
    (History.let_the_hash_fail, 3),
    (History.use_without_blocks, 1),
    (History.misuse, 2),
)
"""Each operation and how often a walk does it. `reset` and `forget_salt` are the caller's: both end a lot."""
History.operations = OPERATIONS


def walk(
    history: History, chooser: RandomChooser, num_operations: int, reset_every: int = 150, forget_every: int = 0
) -> None:
    """Do `num_operations` random operations, checking after each. forget_every: as reset_every, of a salt; 0: never."""
    operations = [operation for operation, weight in history.operations for _ in range(weight)]
    for number in range(1, num_operations + 1):
        operation = chooser.choose(operations)
        history.num_steps += 1
        with where(chooser.seed, history.num_steps, operation):
            operation(history, chooser)
            if number % reset_every == 0:
                history.reset(chooser)
            if forget_every and number % forget_every == 0:
                history.forget_salt(chooser)
            history.check()
