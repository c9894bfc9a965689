"""The engine in a caller's loop: prompts come and go, and a failure ends only its own generation."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.small_models import EVEN, random_tokens, random_weights
from kvblocks import InvalidTokensError, PoolExhaustedError
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling.sampler import Sampler
from kvblocks.engine.schedules import SCHEDULES
from kvblocks.engine.text.tokenizer import StreamDecoder
from kvblocks.errors import InvalidArgumentError

NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def model():
    config = replace(EVEN, tie_word_embeddings=False)
    return LoadedModel(config, random_weights(config))


@pytest.fixture(scope="module")
def prompts(model):
    """Forty shared tokens and three of its own each."""
    shared = random_tokens(model.config, 40, seed=1)
    return [shared + random_tokens(model.config, 3, seed=seed) for seed in range(2, 8)]


@pytest.fixture
def engine(model):
    return Engine(model, num_blocks=NUM_BLOCKS, deterministic=True)


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Token ids of each prompt's answer of 6 tokens."""
    torch.set_num_threads(1)
    engine = Engine(model, num_blocks=NUM_BLOCKS, deterministic=True)
    return [completion.token_ids for completion in engine.generate(prompts, max_tokens=6, ignore_eos=True)]


def submit(engine, prompt, **options):
    (generation,) = engine.submit(prompt, **{"max_tokens": 6, "ignore_eos": True, **options})
    return generation


def run(engine):
    """Step until there is no work. Returns all generations that ended, in order."""
    ended = []
    while engine.has_work:
        ended += [generation for generation in engine.step() if generation.finish_reason is not None]
        engine.manager.check()
    return ended


def check_empty(engine):
    assert not engine.has_work
    assert engine.step() == []
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    engine.manager.check()


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 6])
def test_submitted_prompts_get_what_generate_gives(model, prompts, expected, schedule, num_blocks):
    engine = Engine(model, num_blocks=num_blocks, deterministic=True, schedule=schedule)
    engine.limits = StepLimits(24, 4, 16, watermark=0.1)
    generations = []
    for prompt in prompts:  # they come while others run
        generations.append(submit(engine, prompt))
        engine.step()
    assert {generation.finish_reason for generation in [*run(engine), *generations]} == {"length"}
    assert [generation.completion.token_ids for generation in generations] == expected
    for generation, tokens in zip(generations, expected, strict=True):
        assert [piece.token_id for piece in generation.pieces] == tokens
        assert generation.pieces[-1].completion is generation.completion
        assert generation.error is None
    check_empty(engine)


def test_a_step_returns_who_got_a_piece_or_ended(engine, prompts):
    first, second = submit(engine, prompts[0], max_tokens=3), submit(engine, prompts[1], max_tokens=2)
    assert engine.step() == [first, second]
    assert [len(generation.pieces) for generation in (first, second)] == [1, 1]
    assert engine.step() == [first, second]
    assert (first.finish_reason, second.finish_reason) == (None, "length")
    engine.limits = StepLimits(16, 4)
    third = submit(engine, [*prompts[2][3:], 1])
    assert engine.step() == [first]  # the third one is in the middle of its prompt
    assert third.finish_reason is None
    engine.cancel(third)
    check_empty(engine)


def test_each_sample_is_a_generation(engine, prompts):
    options = {"n": 3, "temperature": 1.5, "seed": 4, "max_tokens": 6, "ignore_eos": True}
    generations = engine.submit(prompts[0], **options)
    assert [generation.sample_index for generation in generations] == [0, 1, 2]
    run(engine)
    again = engine.generate([prompts[0]], **options)
    assert [generation.completion.token_ids for generation in generations] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in again}) == 3


def test_pieces_say_which_of_the_callers_prompts_they_are_of(engine, prompts):
    generations = [
        generation
        for index, prompt in enumerate(prompts[:2])
        for generation in engine.submit(prompt, prompt_index=index, n=2, max_tokens=1)
    ]
    run(engine)
    pieces = [piece for generation in generations for piece in generation.pieces]
    assert [(piece.prompt_index, piece.sample_index) for piece in pieces] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_answer_may_be_as_long_as_there_is_room(model, prompts):
    engine = Engine(model, num_blocks=4)  # 64 slots; the last token needs none
    assert len(engine.generate(prompts[:1], max_tokens=None, ignore_eos=True)[0].token_ids) == 65 - len(prompts[0])
    with pytest.raises(InvalidArgumentError, match=r"got 66 \(a prompt of 65 and max_tokens 1\)"):
        engine.generate([[1] * 65], max_tokens=None)


