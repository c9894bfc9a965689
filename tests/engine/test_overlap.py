"""Steps that are launched before the tokens of the step before are read: the same tokens, cache and blocks as without.

On a CPU a step is computed when it is launched. So what is tested here is the order of calls, and that nothing of a
step is used before it is read: `Late` gives no results before `wait`.
"""

import random
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from engine.sampling.plain import uniform
from engine.small_models import EVEN, QWEN3, random_tokens, random_weights
from kvblocks.engine import Engine, LoadedModel, StepLimits, stepper
from kvblocks.engine.errors import BrokenLogitsError
from kvblocks.engine.sampling import batch_sampler
from kvblocks.engine.sampling.host_copy import HostCopy
from kvblocks.engine.sampling.random_numbers import sample_seed
from kvblocks.engine.text.tokenizer import StreamDecoder
from kvblocks.engine.undoing import written_tokens
from kvblocks.errors import InvalidArgumentError

TINY = replace(
    EVEN, hidden_size=64, intermediate_size=96, num_heads=2, vocab_size=96, num_layers=1, tie_word_embeddings=False
)
GREEDY = {"max_tokens": 8, "ignore_eos": True}
DRAWN = {**GREEDY, "temperature": 1.0}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return LoadedModel(TINY, random_weights(TINY))


class Late(HostCopy):
    """Results that are there only once somebody has waited for them, as on a device."""

    log: ClassVar = []

    def __init__(self, values):
        super().__init__(values)
        self._late, self._values = self._values, None
        self._number = sum(what == "launch" for what, _ in self.log)
        self.log.append(("launch", self._number))

    def wait(self):
        if self._values is None:
            self.log.append(("read", self._number))
        self._values = self._late


@pytest.fixture(autouse=True)
def log(monkeypatch):
    monkeypatch.setattr(batch_sampler, "HostCopy", Late)
    monkeypatch.setattr(Late, "log", [])
    return Late.log


def num_ahead(log):
    """How many steps were launched while the step before was unread."""
    launched = [place for place, (what, _) in enumerate(log) if what == "launch"]
    return sum(number > 0 and ("read", number - 1) not in log[:place] for number, place in enumerate(launched))


def make(model, overlap, **options):
    limits = options.pop("limits", StepLimits(48, 8))
    engine = Engine(model, deterministic=True, overlap=overlap, **{"num_blocks": 64, **options})
    engine.limits = limits
    return engine


def run(engine):
    while engine.has_work:
        engine.step()
        engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    assert engine.step() == []


def cached_tokens(engine, generations):
    """How many tokens of each answer the cache has."""
    children = [one.request.sequence.fork(("child", number)) for number, one in enumerate(generations)]
    return [engine.manager.get_computed_blocks(child).num_tokens for child in children]


# --- the same as without ---------------------------------------------------------------------------------------------


KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "n": 3},
    {"presence_penalty": 0.7},
    {"logprobs": 2},
    {"max_tokens": 0},
    {"max_tokens": 1},
    {"prompt_logprobs": 1},
    {"logit_bias": {3: 5.0}, "min_tokens": 4, "max_tokens": 9},
]


def play(model, seed, overlap, *, cancels=False, **options):
    """Any trace: requests of all kinds come at any time, and some are cancelled."""
    chooser = random.Random(seed)
    engine = make(model, overlap, **options)
    shared = random_tokens(TINY, 40, seed=1)
    generations, cancelled = [], set()
    for number in range(14):
        prompt = chooser.choice([[], shared, shared[:20]]) + random_tokens(
            TINY, chooser.randint(1, 30), seed=number + 9
        )
        stops = chooser.sample(range(TINY.vocab_size), 4)
        asked = {"max_tokens": chooser.randint(1, 24), "stop_token_ids": stops, "ignore_eos": True, "seed": number}
        asked |= chooser.choice([*KINDS, *([{}, {"temperature": 1.0}] * 5)])
        session = chooser.choice([None, "one", "two"]) if options.get("session_gate") else None
        made = engine.submit(prompt, **asked, session=session)
        generations += made
        num_steps, victim = chooser.randint(0, 9), chooser.choice(generations)
        for _ in range(num_steps):
            engine.step()
            engine.manager.check()
        if cancels and chooser.random() < 0.5:
            cancelled.add(victim)
            engine.cancel(victim)
    while engine.has_work:
        engine.step()
        engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    answers = [(one.request.output_token_ids, one.finish_reason) for one in generations if one not in cancelled]
    return engine, generations, answers


