"""An engine with a session gate: the same answers, and when it has anything to do."""

import time
from dataclasses import replace

import pytest

from engine.small_models import EVEN, random_tokens, random_weights
from kvblocks.engine import Engine, LoadedModel
from kvblocks.engine.schedule.entrance import Entrance
from kvblocks.errors import InvalidArgumentError


@pytest.fixture(scope="module")
def model():
    config = replace(EVEN, tie_word_embeddings=False)
    return LoadedModel(config, random_weights(config))


def test_sessions_that_take_turns_get_the_same_answers(model):
    prompts = [random_tokens(model.config, 60, seed=seed) for seed in range(5)]
    plain = Engine(model, num_blocks=12).generate(prompts, max_tokens=4, ignore_eos=True)
    engine = Engine(model, num_blocks=12, session_gate=True)  # room for two of them
    assert engine.scheduler.entrance.gate.num_tokens == 192
    for turn in range(2):
        streams = [
            engine.stream([prompt], max_tokens=4, ignore_eos=True, session=f"agent {number}")
            for number, prompt in enumerate(prompts)
        ]
        for number, stream in enumerate(streams):  # the first one to ask steps for all
            *_, last = stream
            assert last.completion.token_ids == plain[number].token_ids, turn
    stats = engine.scheduler.entrance.gate.stats
    assert stats.num_entries >= 5
    assert stats.num_waiting_requests == 0
    assert not engine.has_work


def test_submitted_sessions_are_admitted_in_time(model):
    engine = Engine(model, num_blocks=12, session_gate=True)
    prompts = [random_tokens(model.config, 100, seed=seed) for seed in range(4)]
    generations = [
        generation
        for number, prompt in enumerate(prompts)
        for generation in engine.submit(prompt, max_tokens=3, session=number)
    ]
    while not all(generation.finish_reason for generation in generations):
        if engine.has_work:
            engine.step()
        else:
            assert engine.wake_at is not None, "nothing would ever wake it"
            time.sleep(max(0.0, engine.wake_at - time.monotonic()))
    assert engine.wake_at is None
    assert engine.scheduler.entrance.view.stats.num_entries == 4


@pytest.mark.parametrize(("seconds", "has_work"), [(3600.0, False), (-1.0, True), (None, False)])
def test_an_engine_whose_prompts_all_wait_has_work_when_the_gate_says(model, monkeypatch, seconds, has_work):
    engine = Engine(model, num_blocks=12, session_gate=True)
    wake_at = None if seconds is None else time.monotonic() + seconds
    monkeypatch.setattr(Entrance, "wake_at", wake_at)
    assert engine.has_work == has_work


def test_the_gate_needs_prefix_caching(model):
    for wrong in ({"session_gate": "yes"}, {"session_gate": True, "enable_prefix_caching": False}):
        with pytest.raises(InvalidArgumentError, match="session_gate: expected"):
            Engine(model, num_blocks=12, **wrong)
