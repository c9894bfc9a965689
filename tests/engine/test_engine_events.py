"""`Engine(on_events=...)`: what is told after each step is what is cached then, on the device and in tiers."""

from dataclasses import replace

import pytest
import torch
from model.told import Told, cached

from engine.small_models import EVEN, random_tokens, random_weights
from kvblocks import InvalidArgumentError
from kvblocks.engine import Engine, LoadedModel, TierOptions

CONFIG = replace(EVEN, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return LoadedModel(CONFIG, random_weights(CONFIG))


def settle(engine):
    while engine.has_work:
        engine.step()


def test_what_is_told_is_what_is_cached_after_each_step(model):
    told = Told()
    with Engine(model, num_blocks=24, tiers=["host:4MiB"], on_events=told.replay) as engine:
        for number in range(6):
            prompt = random_tokens(CONFIG, 90, seed=number % 4)
            engine.submit(prompt, max_tokens=20, ignore_eos=True, salt="ann" if number % 2 else None)
            while engine.has_work:
                engine.step()
                assert told.blocks == cached(engine.manager)
        assert {medium for medium, _, _ in told.blocks} == {"GPU", "CPU"}
        assert engine.forget_salt("ann") > 0
        assert told.blocks == cached(engine.manager)
        engine.manager.reset_prefix_cache()
        engine.step()
        assert told.blocks == {}
    assert told.num_hits == 0  # nobody asked for those


def test_a_step_that_dies_is_told_to_its_end(model, monkeypatch):
    told = Told()
    engine = Engine(model, num_blocks=24, on_events=told.replay)
    engine.generate([random_tokens(CONFIG, 60, seed=1)], max_tokens=2)
    run = engine.runner.run

    def fail(chunks):
        monkeypatch.setattr(engine.runner, "run", run)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "run", fail)
    (generation,) = engine.submit(random_tokens(CONFIG, 60, seed=2), max_tokens=2)
    settle(engine)
    assert generation.finish_reason == "error"
    assert told.blocks == cached(engine.manager)
    assert len(told.blocks) == 3


def test_what_a_disk_has_is_told_at_the_start(model, tmp_path):
    prompt = random_tokens(CONFIG, 300, seed=3)
    with Engine(model, num_blocks=64, tiers=[TierOptions(f"disk:{tmp_path / 'disk'}", "16MiB")]) as engine:
        engine.generate([prompt], max_tokens=1)
    told = Told()
    with Engine(
        model, num_blocks=64, tiers=[TierOptions(f"disk:{tmp_path / 'disk'}", "16MiB")], on_events=told.replay
    ) as engine:
        assert told.blocks == cached(engine.manager)
        assert len(told.blocks) == 18
        assert {medium for medium, _, _ in told.blocks} == {"STORAGE"}


def test_only_a_callable_is_taken(model):
    with pytest.raises(InvalidArgumentError, match=r"on_events: expected a callable or None, got 7"):
        Engine(model, num_blocks=8, on_events=7)
