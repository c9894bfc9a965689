"""Models with recurrent states: the same answers, to the last bit, however computed; and what becomes of slots.

While a step runs, every K and V that no row of it sees is NaN, and so is every slot of a sequence that isn't in it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.hybrid_models import FIELDS, load_tiny
from engine.small_models import ODD, random_tokens, random_weights
from engine.watched import Watch
from kvblocks import Sequence
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.run.backends import plan_cache
from kvblocks.engine.sampling.random_numbers import sample_seed
from kvblocks.errors import InvalidArgumentError

MAX_TOKENS = 6


QUICK, ALSO = "lfm2", ("bamba", "qwen3_5_text", "kimi_linear")  # those take several times as long
ALL = [name if name == QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in FIELDS]
for_every_model = pytest.mark.parametrize("model", ALL, indirect=True)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), "lfm2")


@pytest.fixture(scope="module")
def prompts(model):
    """130 shared tokens and 5 of its own each; one that is shared wholly; and one of eight whole blocks, twice."""
    shared = random_tokens(model.config, 130, seed=1)
    own = [shared + random_tokens(model.config, 5, seed=seed) for seed in range(2, 4)]
    return [*own, shared, shared[:128], shared[:128]]


def generate(model, prompts, *, limits=None, num_blocks=300, one_by_one=False, **options):
    """Completions and watch of a new engine."""
    engine = Engine(model, num_blocks=num_blocks, deterministic=True, **options)
    watch = Watch(engine)
    if limits is not None:
        engine.limits = limits
    if one_by_one:
        completions = [engine.generate([prompt], max_tokens=MAX_TOKENS, ignore_eos=True)[0] for prompt in prompts]
    else:
        completions = engine.generate(prompts, max_tokens=MAX_TOKENS, ignore_eos=True)
    engine.manager.check()
    assert engine.manager.num_free_blocks == num_blocks
    assert engine.manager.states.num_free_slots == engine.manager.states.num_slots
    return completions, watch


@pytest.fixture(scope="module")
def alone(model, prompts):
    """What every other way must give: one after another, whole prompts, no caching, room for everything."""
    torch.set_num_threads(1)
    return generate(model, prompts, one_by_one=True, enable_prefix_caching=False)


WAYS = {
    "batched": {"enable_prefix_caching": False},
    "cached, one after another": {"one_by_one": True},
    "cached and batched": {},
    "cached and chunked": {"limits": StepLimits(45, 4)},
    "cached, three slots": {"num_state_slots": 3, "limits": StepLimits(60, 8)},
    "cached, one slot": {"num_state_slots": 1, "limits": StepLimits(60, 8)},
    "preempted": {"enable_prefix_caching": False, "scarce": 1.5, "limits": StepLimits(60, 4)},
    "cached and preempted": {"scarce": 1.3, "limits": StepLimits(60, 4)},
    "cached, alone in the pool": {"scarce": 1.0, "limits": StepLimits(40, 2)},
    "cached in small blocks": {"block_size": 4, "num_blocks": 900},
}


def scarce_blocks(model, share, limits):
    """A pool for `share` times what the longest request needs."""
    blocks = plan_cache(model.config, 16, torch.float32).blocks_of_sequence(
        135 + MAX_TOKENS - 1, limits.max_num_batched_tokens
    )
    return int(sum(blocks) * share)


CASES = [
    pytest.param(
        name,
        way,
        marks=() if name == QUICK or (name in ALSO and way == "cached and chunked") else pytest.mark.exhaustive,
    )
    for name in FIELDS
    for way in WAYS
]


@pytest.mark.parametrize(("model", "way"), CASES, indirect=["model"])
def test_every_way_gives_the_same_bits(model, prompts, alone, way):
    expected, expected_watch = alone
    options = dict(WAYS[way])
    if "scarce" in options:
        options["num_blocks"] = scarce_blocks(model, options.pop("scarce"), options["limits"])
    completions, watch = generate(model, prompts, **options)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert watch.logits.keys() == expected_watch.logits.keys()
    for tokens, logits in expected_watch.logits.items():
        assert torch.equal(watch.logits[tokens], logits)
    stats = watch.engine.manager.states.stats
    if way == "cached, one after another":
        assert [c.num_cached_tokens for c in completions] == [0, 128, 128, 0, 112]  # a state can't be undone by a token
        assert stats.num_restored == 3
        assert stats.num_saved >= 2
    if way == "preempted":
        assert sum(c.num_computed_tokens for c in completions) > sum(c.num_computed_tokens for c in expected)


@st.composite
def histories(draw):
    """Prompts that share beginnings of any length, and how an engine runs them."""
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150), st.integers(0, 40)), min_size=2, max_size=6)
    )
    limits = StepLimits(draw(st.integers(6, 70)), 6, max_num_chunk_tokens=draw(st.none() | st.integers(1, 40)))
    return lengths, limits, draw(st.integers(1, 6)), draw(st.floats(1.0, 2.5)), draw(st.integers(1, 6))


@for_every_model
@settings(max_examples=6)
@given(history=histories(), deaths=st.sets(st.integers(0, 60), max_size=4), num_samples=st.integers(1, 3))
def test_any_history_gives_the_same_bits(model, history, deaths, num_samples):
    """With steps that die at any of them, before or behind the computation, samples that part, and few slots."""
    lengths, limits, num_slots, share, num_at_once = history
    stems = [random_tokens(model.config, 150, seed=seed) for seed in range(3)]
    prompts = [
        stems[stem][:shared] + random_tokens(model.config, own, seed=50 + index)
        for index, (stem, shared, own) in enumerate(lengths)
    ]
    plan = plan_cache(model.config, 16, torch.float32)
    longest = max(map(len, prompts)) + MAX_TOKENS
    num_blocks = int(sum(plan.blocks_of_sequence(longest, limits.max_num_batched_tokens)) * share) + num_samples
    engine = Engine(model, num_blocks=num_blocks, deterministic=True, num_state_slots=num_slots)
    engine.limits = limits
    dying = Dying(engine, deaths)
    watch, oracle = Watch(engine), Watch(Engine(model, num_blocks=300, deterministic=True, enable_prefix_caching=False))
    options = {"max_tokens": MAX_TOKENS, "n": num_samples, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    for first in range(0, len(prompts), num_at_once):
        some = prompts[first : first + num_at_once]
        expected = oracle.engine.generate(some, **options)
        completions = None
        while completions is None:
            try:
                completions = engine.generate(some, **options)
            except ModelError:
                engine.manager.check()
        assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for tokens, logits in oracle.logits.items():
        assert torch.equal(watch.logits[tokens], logits)
    assert dying.num_steps > 0
    assert engine.manager.states.num_free_slots == num_slots


class Dying:
    """Makes steps of an engine die: even ones before they are computed, odd ones behind."""

    def __init__(self, engine, deaths):
        self.num_steps = 0
        run = engine.runner.run

        def dying_run(chunks, score=None):
            number, self.num_steps = self.num_steps, self.num_steps + 1
            if number in deaths and number % 2 == 0:
                raise ModelError("died before")
            logits = run(chunks, score)
            if number in deaths:
                raise ModelError("died behind")
            return logits

        engine.runner.run = dying_run


@for_every_model
def test_samples_share_a_prompt_and_part_from_it(model):
    engine = Engine(model, num_blocks=300, deterministic=True)
    Watch(engine)
    prompt = random_tokens(model.config, 101)
    samples = engine.generate([prompt], n=4, temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    assert engine.manager.states.stats.num_forked == 3
    for number, sample in enumerate(samples):
        alone = Engine(model, num_blocks=300, deterministic=True)
        (expected,) = alone.generate(
            [prompt], temperature=1.5, seed=sample_seed(7, number), max_tokens=12, ignore_eos=True
        )
        assert sample.token_ids == expected.token_ids


def test_samples_beyond_the_slots_wait(lfm2):
    engine = Engine(lfm2, num_blocks=100, deterministic=True, num_state_slots=2)
    prompt = random_tokens(lfm2.config, 50)
    samples = engine.generate([prompt], n=5, temperature=1.5, seed=7, max_tokens=8, ignore_eos=True)
    large = Engine(lfm2, num_blocks=100, deterministic=True)
    expected = large.generate([prompt], n=5, temperature=1.5, seed=7, max_tokens=8, ignore_eos=True)
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]


def test_a_cancelled_sample_hands_its_prompt_over_without_a_free_slot(lfm2):
    engine = Engine(lfm2, num_blocks=100, deterministic=True, num_state_slots=1)
    engine.limits = StepLimits(16, 4)
    prompt = random_tokens(lfm2.config, 50)
    first, second = engine.submit(prompt, n=2, temperature=1.5, seed=7, max_tokens=4, ignore_eos=True)
    engine.step()
    engine.cancel(first)
    while engine.has_work:
        engine.step()
    expected = Engine(lfm2, num_blocks=100, deterministic=True).generate(
        [prompt], n=2, temperature=1.5, seed=7, max_tokens=4, ignore_eos=True
    )
    assert second.completion.token_ids == expected[1].token_ids


def test_a_request_without_a_slot_waits_and_the_reason_is_told(lfm2):
    engine = Engine(lfm2, num_blocks=100, num_state_slots=1)
    generations = [engine.submit(random_tokens(lfm2.config, 20, seed=seed), max_tokens=6)[0] for seed in range(2)]
    engine.step()
    assert engine.manager.last_refusal.reason == "slots"
    assert len(engine.scheduler.running) == 1
    while engine.has_work:
        engine.step()
    assert all(generation.error is None for generation in generations)


@for_every_model
def test_a_chat_goes_on_where_its_last_prompt_ended(model):
    engine = Engine(model, num_blocks=300, deterministic=True)
    watch = Watch(engine)
    said, cached = random_tokens(model.config, 100), []
    for turn in range(3):
        (completion,) = engine.generate([said], max_tokens=20, ignore_eos=True)
        cached.append(completion.num_cached_tokens)
        said = said + completion.token_ids + random_tokens(model.config, 11, seed=turn)
    assert cached == [0, 96, 128]
    fresh = Watch(Engine(model, num_blocks=300, deterministic=True, enable_prefix_caching=False))
    fresh.engine.generate([said], max_tokens=1)
    engine.generate([said], max_tokens=1)
    assert torch.equal(watch.logits[tuple(said)], fresh.logits[tuple(said)])


def test_a_copy_that_fails_loses_the_step_and_nothing_else(lfm2):
    engine = Engine(lfm2, num_blocks=100, deterministic=True)
    prompt = random_tokens(lfm2.config, 50)
    (expected,) = engine.generate([prompt], max_tokens=4)
    for moment in (1, 2):  # before the computation, and behind it
        engine.manager.reset_prefix_cache()
        copy, count = engine.runner.copy_states, 0

        def failing(copies, copy=copy, moment=moment):
            nonlocal count
            count += 1
            if count == moment:
                raise ModelError("no copy")
            copy(copies)

        engine.runner.copy_states = failing
        with pytest.raises(ModelError, match="no copy"):
            engine.generate([prompt], max_tokens=4)
        engine.runner.copy_states = copy
        engine.manager.check()
        assert engine.manager.num_free_blocks == 100
        assert engine.generate([prompt], max_tokens=4)[0].token_ids == expected.token_ids


@for_every_model
def test_explain_names_the_state(model):
    engine = Engine(model, num_blocks=100)
    prompt = random_tokens(model.config, 90)
    engine.generate([prompt], max_tokens=1)
    engine.generate([prompt[:40] + [1] * 40], max_tokens=1)
    explanation = str(engine.manager.inspect.explain(Sequence("asked", prompt[:60] + [2] * 20)))
    assert "recurrent state" in explanation


def test_keys_and_values_in_8_bits(lfm2):
    engine = Engine(lfm2, num_blocks=100, kv_cache_dtype="fp8_e4m3")
    prompt = random_tokens(lfm2.config, 50)
    first, second = (engine.generate([prompt], max_tokens=4)[0] for _ in range(2))
    assert second.num_cached_tokens == 48
    assert first.token_ids == second.token_ids


class TestMemory:
    """How many slots there are, and what they take of the memory."""

    def test_slots_are_a_part_of_the_memory(self, lfm2):
        plan = Engine(lfm2, kv_cache_memory=200_000, num_state_slots=5).plan
        state_bytes = 3 * 2 * 32 * 4
        assert (plan.state_bytes, plan.slot_bytes) == (state_bytes, 5 * state_bytes)
        assert plan.num_blocks == (200_000 - 5 * state_bytes) // plan.block_bytes

    def test_without_a_number_they_take_no_more_than_the_blocks(self, lfm2):
        engine = Engine(lfm2, num_blocks=2)
        assert engine.manager.states.num_slots == 2 * engine.plan.block_bytes // engine.plan.state_bytes
        assert Engine(lfm2, num_blocks=1000).manager.states.num_slots == 64

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_state_slots": 0}, "num_state_slots: expected .* got 0"),
            ({"kv_cache_memory": 5000, "num_state_slots": 9}, "at least .* bytes for states, got 5000"),
            ({"remember_next_token": True}, "remember_next_token: expected False for Lfm2ForCausalLM"),
            ({"tiers": ["valkey://127.0.0.1:1"]}, "tiers: expected host or disk for Lfm2ForCausalLM"),
            ({"attention": "triton"}, "expected a model without recurrent states"),
        ],
    )
    def test_what_cannot_be(self, lfm2, options, message):
        with pytest.raises((InvalidArgumentError, ModelError), match=message):
            Engine(lfm2, **options)

    def test_a_model_without_states_has_no_slots(self):
        with pytest.raises(InvalidArgumentError, match="num_state_slots: expected None for a model"):
            Engine(LoadedModel(ODD, random_weights(ODD)), num_blocks=9, num_state_slots=2)


def test_a_marked_place_is_where_the_second_prompt_begins(lfm2):
    """Such as the end of a system prompt. Without marks the second prompt finds no state where it parts."""
    shared = random_tokens(lfm2.config, 130, seed=1)
    first, second = (shared + random_tokens(lfm2.config, 40, seed=seed) for seed in (2, 3))
    for marks, num_cached in (((), 0), ((130,), 128), ([50, 130], 128)):
        engine = Engine(lfm2, num_blocks=300, block_size=16)
        (completion,) = engine.generate([first], max_tokens=2, marks=marks)
        assert completion.num_cached_tokens == 0
        assert engine.generate([second], max_tokens=2, marks=marks)[0].num_cached_tokens == num_cached
    for marks in ((0,), (171,), "12", (1.5,)):
        with pytest.raises(InvalidArgumentError, match="marks"):
            engine.submit(first, marks=marks)
    assert not engine.has_work


def test_marks_are_of_no_effect_on_other_models(tiny_folder):
    engine = Engine(LoadedModel.load(tiny_folder), num_blocks=64)
    plain, marked = (engine.generate(["hello"], max_tokens=2, marks=marks)[0] for marks in ((), (1,)))
    assert plain.token_ids == marked.token_ids
