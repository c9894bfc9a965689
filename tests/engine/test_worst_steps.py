"""What steps take beside the KV cache is measured before a GPU's memory is shared out. Here stand-ins say what is free.

The steps are real ones, on the CPU; what they "take" is counted by the stand-in.
"""

from dataclasses import replace

import pytest
import torch

from engine.hybrid_models import load_tiny
from engine.small_models import EVEN, GEMMA3, random_weights
from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine import worst_steps as module
from kvblocks.engine.run import cache_size, memory
from kvblocks.engine.run.backends import Backend
from kvblocks.engine.run.cache_size import DEFAULT_GPU_SHARE, size_cache
from kvblocks.engine.run.memory import measure_taken
from kvblocks.engine.run.runner import ModelRunner
from kvblocks.engine.worst_steps import WorstSteps
from kvblocks.errors import InvalidArgumentError

GPU = torch.device("cuda")
CPU = torch.device("cpu")
CONFIG = replace(EVEN, vocab_size=64, num_layers=1)
LIMITS = StepLimits(max_num_batched_tokens=70, max_num_seqs=9)
FREE = 2**30


@pytest.fixture(scope="module")
def model():
    return LoadedModel(CONFIG, random_weights(CONFIG))


class Memory:
    """A stand-in for a GPU's memory: a cache takes its bytes, and a step 1000 a token and 5000 a row of logits.

    As torch's allocator does, it keeps what the largest step took until it is told to give that back.
    """

    def __init__(self, monkeypatch):
        self.steps = []
        self._kept = self._caches = 0
        run, make = ModelRunner.run, ModelRunner.__init__
        monkeypatch.setattr(memory, "free_memory", self.free)
        monkeypatch.setattr(memory, "_give_back", self.give_back)
        monkeypatch.setattr(cache_size, "is_shared_with_steps", lambda device: True)

        def run_counted(runner, chunks, *args):
            logits = run(runner, chunks, *args)
            self.steps.append([chunk.num_tokens for chunk in chunks])
            taken = 1000 * sum(self.steps[-1]) + 5000 * len(logits)
            self._kept = max(self._kept, taken)
            return logits

        def make_counted(runner, *args, **options):
            make(runner, *args, **options)
            self._caches += runner.kv_cache.num_bytes

        monkeypatch.setattr(ModelRunner, "run", run_counted)
        monkeypatch.setattr(ModelRunner, "__init__", make_counted)

    def free(self, device):
        return FREE - self._kept - self._caches

    def give_back(self, device):
        self._kept = self._caches = 0


@pytest.fixture
def gpu_memory(monkeypatch):
    return Memory(monkeypatch)


WORST = 70 * 1000 + 9 * 5000


def test_the_largest_steps_are_computed_and_what_they_take_is_counted(model, gpu_memory):
    assert WorstSteps(model, Backend(), 16, LIMITS).measure() == WORST
    first, second, long, last = gpu_memory.steps[:4]
    assert (sum(first), len(first)) == (70, 9)
    assert second == [1] * 9
    assert (long, last) == ([70], [1])
    assert gpu_memory.steps[4::2] == [[1] * 8, [1] * 4, [1] * 2, [1]]


def test_a_share_is_for_cache_and_steps(model, gpu_memory):
    engine = Engine(model, kv_cache_memory=0.25, limits=LIMITS)
    assert engine.plan.num_bytes == FREE // 4 - WORST
    assert engine.plan.num_blocks == engine.plan.num_bytes // engine.plan.block_bytes == engine.manager.num_blocks
    assert engine.limits == LIMITS


def test_a_number_of_blocks_or_bytes_is_what_was_asked_for(model, gpu_memory):
    assert Engine(model, num_blocks=7, limits=LIMITS).manager.num_blocks == 7
    assert Engine(model, kv_cache_memory="1MiB", limits=LIMITS).plan.num_bytes == 2**20
    assert gpu_memory.steps == []


def test_on_a_cpu_nothing_is_measured(model, monkeypatch):
    def refuse(_steps):
        raise AssertionError

    monkeypatch.setattr(WorstSteps, "measure", refuse)
    monkeypatch.setattr(memory, "free_memory", lambda device: FREE)
    engine = Engine(model, kv_cache_memory=0.25)
    assert engine.plan.num_bytes == FREE // 4
    assert engine.limits == StepLimits()


def test_a_gpus_default_is_a_share_of_what_is_free(model, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: FREE if device == GPU else 0)
    layout = Backend().plan_cache(model, 16)
    plan = size_cache(layout, None, None, None, GPU, lambda: 1_000_000)
    assert plan.num_bytes == int(DEFAULT_GPU_SHARE * FREE) - 1_000_000
    assert size_cache(layout, None, 0.5, None, GPU).num_bytes == FREE // 2  # for who knows what steps take


def test_a_share_that_steps_need_is_refused(model, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: FREE)
    layout = Backend().plan_cache(model, 16)
    with pytest.raises(
        InvalidArgumentError,
        match=r"kv_cache_memory: expected a share of more than 512\.0 MiB .* got 0\.5, which is 512",
    ):
        size_cache(layout, None, 0.5, None, GPU, lambda: FREE // 2)


def test_steps_that_do_not_fit_are_named(model, monkeypatch):
    def fail(self, chunks, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "run", fail)
    with pytest.raises(
        InvalidArgumentError, match=r"limits: .* max_num_batched_tokens=70 and max_num_seqs=9: CUDA out"
    ):
        WorstSteps(model, Backend(), 16, LIMITS).measure()


def test_the_peak_counts_even_if_the_allocator_gives_memory_back(monkeypatch):
    """Where memory is short, torch gives back what it kept. Then its own count is the larger number."""
    free, reserved = iter([1000, 900]), iter([50, 450])
    monkeypatch.setattr(memory, "free_memory", lambda device: next(free))
    monkeypatch.setattr(memory, "_most_reserved", lambda device: next(reserved))
    assert measure_taken(lambda: None, CPU) == 400
    free, reserved = iter([1000, 1100]), iter([0, 0])  # another process ended meanwhile
    assert measure_taken(lambda: None, CPU) == 0


def test_contexts_are_never_longer_than_the_model_takes(model):
    limits = StepLimits(max_num_batched_tokens=8192, max_num_seqs=3)
    lengths = [length for found, _ in WorstSteps(model, Backend(), 16, limits).batches() for length in found]
    assert max(lengths) == CONFIG.max_position_embeddings - module._GENERATED  # noqa: SLF001 - the number tested


def test_models_of_other_kinds(tmp_path, monkeypatch):
    """Groups with windows, and states: a small cache has room for the steps."""
    monkeypatch.setattr(memory, "free_memory", lambda device: FREE)
    models = [LoadedModel(GEMMA3, random_weights(GEMMA3)), load_tiny(tmp_path, "lfm2")]
    for found in models:
        ran = []
        compute = ModelRunner.run
        monkeypatch.setattr(ModelRunner, "run", lambda *args, own=ran, run=compute: own.append(args[1]) or run(*args))
        assert WorstSteps(found, Backend(), 16, LIMITS).measure() == 0
        monkeypatch.setattr(ModelRunner, "run", compute)
        assert sum(chunk.num_tokens for chunk in ran[0]) == 70