WAYS = {
    "room for all": {"num_blocks": 200},
    "preempted": {"num_blocks": 9},
    "few at once": {"num_blocks": 200, "limits": StepLimits(20, 3)},
    "no caching": {"num_blocks": 24, "enable_prefix_caching": False},
    "tiers": {"num_blocks": 12, "tiers": ["host:64KiB"]},
    "gate": {"num_blocks": 24, "session_gate": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_any_trace_gives_the_same_tokens_and_cache(model, way, seed, log):
    plain, expected, answers = play(model, seed, overlap=False, **WAYS[way])
    assert num_ahead(log) == 0
    engine, generations, got = play(model, seed, overlap=True, **WAYS[way])
    assert got == answers
    assert num_ahead(log) > 10 or way == "preempted"
    if way in ("room for all", "few at once"):
        assert cached_tokens(engine, generations) == cached_tokens(plain, expected)
        assert engine.manager.stats.num_cached_blocks == plain.manager.stats.num_cached_blocks
    for one in (plain, engine):
        one.close()


@pytest.mark.parametrize("seed", range(3))
def test_cancels_at_any_time_change_nobody_else(model, seed):
    for options in ({"num_blocks": 200}, {"num_blocks": 10}):
        engines = [play(model, seed, overlap, cancels=True, **options) for overlap in (False, True)]
        assert engines[0][2] == engines[1][2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3, 60))
def test_more_traces(model, seed, log):
    for way in WAYS:
        test_any_trace_gives_the_same_tokens_and_cache(model, way, seed, log)
        log.clear()
    test_cancels_at_any_time_change_nobody_else(model, seed)


def test_layers_with_windows(log):
    config = replace(QWEN3, vocab_size=96)
    model = LoadedModel(config, random_weights(config))
    prompts = [random_tokens(config, length, seed=length) for length in (5, 40, 70)]
    answers = []
    for overlap in (False, True):
        engine = make(model, overlap)
        answers.append([one.token_ids for one in engine.generate(prompts, max_tokens=40, ignore_eos=True)])
        engine.manager.check()
    assert answers[0] == answers[1] and num_ahead(log) > 20


# --- what overlaps ---------------------------------------------------------------------------------------------------


def test_a_step_is_launched_before_the_one_before_is_read(model, log):
    engine = make(model, overlap=True)
    generations = [engine.submit(random_tokens(TINY, 5, seed=seed), **GREEDY)[0] for seed in range(3)]
    assert engine.step() == []  # launched
    assert log == [("launch", 0)]
    assert engine.step() == generations  # the prompts' tokens
    assert log == [("launch", 0), ("launch", 1), ("read", 0)]
    run(engine)
    assert log[3:] == [one for number in range(2, 8) for one in (("launch", number), ("read", number - 1))] + [
        ("read", 7)
    ]
    assert engine.num_steps == 8


def count_ahead(model, log, options):
    log.clear()
    engine = make(model, overlap=True)
    engine.submit(random_tokens(TINY, 5), **{**GREEDY, **options})
    run(engine)
    return num_ahead(log)


@pytest.mark.parametrize("overlap", [False, True])
def test_random_numbers_go_by_the_seed_and_the_tokens_position(model, overlap):
    engine, given = Engine(model, num_blocks=64, overlap=overlap), []
    begin = engine.stepper.sampler.begin
    engine.stepper.sampler.begin = lambda *asked: given.extend(asked[3].tolist()) or begin(*asked)
    engine.submit([1, 2, 3], seed=7, **DRAWN)
    engine.submit([4] * 20, seed=9, n=2, **DRAWN)
    engine.submit([5], **GREEDY)
    while engine.has_work:
        engine.step()
    seeds = (7, 9, sample_seed(9, 1))
    assert sorted(given) == sorted([0.0] * 8 + [uniform(seed, position) for seed in seeds for position in range(8)])


def test_what_needs_the_last_token_is_not_launched_before_it_is_known(model, log):
    assert [
        count_ahead(model, log, options) for options in ({}, {"temperature": 1.0}, {"temperature": 1, "top_p": 0.9})
    ]
    for options in (
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"logprobs": 0},
        {"max_tokens": 0},
        {"max_tokens": 1},
    ):
        assert count_ahead(model, log, options) == 0, options
    assert count_ahead(model, log, {"n": 2}) == 6  # of 8 steps, not the prompt's
    assert count_ahead(model, log, {"prompt_logprobs": 1}) == 6
    assert count_ahead(model, log, {}) == 7