def test_whether_a_prompt_fits_is_checked_once(engine, prompts, monkeypatch):
    checked, check_fits = [], engine.scheduler.check_fits
    monkeypatch.setattr(engine.scheduler, "check_fits", lambda request: [checked.append(request), check_fits(request)])
    generation = submit(engine, prompts[0])
    assert checked == [generation.request]
    engine.generate(prompts[1:3], max_tokens=1)
    assert len(checked) == 3


def test_salts_share_nothing(engine, prompts):
    salts = [None, "a", "b", "a", None]
    generations = []
    for salt in salts:
        generations.append(submit(engine, prompts[0], salt=salt))
        run(engine)
    assert [generation.completion.num_cached_tokens for generation in generations] == [0, 0, 0, 32, 32]
    assert len({tuple(generation.completion.token_ids) for generation in generations}) == 1
    (completion,) = engine.generate([prompts[0]], salt="c")
    assert completion.num_cached_tokens == 0
    (completion,) = engine.generate([prompts[0]], salt="b")
    assert completion.num_cached_tokens == 32


def test_top_k_of_one_is_greedy(engine, prompts, expected):
    generation = submit(engine, prompts[0], temperature=2.0, top_k=1)
    run(engine)
    assert generation.completion.token_ids == expected[0]
    (completion,) = engine.generate([prompts[0]], temperature=2.0, top_p=1e-9, max_tokens=6, ignore_eos=True)
    assert completion.token_ids == expected[0]


# --- stop strings ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_model(tiny_folder):
    return LoadedModel.load(tiny_folder)


@pytest.fixture(scope="module")
def whole(text_model):
    """A sampled answer of 30 tokens, without stop strings."""
    engine = Engine(text_model, num_blocks=NUM_BLOCKS)
    (completion,) = engine.generate(["hello"], max_tokens=30, ignore_eos=True, temperature=1.0, seed=1)
    return completion


def answer(engine, **options):
    (generation,) = engine.submit("hello", max_tokens=30, ignore_eos=True, temperature=1.0, seed=1, **options)
    run(engine)
    return generation


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("index", [0, 5, 9])
def test_the_text_ends_before_a_stop_string(text_model, whole, index, length):
    engine = Engine(text_model, num_blocks=NUM_BLOCKS)
    stop = whole.text[index : index + length]
    generation = answer(engine, stop=["never there", stop])
    text = whole.text[: whole.text.index(stop)]
    completion = generation.completion
    assert (completion.text, completion.finish_reason, generation.finish_reason) == (text, "stop", "stop")
    assert generation.text == "".join(piece.text for piece in generation.pieces) == text
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) == len(generation.pieces) < 30
    check_empty(engine)
    (completion,) = engine.generate(["hello"], max_tokens=30, ignore_eos=True, temperature=1.0, seed=1, stop=stop)
    assert (completion.text, completion.finish_reason) == (text, "stop")


def test_a_stop_string_that_does_not_come_changes_nothing(text_model, whole):
    generation = answer(Engine(text_model, num_blocks=NUM_BLOCKS), stop=[whole.text[-1] * 50])
    assert generation.completion.text == whole.text
    assert (generation.completion.token_ids, generation.finish_reason) == (whole.token_ids, "length")


def test_samples_stop_each_where_its_own_text_does(text_model):
    options = {"n": 4, "max_tokens": 12, "ignore_eos": True, "temperature": 1.5, "seed": 3}
    engine = Engine(text_model, num_blocks=NUM_BLOCKS)
    free = engine.generate(["hello"], **options)
    stop = free[2].text[1]
    stopped = engine.generate(["hello"], stop=stop, **options)
    assert [c.text for c in stopped] == [c.text.split(stop)[0] for c in free]
    assert [c.finish_reason for c in stopped] == ["stop" if stop in c.text else "length" for c in free]
    check_empty(engine)


