"""The manager against the dumb model, over generated histories on pools so small that eviction never stops."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kvblocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheHit,
    InvalidArgumentError,
    KVBlocksError,
    KVCacheManager,
    Sequence,
    SequenceStateError,
    StaleHitError,
)
from kvblocks.hashing import sha256_digest
from dumb_model import DumbModel, ModelSequence

TOKENS = st.integers(0, 1)  # two tokens and short prompts, so that prefixes meet, part and meet again all the time
PROMPTS = st.lists(TOKENS, min_size=1, max_size=14)
SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.sampled_from("xy")), max_size=2)


def three_bit_hash(preimage: bytes) -> bytes:
    """Only eight different digests."""
    return bytes([sha256_digest(preimage)[0] & 7])


class ManagerMachine(RuleBasedStateMachine):
    hash_algorithm = "xxh3_128"
    enable_caching = True
    enable_events = True

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.manager = KVCacheManager(
            num_blocks,
            block_size,
            hash_algorithm=self.hash_algorithm,
            enable_caching=self.enable_caching,
            enable_events=self.enable_events,
            debug=True,
        )
        self.model = DumbModel(num_blocks, block_size, self.enable_caching)
        self.pairs: list[tuple[Sequence, ModelSequence]] = []
        self.hits: dict[str, CacheHit] = {}
        self.stored: set[bytes] = set()
        self.num_made = 0

    def pick(self, data: st.DataObject, *, allocated: bool) -> tuple[Sequence, ModelSequence]:
        return data.draw(st.sampled_from([pair for pair in self.pairs if pair[1].is_allocated == allocated]))

    def has(self, *, allocated: bool) -> bool:
        return any(pair[1].is_allocated == allocated for pair in self.pairs)

    @rule(
        tokens=PROMPTS,
        salt=st.sampled_from([None, None, None, "salt"]),
        lora=st.sampled_from([None, None, None, "lora"]),
        spans=st.one_of(st.just([]), SPANS),
    )
    def new_sequence(self, tokens: list[int], salt: str, lora: str, spans: list[tuple[int, int, str]]) -> None:
        keys = {(start, min(start + length, len(tokens)), key) for start, length, key in spans if start < len(tokens)}
        self.num_made += 1
        name = f"sequence-{self.num_made}"
        sequence = Sequence(name, tokens, salt=salt, lora=lora, extra_keys=keys)
        self.pairs.append((sequence, ModelSequence(name, list(tokens), salt, lora, tuple(keys))))
        waiting = [pair for pair in self.pairs if not pair[1].is_allocated]
        if len(waiting) > 5:
            self.pairs.remove(waiting[0])

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=8), change=st.sampled_from(["", "", "salt", "keys"]))
    def new_sequence_like_another(self, data: st.DataObject, more: list[int], change: str) -> None:
        """Same beginning, so that sequences share blocks, duplicate each other's and part at every possible place."""
        _, other = data.draw(st.sampled_from(self.pairs))
        num_shared = data.draw(st.integers(0, len(other.tokens)))
        tokens = (other.tokens[:num_shared] + more)[:20] or [0]
        spans = [(start, end - start, key) for start, end, key in other.keys]
        if change == "keys":
            spans = [*spans, (data.draw(st.integers(0, len(tokens) - 1)), data.draw(st.integers(1, 3)), "z")]
        salt = "other salt" if change == "salt" else other.salt
        self.new_sequence(tokens, salt, other.lora, spans)  # type: ignore[arg-type]

    @rule()
    def look_up_all(self) -> None:
        for sequence, model in self.pairs:
            if not model.is_allocated:
                self.hits[sequence.sequence_id] = self.manager.get_computed_blocks(sequence)

    @precondition(lambda self: self.has(allocated=False))
    @rule(data=st.data(), mode=st.sampled_from(["fresh hit", "fresh hit", "old hit", "no hit"]), whole=st.booleans())
    def allocate(self, data: st.DataObject, mode: str, whole: bool) -> None:
        sequence, model = self.pick(data, allocated=False)
        now = self.model.hit(model)
        hit = None
        if mode == "old hit":
            hit = self.hits.get(sequence.sequence_id)
        elif mode == "fresh hit":
            hit = self.manager.get_computed_blocks(sequence)
            assert [block.block_id for block in hit.blocks] == now
        held = [] if hit is None else [block.block_id for block in hit.blocks]
        start = min(len(held) * self.model.block_size, len(model.tokens) - 1)
        num_new = None if whole else data.draw(st.integers(1, len(model.tokens) - start))
        end = len(model.tokens) if num_new is None else start + num_new
        if now[: len(held)] != held:
            with self.changes_nothing(), pytest.raises(StaleHitError):
                self.manager.allocate_slots(sequence, num_new, hit=hit)
            return
        assert hit is None or hit.num_tokens == start
        self.grow(sequence, model, end, held, lambda: self.manager.allocate_slots(sequence, num_new, hit=hit))

    @precondition(lambda self: self.has(allocated=True))
    @rule(data=st.data())
    def allocate_chunk(self, data: st.DataObject) -> None:
        sequence, model = self.pick(data, allocated=True)
        num_left = len(model.tokens) - model.num_computed
        if not num_left:
            with self.changes_nothing(), pytest.raises(InvalidArgumentError):
                self.manager.allocate_slots(sequence)
            return
        num_new = data.draw(st.integers(1, num_left))
        end = model.num_computed + num_new
        self.grow(sequence, model, end, [], lambda: self.manager.allocate_slots(sequence, num_new))

    @precondition(lambda self: self.has(allocated=True))
    @rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=3))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence, model = self.pick(data, allocated=True)
        if model.num_computed < len(model.tokens):
            with self.changes_nothing(), pytest.raises(SequenceStateError):
                self.manager.append_slots(sequence, tokens)
            return
        model.tokens += tokens
        if not self.grow(sequence, model, len(model.tokens), [], lambda: self.manager.append_slots(sequence, tokens)):
            del model.tokens[-len(tokens) :]

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=3))
    def append_tokens_without_slots(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence, model = data.draw(st.sampled_from(self.pairs))
        sequence.append_tokens(tokens)
        model.tokens += tokens

    @precondition(lambda self: self.has(allocated=True))
    @rule(data=st.data(), num_tokens=st.integers(0, 5))
    def reserve(self, data: st.DataObject, num_tokens: int) -> None:
        sequence, model = self.pick(data, allocated=True)
        end = len(model.tokens) + num_tokens
        num_missing = max(0, -(-end // self.model.block_size) - len(model.table))
        if num_missing > len(self.model.queue):
            with self.changes_nothing():
                assert self.manager.reserve_slots(sequence, num_tokens) is None
            return
        self.model.take(model, num_missing)
        blocks = self.manager.reserve_slots(sequence, num_tokens)
        assert blocks is not None
        assert [block.block_id for block in blocks] == model.table[len(model.table) - num_missing :]

    @precondition(lambda self: self.has(allocated=True))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence, model = self.pick(data, allocated=True)
        self.manager.free(sequence)
        self.model.free(model)

    @precondition(lambda self: self.has(allocated=True))
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        sequence, model = self.pick(data, allocated=True)
        self.manager.free(sequence)
        self.model.free(model)
        hit = self.manager.get_computed_blocks(sequence)
        held = self.model.hit(model)
        self.grow(sequence, model, len(model.tokens), held, lambda: self.manager.allocate_slots(sequence, hit=hit))

    @precondition(lambda self: self.has(allocated=True))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence, model = self.pick(data, allocated=True)
        num_computed = data.draw(st.integers(0, model.num_computed))
        self.manager.abort(sequence, num_computed)
        self.model.abort(model, num_computed)

    @rule(really=st.integers(0, 3))
    def reset(self, really: int) -> None:
        if not really:  # one in four, or nothing would live long enough to be hit
            self.manager.reset_prefix_cache()
            self.model.reset([model for _, model in self.pairs])

    @precondition(lambda self: self.has(allocated=False))
    @rule(data=st.data(), call=st.sampled_from(["free", "abort", "append", "reserve"]))
    def use_without_blocks(self, data: st.DataObject, call: str) -> None:
        sequence, _ = self.pick(data, allocated=False)
        calls = {
            "free": lambda: self.manager.free(sequence),
            "abort": lambda: self.manager.abort(sequence, 0),
            "append": lambda: self.manager.append_slots(sequence, [0]),
            "reserve": lambda: self.manager.reserve_slots(sequence, 1),
        }
        with self.changes_nothing(), pytest.raises(SequenceStateError, match="holds no blocks"):
            calls[call]()

    @precondition(lambda self: self.has(allocated=True))
    @rule(data=st.data())
    def bad_arguments(self, data: st.DataObject) -> None:
        sequence, model = self.pick(data, allocated=True)
        num_left = len(model.tokens) - model.num_computed
        bad_calls = [
            lambda: self.manager.get_computed_blocks(sequence),
            lambda: self.manager.append_slots(sequence, []),
            lambda: self.manager.append_slots(sequence, [0, -1]),
            lambda: self.manager.allocate_slots(sequence, num_left + 1),
            lambda: self.manager.allocate_slots(sequence, 0),
            lambda: self.manager.abort(sequence, model.num_computed + 1),
            lambda: self.manager.reserve_slots(sequence, -1),
            lambda: self.manager.allocate_slots(Sequence(sequence.sequence_id, [0])),
        ]
        with self.changes_nothing(), pytest.raises(KVBlocksError):
            data.draw(st.sampled_from(bad_calls))()

    def grow(self, sequence: Sequence, model: ModelSequence, end: int, held: list[int], call: object) -> bool:
        """Do the same in the manager and in the model; whether the pool could serve it."""
        num_before = len(held) if not model.is_allocated else len(model.table)
        if not self.model.grow(model, end, held):
            with self.changes_nothing():
                assert call() is None  # type: ignore[operator]
            return False
        blocks = call()  # type: ignore[operator]
        assert [block.block_id for block in blocks] == model.table[num_before:]
        return True

    def changes_nothing(self) -> "Unchanged":
        return Unchanged(self)

    def snapshot(self) -> object:
        manager = self.manager
        blocks = {block.block_id: (block.ref_cnt, block.block_hash) for s, _ in self.pairs for block in s.blocks}
        sequences = [(s.token_ids(), list(s.block_ids), s.num_computed_tokens, s.is_allocated) for s, _ in self.pairs]
        return manager.free_block_ids(), manager.stats, blocks, sequences

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        assert self.manager.free_block_ids() == self.model.queue
        assert self.manager.num_free_blocks == len(self.model.queue)
        assert self.manager.stats.num_cached_blocks == len(self.model.content)
        for sequence, model in self.pairs:
            assert sequence.token_ids() == model.tokens
            assert sequence.block_ids == model.table
            assert sequence.num_computed_tokens == model.num_computed
            for block in sequence.blocks:
                assert block.ref_cnt == self.model.owners[block.block_id]
                assert (block.block_hash is not None) == (block.block_id in self.model.content)
            if not model.is_allocated:
                hit = self.manager.get_computed_blocks(sequence)
                assert [block.block_id for block in hit.blocks] == self.model.hit(model)
        if self.enable_events:
            self.replay_events()

    def replay_events(self) -> None:
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                assert parent is None or parent in self.stored
                assert not self.stored & set(event.block_hashes)
                self.stored |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.stored >= set(event.block_hashes)
                self.stored -= set(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.stored.clear()
        assert len(self.stored) == len(self.model.cached)
        held = {block.block_hash for sequence, _ in self.pairs for block in sequence.blocks if block.is_cached}
        assert held <= self.stored


class Unchanged:
    """A context manager that fails unless what it encloses left the machine's manager as it was."""

    def __init__(self, machine: ManagerMachine) -> None:
        self.machine = machine

    def __enter__(self) -> None:
        self.before = self.machine.snapshot()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            assert self.machine.snapshot() == self.before


class ThreeBitMachine(ManagerMachine):
    hash_algorithm = staticmethod(three_bit_hash)  # type: ignore[assignment]
    enable_events = False  # with eight digests, events can't say which of several prefixes they mean


class UncachedMachine(ManagerMachine):
    enable_caching = False


@pytest.mark.parametrize("machine", [ManagerMachine, ThreeBitMachine, UncachedMachine])
def test_agrees_with_the_dumb_model(machine: type[ManagerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=3 * settings().max_examples, stateful_step_count=80))