def test_draws_that_may_be_repeated_are_read_first(model, log, monkeypatch):
    monkeypatch.setattr(batch_sampler, "_CPU_LIKELY", 20)
    assert count_ahead(model, log, {"temperature": 1.0, "top_p": 0.9}) == 0


def test_new_requests_come_into_a_step_that_is_planned_ahead(model, log):
    engine = make(model, overlap=True)
    first, late = random_tokens(TINY, 5, seed=1), random_tokens(TINY, 9, seed=2)
    expected = make(model, overlap=False).generate([first, late], **GREEDY)
    log.clear()
    generations = engine.submit(first, **GREEDY)
    engine.step(), engine.step()
    generations += engine.submit(late, **GREEDY)
    run(engine)
    assert [one.completion.token_ids for one in generations] == [one.token_ids for one in expected]
    assert num_ahead(log) == sum(what == "read" for what, _ in log) - 1


def test_it_is_off_on_a_cpu_and_where_nothing_may_be_planned(model, log):
    prompt = random_tokens(TINY, 5)
    for options in ({"overlap": None}, {"overlap": False}, {"overlap": True, "remember_next_token": True}):
        make(model, **options).generate([prompt], **GREEDY)
    assert num_ahead(log) == 0
    with pytest.raises(InvalidArgumentError, match="overlap: expected"):
        Engine(model, num_blocks=8, overlap="yes")


# --- ends that are known one step late -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, {**DRAWN, "seed": 3}])
@pytest.mark.parametrize("length", [15, 16, 28])
def test_the_token_behind_a_stop_token_leaves_nothing(model, options, length):
    """With 28 tokens of the prompt the stop token is the last of a block, and with 15 or 16 not."""
    own, plain = {**options, "max_tokens": 20}, make(model, overlap=False)
    for seed in range(20):
        prompt = random_tokens(TINY, length, seed=seed)
        (free,) = plain.generate([prompt], **own)
        new = [token for place, token in enumerate(free.token_ids) if place > 3 and token not in free.token_ids[:place]]
        if new:
            break
    stop = new[0]
    results = []
    for overlap in (False, True):
        engine = make(model, overlap)
        (generation,) = engine.submit(prompt, **own, stop_token_ids=[stop])
        run(engine)
        done = generation.completion
        results.append(
            (done.token_ids, done.finish_reason, done.num_computed_tokens, cached_tokens(engine, [generation]))
        )
    assert results[0] == results[1] and results[0][1] == "stop"


def test_a_stop_string_ends_an_answer_in_flight(tiny_folder, log):
    text_model = LoadedModel.load(tiny_folder)
    free = Engine(text_model, num_blocks=64).generate(["hello"], max_tokens=20, ignore_eos=True)[0].text
    answers = []
    for overlap in (False, True):
        engine = make(text_model, overlap)
        generations = engine.submit("hello", max_tokens=20, ignore_eos=True, stop=[free[6:9]])
        generations += engine.submit("hello there", max_tokens=20, ignore_eos=True)
        run(engine)
        answers.append([(one.completion.text, one.completion.token_ids, one.finish_reason) for one in generations])
    assert answers[0] == answers[1] and answers[0][0][2] == "stop" and num_ahead(log) > 10