# --- cancelling and timeouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_cancelled_generation_frees_its_blocks_at_once(engine, prompts, expected, num_steps):
    engine.limits = StepLimits(48, 8)  # the first step computes the first prompt and some of the second
    dropped, kept = submit(engine, prompts[0]), submit(engine, prompts[1])
    for _ in range(num_steps):
        engine.step()
    num_free = engine.manager.num_free_blocks
    engine.cancel(dropped)
    assert dropped.finish_reason == "cancelled"
    assert engine.manager.num_free_blocks - num_free == (0 if num_steps == 0 else 1)  # two are the other one's too
    assert dropped.completion is None
    assert run(engine) == [kept]
    assert kept.completion.token_ids == expected[1]
    engine.cancel(kept)  # it has ended
    assert kept.finish_reason == "length"
    check_empty(engine)


def test_all_samples_can_be_cancelled(engine, prompts):
    for num_steps in (0, 1, 2):
        generations = engine.submit(prompts[0], n=3, temperature=1.0)
        for _ in range(num_steps):
            engine.step()
        for generation in generations:
            engine.cancel(generation)
        check_empty(engine)


def test_a_generation_times_out_running_or_waiting(engine, prompts, expected, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvblocks.engine.stepper.time.perf_counter", lambda: now[0])
    engine.limits = StepLimits(64, 2)
    runs, stays = submit(engine, prompts[0], timeout_s=2.0), submit(engine, prompts[1], timeout_s=60)
    waits = submit(engine, prompts[2], timeout_s=1.5)
    engine.step()
    now[0] = 101.4
    assert engine.step() == [runs, stays]
    now[0] = 102.0
    assert engine.step() == [runs, waits, stays]
    assert [generation.finish_reason for generation in (runs, waits, stays)] == ["timeout", "timeout", None]
    assert (len(runs.pieces), len(waits.pieces), runs.completion) == (2, 0, None)
    run(engine)
    assert stays.completion.token_ids == expected[1]
    late = submit(engine, prompts[0], timeout_s=1)
    now[0] = 110.0
    assert engine.step() == [late]
    check_empty(engine)


# --- failures --------------------------------------------------------------------------------------------------------


def break_next_run(engine, error):
    """The next forward pass fills the whole KV cache with NaN where this step writes, and dies."""
    runner, works = engine.runner, engine.runner.run

    def die(chunks):
        runner.run = works
        for chunk in chunks:
            sequence = chunk.request.sequence
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                if position >= sequence.num_readonly_tokens:
                    block, offset = sequence.block_ids[position // 16], position % 16
                    for tensor in (*runner.kv_cache.keys, *runner.kv_cache.values):
                        tensor[block, offset] = torch.nan
        raise error

    runner.run = die


def break_first_row(run, chunks):
    logits = run(chunks).clone()
    logits[:1] = torch.nan
    return logits


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_step_that_dies_fails_its_generations_and_no_others(engine, prompts, expected, num_steps):
    engine.limits = StepLimits(48, 2)
    failing = [submit(engine, prompt) for prompt in prompts[:2]]
    waiting = [submit(engine, prompt) for prompt in prompts[2:]]
    for _ in range(num_steps):
        engine.step()
    error = RuntimeError("out of memory")
    break_next_run(engine, error)
    assert engine.step() == failing
    assert [generation.finish_reason for generation in failing] == ["error"] * 2
    assert all(generation.error is error and generation.completion is None for generation in failing)
    assert all(len(generation.pieces) == len(generation.request.output_token_ids) for generation in failing)
    engine.manager.check()
    assert engine.manager.num_free_blocks == NUM_BLOCKS
    run(engine)
    assert [generation.completion.token_ids for generation in waiting] == expected[2:]
    again = [submit(engine, prompt) for prompt in prompts[:2]]
    run(engine)
    assert [generation.completion.token_ids for generation in again] == expected[:2]
    check_empty(engine)


def test_samples_fail_together_before_their_prompt_is_computed(engine, prompts):
    engine.limits = StepLimits(16, 8)
    failing = engine.submit(prompts[0], n=3, temperature=1.0)
    engine.step()
    break_next_run(engine, RuntimeError("out of memory"))
    assert engine.step() == failing
    assert {generation.finish_reason for generation in failing} == {"error"}
    check_empty(engine)


def test_only_who_has_broken_logits_fails_and_the_cache_is_not_trusted(engine, prompts, expected):
    generations = [submit(engine, prompt) for prompt in prompts[:3]]
    engine.step()
    works = engine.runner.run

    def break_second(chunks):
        logits = works(chunks).clone()
        logits[1, 5] = torch.nan
        return logits

    engine.runner.run = break_second
    assert engine.step() == generations
    engine.runner.run = works
    assert [generation.finish_reason for generation in generations] == [None, "error", None]
    assert isinstance(generations[1].error, BrokenLogitsError)
    assert engine.manager.stats.num_cached_blocks == 0
    run(engine)
    assert [generations[index].completion.token_ids for index in (0, 2)] == [expected[0], expected[2]]
    check_empty(engine)


class BadSampler(Sampler):
    def next_draw(self, sequence, position):
        raise ZeroDivisionError("no token today")


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_only_who_has_a_bad_sampler_fails(engine, prompts, expected, bad):
    generations = [submit(engine, prompt) for prompt in prompts[:3]]
    engine.step()
    generations[bad].sampler = BadSampler()
    assert engine.step() == generations
    assert isinstance(generations[bad].error, ZeroDivisionError)
    assert generations[bad].finish_reason == "error"
    run(engine)
    for index in {0, 1, 2} - {bad}:
        assert generations[index].completion.token_ids == expected[index]
    assert engine.manager.stats.num_cached_blocks > 0  # what it computed is right
    check_empty(engine)


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_only_whose_text_cannot_be_told_fails(text_model, max_tokens, monkeypatch):
    class BadDecoder(StreamDecoder):
        def feed(self, token_ids):
            raise UnicodeError("no text today")

    engine = Engine(text_model, num_blocks=NUM_BLOCKS)
    (good,) = engine.submit("hello", max_tokens=max_tokens, ignore_eos=True)
    monkeypatch.setattr("kvblocks.engine.intake.StreamDecoder", BadDecoder)
    (bad,) = engine.submit("hello", max_tokens=max_tokens, ignore_eos=True)
    run(engine)
    assert (bad.finish_reason, type(bad.error), good.finish_reason) == ("error", UnicodeError, "length")
    check_empty(engine)
    stream = engine.stream(["hello"], max_tokens=max_tokens)
    with pytest.raises(UnicodeError, match="no text today"):
        next(stream)
    check_empty(engine)


@pytest.mark.parametrize("ending", ["finishes", "is cancelled", "fails", "times out"])
def test_the_engine_forgets_who_has_ended(engine, prompts, ending):
    generation = submit(engine, prompts[0], timeout_s=1e-9 if ending == "times out" else None)
    reference = weakref.ref(generation)
    if ending == "is cancelled":
        engine.cancel(generation)
    elif ending == "fails":
        generation.sampler = BadSampler()
    run(engine)
    assert generation.finish_reason is not None
    del generation
    gc.collect()
    assert reference() is None


def test_pins_that_leave_no_room_fail_who_is_next_and_not_the_others(model, prompts):
    engine = Engine(model, num_blocks=6)
    engine.generate([prompts[0][:32]], max_tokens=1)
    large, small = submit(engine, [*range(70)]), submit(engine, [7] * 5)
    engine.manager.pins.pin(prompts[0][:32], priority=100)
    assert engine.step() == [large]
    assert (large.finish_reason, type(large.error).__mro__[1]) == ("error", PoolExhaustedError)
    assert run(engine) == [small]
    assert small.finish_reason == "length"
    with pytest.raises(PoolExhaustedError, match="prompt: expected at most 65 tokens while pins keep 2"):
        submit(engine, [*range(70)])


def test_who_interrupts_is_heard_and_nothing_is_lost(engine, prompts, expected):
    generation = submit(engine, prompts[0])
    engine.step()
    break_next_run(engine, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert generation.finish_reason is None
    run(engine)
    assert generation.completion.token_ids == expected[0]


def test_a_stream_still_raises_and_only_the_submitted_fail(engine, prompts, expected):
    stream = engine.stream([prompts[0]], max_tokens=6, ignore_eos=True)
    tokens = [next(stream).token_id]
    submitted = submit(engine, prompts[1])
    break_next_run(engine, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert submitted.finish_reason == "error"
    tokens += [piece.token_id for piece in stream]
    assert tokens == expected[0]
    check_empty(engine)


def test_a_streams_own_failure_leaves_the_submitted_alone(engine, prompts, expected):
    stream = engine.stream([prompts[0]], max_tokens=6, ignore_eos=True)
    next(stream)
    submitted = submit(engine, prompts[1])
    works = engine.runner.run
    engine.runner.run = partial(break_first_row, works)
    with pytest.raises(ModelError, match="got NaN"):
        next(stream)
    engine.runner.run = works
    run(engine)
    assert submitted.completion.token_ids == expected[1]
    check_empty(engine)


def test_an_error_keeps_no_tensors_alive(engine, prompts):
    tensors = []

    def die(chunks):
        large = torch.zeros(3)
        tensors.append(weakref.ref(large))
        raise RuntimeError("out of memory")

    engine.runner.run = die
    generation = submit(engine, prompts[0])
    engine.step()
    gc.collect()
    assert generation.error.__traceback__ is not None
    assert tensors[0]() is None


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, InvalidTokensError, "prompt: token ids: expected at least one, got none"),
        ([9999], {}, InvalidTokensError, r"prompt: expected token ids below \d+"),
        ("text", {}, ModelError, "prompt: expected token ids, .* no tokenizer.json; got text"),
        ([1], {"stop": "a"}, ModelError, "stop: expected none, .* no tokenizer.json; got strings"),
        ([1], {"n": 0}, InvalidArgumentError, "n: expected an int of at least 1, got 0"),
        ([1], {"max_tokens": -1}, InvalidArgumentError, "max_tokens: expected an int of at least 0, got -1"),
        ([1], {"max_tokens": 10**6}, InvalidArgumentError, "prompt: expected at most .* the model's context"),
        ([1], {"top_p": 0.0}, InvalidArgumentError, "top_p: "),
        ([1], {"salt": ""}, InvalidArgumentError, "salt: expected a non-empty str or None, got ''"),
        ([1], {"timeout_s": 0}, InvalidArgumentError, "timeout_s: expected None or a number above 0, got 0"),
        ([1], {"timeout_s": "1"}, InvalidArgumentError, "timeout_s: .* got '1'"),
        ([1], {"temprature": 1}, TypeError, "temprature"),
    ],
)
def test_bad_input_is_refused_and_queues_nothing(engine, prompt, options, error, message):
    with pytest.raises(error, match=message):
        engine.submit(prompt, **options)
    check_empty(engine)


def test_an_unknown_schedule_is_refused(model):
    with pytest.raises(InvalidArgumentError, match="schedule: expected one of fcfs, longest-prefix, grouped, got 'x'"):
        Engine(model, schedule="x")


# --- any loop --------------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "step", "step", "cancel", "die", "nan", "sampler"]),
        st.integers(0, 5),
        st.sampled_from([1, 1, 2]),
    ),
    min_size=4,
    max_size=24,
)


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(actions=ACTIONS, schedule=st.sampled_from(list(SCHEDULES)), num_blocks=st.sampled_from([6, 12]))
def test_whatever_happens_every_generation_ends_and_every_answer_is_right(
    model, prompts, expected, actions, schedule, num_blocks
):
    engine = Engine(model, num_blocks=num_blocks, deterministic=True, schedule=schedule)
    engine.limits = StepLimits(40, 4, 24, watermark=0.2)
    works, generations, ended = engine.runner.run, [], []
    for action, which, num_samples in actions:
        if action == "submit":
            submitted = engine.submit(prompts[which], n=num_samples, max_tokens=6, ignore_eos=True)
            generations += [(generation, which) for generation in submitted]
            continue
        if action == "cancel" and generations:
            engine.cancel(generations[which % len(generations)][0])
        elif action == "sampler" and generations:
            generations[which % len(generations)][0].sampler = BadSampler()
        elif action == "nan":
            engine.runner.run = partial(break_first_row, works)
        elif action == "die":
            break_next_run(engine, RuntimeError("out of memory"))
        ended += [generation for generation in engine.step() if generation.finish_reason is not None]
        engine.runner.run = works
        engine.manager.check()
    ended += run(engine)
    check_empty(engine)
    assert len(ended) == len(set(ended))
    for generation, which in generations:
        assert (generation in ended) == (generation.finish_reason != "cancelled")
        tokens = [piece.token_id for piece in generation.pieces]
        assert tokens == expected[which][: len(tokens)]
        assert (tokens == expected[which]) == (generation.finish_reason == "length")
        assert (generation.error is not None) == (generation.finish_reason == "error")
