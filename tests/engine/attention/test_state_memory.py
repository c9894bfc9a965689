"""Copies of states by the kernel, in its interpreter, and by torch: the same bytes."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.hybrid_models import load_tiny
from engine.small_models import random_tokens

from kvblocks.core.state_copy import StateCopy
from kvblocks.engine import Engine
from kvblocks.kernels import copy

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="with a GPU, tests/kernels/test_states.py runs the kernel there"
    ),
    # Triton 3.6's interpreter with numpy 2.3.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning:triton"),
]
NUM_SLOTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), "bamba")


def make_cache(model, seed, *, by_kernel):
    cache = Engine(model, num_blocks=40, num_state_slots=NUM_SLOTS).runner.kv_cache
    generator = torch.Generator().manual_seed(seed)
    for memory in (*cache.memory, cache.states.slots):
        memory.view(torch.uint8).random_(0, 256, generator=generator)
    return replace(cache, copies_by_kernel=by_kernel)


@pytest.mark.parametrize("seed", range(5))
def test_any_copies_leave_the_same_bytes(model, seed):
    source = random.Random(seed)
    caches = [make_cache(model, seed, by_kernel=by_kernel) for by_kernel in (False, True)]
    num_blocks = -(-caches[0].states.slots.shape[1] // caches[0].num_block_bytes)
    copies, free = [], list(range(40))
    for _ in range(8):
        kind, slot = source.choice(["clear", "fork", "restore", "restore", "save"]), source.randrange(NUM_SLOTS)
        if kind == "save":
            source.shuffle(free)
            ids, free = free[:num_blocks], free[num_blocks:]  # a step's saves share no block
        else:
            ids = source.sample(range(40), num_blocks) if kind == "restore" else ()
        if len(ids) == num_blocks or kind in ("clear", "fork"):
            copies.append(StateCopy(kind, 16, slot, source.randrange(NUM_SLOTS) if kind == "fork" else -1, tuple(ids)))
    for cache in caches:
        cache.states.copy(copies, cache)
    plain, launched = caches
    assert torch.equal(plain.states.slots, launched.states.slots)
    for one, other in zip(plain.parts, launched.parts, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_an_engine_restores_what_the_kernel_saved(model, monkeypatch):
    launches = []
    for name in ("save_states", "restore_states"):
        move = getattr(copy, name)
        monkeypatch.setattr(copy, name, lambda *given, name=name, move=move: launches.append(name) or move(*given))
    prompt = random_tokens(model.config, 70)
    engine = Engine(model, num_blocks=100)
    (expected,) = engine.generate([prompt], max_tokens=8, ignore_eos=True)
    launched = Engine(model, num_blocks=100)
    launched.runner.kv_cache = replace(launched.runner.kv_cache, copies_by_kernel=True)
    first, second = (launched.generate([prompt], max_tokens=8, ignore_eos=True)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == expected.token_ids
    assert second.num_cached_tokens == 64
    assert launches == ["save_states", "restore_states"]
