"""Models with recurrent states over tiers: a state that has left the device comes back, with its bits.

A pool has room for one prompt, so that each other prompt takes what was cached. While a step runs, all that it may not
see is NaN (`Watch`).
"""

import pytest
import torch
from engine.hybrid_models import FIELDS, load_tiny
from engine.small_models import random_tokens
from engine.watched import Watch

from kvblocks.engine import Engine, StepLimits
from kvblocks.errors import InvalidArgumentError

QUICK = "lfm2"
NUM_TOKENS = 300  # so many that the disk takes a prompt at once
SAVED = 288  # a multiple of 16 with at most a 32nd of the prompt behind it

pytestmark = pytest.mark.usefixtures("loads_whatever_is_there")


@pytest.fixture(
    scope="module",
    params=[name if name == QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in FIELDS],
)
def model(request, tmp_path_factory):
    torch.set_num_threads(1)
    return load_tiny(tmp_path_factory.mktemp("model"), request.param)


def open_engine(model, tier, num_slots=4):
    """A pool for one prompt with its state, over a tier."""
    plan = Engine(model, num_blocks=10).plan
    num_blocks = 24 + 2 * plan.state_blocks
    engine = Engine(
        model, num_blocks=num_blocks, deterministic=True, tiers=[tier], num_state_slots=num_slots, num_history_blocks=0
    )
    engine.limits = StepLimits(48, 4)
    return engine


def ask(engine, prompt, tokens=4):
    (completion,) = engine.generate([prompt], max_tokens=tokens, ignore_eos=True)
    while engine.has_work:  # stores
        engine.step()
    return completion


@pytest.fixture(scope="module")
def prompts(model):
    return [random_tokens(model.config, NUM_TOKENS, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """The answers and logits of an engine that caches nothing."""
    watch = Watch(Engine(model, num_blocks=100, deterministic=True, enable_prefix_caching=False))
    return [ask(watch.engine, prompt).token_ids for prompt in prompts], watch.logits


def test_states_come_back_from_host_memory(model, prompts, expected):
    answers, logits = expected
    with open_engine(model, "host:8MiB") as engine:
        watch, loaded = Watch(engine), 0
        for _ in range(2):
            for prompt, answer in zip(prompts, answers, strict=True):
                completion = ask(engine, prompt)
                assert completion.token_ids == answer
                loaded += sum(completion.num_loaded_tokens.values())
        engine.manager.check()
        assert loaded >= 2 * SAVED
        assert engine.manager.states.stats.num_restored >= 2
        for tokens, row in logits.items():
            assert torch.equal(watch.logits[tokens], row)


def test_a_disk_is_found_again_after_a_restart_with_other_slots(model, prompts, expected, tmp_path):
    answers, logits = expected
    with open_engine(model, f"disk:{tmp_path}") as engine:
        for prompt in prompts:
            ask(engine, prompt)
    with open_engine(model, f"disk:{tmp_path}", num_slots=2) as engine:
        watch = Watch(engine)
        completions = [ask(engine, prompt) for prompt in prompts]
        assert [completion.token_ids for completion in completions] == answers
        assert sum([completion.num_loaded_tokens.get("disk", 0) for completion in completions]) >= 2 * SAVED
        for tokens, row in logits.items():
            assert torch.equal(watch.logits[tokens], row)


def test_a_shared_store_is_refused(model):
    with pytest.raises(InvalidArgumentError, match="expected host or disk for"):
        Engine(model, num_blocks=10, tiers=["valkey://127.0.0.1:1"])