def test_a_cancelled_generation_gets_nothing_of_a_step_in_flight(model):
    engine = make(model, overlap=True)
    gone, stays = (engine.submit(random_tokens(TINY, 5, seed=seed), **GREEDY)[0] for seed in range(2))
    engine.step(), engine.step()
    num_pieces = len(gone.pieces)
    engine.cancel(gone)
    assert engine.step() == [stays]
    assert len(gone.pieces) == num_pieces and gone.finish_reason == "cancelled"
    engine.cancel(stays)
    assert not engine.has_work and engine.step() == []
    assert engine.manager.num_free_blocks == engine.manager.num_blocks


def test_a_timeout_in_flight(model):
    engine = make(model, overlap=True)
    (late,) = engine.submit(random_tokens(TINY, 5), **GREEDY, timeout_s=1e-9)
    engine.submit(random_tokens(TINY, 6), **GREEDY)
    assert late in engine.step()
    assert late.finish_reason == "timeout"
    run(engine)


def test_nobody_is_preempted_for_a_step_that_is_planned_ahead(model):
    """Two requests of two blocks each in a pool of three: whoever needs the fourth waits for the other."""
    prompts = [random_tokens(TINY, 14, seed=seed) for seed in range(2)]
    expected = make(model, overlap=False).generate(prompts, **GREEDY)
    engine = make(model, overlap=True, num_blocks=3)
    got = engine.generate(prompts, **GREEDY)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert engine.manager.num_free_blocks == 3


# --- steps that die --------------------------------------------------------------------------------------------------


def breaking(engine, number, error):
    """Let the engine's step of this number die."""
    works, calls = engine.runner.run, []

    def breaks(*given):
        calls.append(given)
        if len(calls) == number:
            raise error
        return works(*given)

    engine.runner.run = breaks


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_launch_that_dies_fails_its_own_requests_and_tells_the_tokens_before(model, number):
    prompts = [random_tokens(TINY, 20, seed=seed) for seed in range(2)]
    expected = make(model, overlap=False).generate(prompts, **GREEDY)
    engine = make(model, overlap=True)
    short, long = (
        engine.submit(prompt, **GREEDY | {"max_tokens": most})[0] for prompt, most in zip(prompts, (2, 8), strict=True)
    )
    breaking(engine, number, error := RuntimeError("the step died"))
    run(engine)
    assert long.error is error and long.finish_reason == "error"
    assert long.request.output_token_ids == expected[1].token_ids[: number - 1]
    assert (short.finish_reason == "length") == (number > 2)
    for one, other in zip(engine.generate(prompts, **GREEDY), expected, strict=True):
        assert one.token_ids == other.token_ids


@pytest.mark.parametrize("error", [RuntimeError("the step died"), KeyboardInterrupt()])
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_stream_goes_on_behind_a_step_that_died(model, error, number, where, monkeypatch):
    prompts = [random_tokens(TINY, 20, seed=seed) for seed in range(2)]
    expected = make(model, overlap=False).generate(prompts, **DRAWN, seed=1)
    engine = make(model, overlap=True)
    stream = engine.stream(prompts, **DRAWN, seed=1)
    if where == "launch":
        breaking(engine, number, error)
    else:
        works, calls = batch_sampler.BegunDraws.read, []

        def breaks(self):
            calls.append(self)
            if len(calls) == number:
                raise error
            return works(self)

        monkeypatch.setattr(batch_sampler.BegunDraws, "read", breaks)
    with pytest.raises(type(error)):
        list(stream)
    assert not engine.has_work
    engine.manager.check()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    got = engine.generate(prompts, **DRAWN, seed=1)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


@pytest.mark.parametrize("error", [RuntimeError("the step died"), KeyboardInterrupt()])
@pytest.mark.parametrize("number", [2, 3, 6])
def test_steps_that_are_undone_are_computed_again(model, error, number, monkeypatch):
    """The generations aren't dropped here, as they are by a stream that ends."""
    prompts = [random_tokens(TINY, 20, seed=seed) for seed in range(2)]
    expected = make(model, overlap=False).generate(prompts, **DRAWN, seed=1)
    engine = make(model, overlap=True)
    generations = [engine.submit(prompt, **DRAWN, seed=1)[0] for prompt in prompts]
    for generation in generations:
        generation.is_submitted = False
    works, calls = batch_sampler.BegunDraws.wait, []

    def breaks(self):
        calls.append(self)
        if len(calls) == number:
            raise error
        return works(self)

    monkeypatch.setattr(batch_sampler.BegunDraws, "wait", breaks)
    num_raised = 0
    while engine.has_work:
        try:
            engine.step()
        except type(error):
            num_raised += 1
        engine.manager.check()
    assert num_raised == 1
    assert [one.completion.token_ids for one in generations] == [one.token_ids for one in expected]
    assert engine.manager.num_free_blocks == engine.manager.num_blocks


def test_broken_logits_in_flight_fail_their_own_request(model):
    prompts = [random_tokens(TINY, 20, seed=seed) for seed in range(3)]
    expected = make(model, overlap=False).generate(prompts, **GREEDY)
    engine = make(model, overlap=True)
    generations = [engine.submit(prompt, **GREEDY)[0] for prompt in prompts]
    works, calls = engine.runner.run, []

    def breaks(*given):
        logits = works(*given).clone()
        calls.append(given)
        if len(calls) == 3:
            logits[1] = torch.nan
        return logits

    engine.runner.run = breaks
    run(engine)
    assert isinstance(generations[1].error, BrokenLogitsError)
    assert [generations[place].completion.token_ids for place in (0, 2)] == [
        expected[place].token_ids for place in (0, 2)
    ]


@pytest.mark.parametrize("length", [11, 12])
def test_a_token_that_ends_a_text_is_not_cached_if_the_step_that_was_to_write_it_died(tiny_folder, length):
    """The stop string ends with the fourth token, which fills a block if the prompt has 12 tokens."""
    text_model = LoadedModel.load(tiny_folder)
    for seed in range(40):
        prompt = random_tokens(text_model.config, length, seed=seed)
        free = [piece.text for piece in make(text_model, overlap=False).stream([prompt], **GREEDY)]
        if free[3]:
            break
    engine = make(text_model, overlap=True)
    (generation,) = engine.submit(prompt, **GREEDY, stop=["".join(free[:4])])
    breaking(engine, 5, RuntimeError("the step died"))
    run(engine)
    assert (generation.finish_reason, len(generation.completion.token_ids)) == ("stop", 4)
    assert cached_tokens(engine, [generation]) == [0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps_itself", [False, True])
def test_a_stream_whose_text_cannot_be_told_ends_alone(tiny_folder, overlap, steps_itself, monkeypatch):
    """It misses no piece without an error, even if others take the step, and the text could be told later."""

    class BadDecoder(StreamDecoder):
        num_fed = 0

        def feed(self, token_ids):
            self.num_fed += 1
            if self.num_fed == 4:
                raise UnicodeError("no text today")
            return super().feed(token_ids)

    text_model = LoadedModel.load(tiny_folder)
    prompts = [random_tokens(text_model.config, 20, seed=seed) for seed in range(2)]
    expected = make(text_model, overlap=False).generate(prompts, **GREEDY)
    engine = make(text_model, overlap)
    with monkeypatch.context() as patch:
        patch.setattr("kvblocks.engine.intake.StreamDecoder", BadDecoder)
        bad = engine.stream(prompts[:1], **GREEDY)
    good = engine.stream(prompts[1:], **GREEDY)
    pieces = [next(bad)], [next(good)]
    if not steps_itself:
        pieces[1].extend(good)
    with pytest.raises(UnicodeError, match="no text today"):
        pieces[0].extend(bad)
    pieces[1].extend(good)
    assert [piece.token_id for piece in pieces[0]] == expected[0].token_ids[:3]
    assert [piece.token_id for piece in pieces[1]] == expected[1].token_ids
    assert not engine.has_work


def test_an_interruption_before_a_step_is_scheduled_loses_nothing(model, monkeypatch):
    prompts = [random_tokens(TINY, 20, seed=seed) for seed in range(2)]
    expected = make(model, overlap=False).generate(prompts, **GREEDY)
    engine, calls = make(model, overlap=True), []
    generations = [engine.submit(prompt, **GREEDY)[0] for prompt in prompts]

    def breaks(scheduler):
        calls.append(scheduler)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return written_tokens(scheduler)

    monkeypatch.setattr(stepper, "written_tokens", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    run(engine)
    assert [one.completion.token_ids for one in generations] == [one.token_ids for one in expected]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_pause_of_the_caller_is_not_counted_as_computing(model, has_ended, monkeypatch):
    """The caller pauses for 100 s. A step that the device has ended meanwhile took nobody knows how long."""
    now, noted = [0.0], []
    monkeypatch.setattr("kvblocks.engine.stepper.time.perf_counter", lambda: now[0])
    looks = [False, has_ended]  # when it was launched, and when the next step begins
    monkeypatch.setattr(Late, "is_done", property(lambda copy: looks.pop(0) if looks else False), raising=False)
    engine = make(model, overlap=True)
    note_step = engine.scheduler.note_step

    def note(chunks, seconds):
        noted.append((sum(chunk.num_tokens for chunk in chunks), seconds))
        note_step(chunks, seconds)

    monkeypatch.setattr(engine.scheduler, "note_step", note)
    engine.submit(random_tokens(TINY, 20, seed=1), **GREEDY)
    engine.step()
    now[0] = 100.0
    engine.step()
    assert noted == ([] if has_ended else [(20, 100.0)])
    now[0] = 103.0
    engine.step()
    assert noted[-1] == (1, 3.0)


def test_a_step_that_ended_when_it_was_launched_took_that_long(model, monkeypatch):
    """As on a CPU, where the caller's pauses don't count either."""
    now, noted = [0.0], []
    monkeypatch.setattr("kvblocks.engine.stepper.time.perf_counter", lambda: now[0])
    engine = make(model, overlap=True)
    monkeypatch.setattr(engine.scheduler, "note_step", lambda chunks, seconds: noted.append(seconds))
    works = engine.runner.run

    def takes_two_seconds(*given):
        now[0] += 2.0
        return works(*given)

    engine.runner.run = takes_two_seconds
    engine.submit(random_tokens(TINY, 20, seed=1), **GREEDY)
    for _ in range(4):
        engine.step()
        now[0] += 100.0
    assert noted == [2.0] * 3


def test_a_part_of_a_prompt_takes_until_the_device_has_computed_it(model, monkeypatch):
    """It draws no token, but tiers and the gate go by how long it took."""
    now, noted = [0.0], []
    monkeypatch.setattr("kvblocks.engine.stepper.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Late, "is_done", property(lambda copy: copy._values is not None), raising=False)  # noqa: SLF001
    waits = Late.wait

    def takes_five_seconds(copy):
        now[0] += 0.0 if copy.is_done else 5.0
        waits(copy)

    monkeypatch.setattr(Late, "wait", takes_five_seconds)
    engine = make(model, overlap=True)
    monkeypatch.setattr(
        engine.scheduler, "note_step", lambda chunks, seconds: noted.append((chunks[0].num_tokens, seconds))
    )
    engine.submit(random_tokens(TINY, 60, seed=1), **GREEDY)
    while len(noted) < 2:
        engine.step()
    assert noted == [(48, 5.0), (12, 5.0)]


def test_an_engine_is_used_under_the_stream_under_which_it_was_made(model, monkeypatch):
    """Only this keeps the order of steps on a device. On a CPU there are no streams."""
    current = [7]
    monkeypatch.setattr("kvblocks.engine.run.runner.current_stream", lambda device: current[0])
    engine = make(model, overlap=True)
    (generation,) = engine.submit(random_tokens(TINY, 20, seed=1), **GREEDY)
    engine.step()
    current[0] = 8
    for call in (engine.step, engine.warm_up, lambda: engine.forget_salt(None)):
        with pytest.raises(InvalidArgumentError, match=r"CUDA stream: expected .* \(0x7\), got another one \(0x8\)"):
            call()
    current[0] = 7
    run(engine)
    assert generation.finish_reason == "length"
