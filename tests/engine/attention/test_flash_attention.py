"""attention="flash-attn", against a stand-in with the package's signatures, and the errors of wrong options."""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine import fake_flash_attn
from engine.small_models import EVEN, converted, random_tokens, random_weights

from kvblocks.core.kinds import SlidingWindow
from kvblocks.engine import Engine, LoadedModel, ModelError, StepLimits
from kvblocks.engine.attention import flash_attention as flash_attention_module
from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.attention.batch import SequenceRows, StepBatch
from kvblocks.engine.attention.flash_attention import FlashAttention
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.warm_up import padding_batch
from kvblocks.errors import InvalidArgumentError
from kvblocks.kernels import oracle

TINY = replace(
    EVEN, hidden_size=64, intermediate_size=96, num_heads=2, vocab_size=96, tie_word_embeddings=False, num_layers=2
)
ROWS = [SequenceRows([1], 300, [3, 0]), SequenceRows([1] * 7, 250, [4, 1]), SequenceRows([1], 0, [2])]


def half_precision():
    """The model in bfloat16: the package takes nothing wider."""
    return LoadedModel(TINY, converted(random_weights(TINY), torch.bfloat16))


@pytest.fixture
def installed(monkeypatch):
    """A stand-in for the package, which runs on a CPU."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn.module())
    monkeypatch.setattr(flash_attention_module, "DEVICE_TYPES", ("cuda", "cpu"))
    fake_flash_attn.CALLS.clear()


@pytest.mark.usefixtures("installed")
def test_the_same_tokens_as_through_torch():
    model = half_precision()
    shared = random_tokens(TINY, 260, seed=1)
    prompts = [[*shared, number] for number in range(3)] + [shared[:256]]
    answers = []
    for attention in ("flash-attn", "torch"):
        engine = Engine(model, num_blocks=12, block_size=256, attention=attention)
        engine.limits = StepLimits(max_num_batched_tokens=200, max_num_seqs=4)
        engine.generate(prompts[:1], max_tokens=2, ignore_eos=True)
        completions = engine.generate(prompts, max_tokens=4, ignore_eos=True)
        answers.append([(c.token_ids, c.num_cached_tokens) for c in completions])
    assert answers[0] == answers[1]
    assert {cached for _, cached in answers[0]} == {256, 255}
    assert {"varlen", "kvcache"} <= set(fake_flash_attn.CALLS)


@pytest.mark.usefixtures("installed")
def test_a_step_that_stores_no_row_writes_to_no_block():
    """Not even what is there already: a tier may load a block meanwhile."""
    engine = Engine(half_precision(), num_blocks=4, block_size=256, attention="flash-attn")
    prompt = random_tokens(TINY, 256, seed=1)
    first = engine.generate([prompt], max_tokens=1)[0]
    cache = engine.runner.kv_cache
    before = cache.memory[0]._version  # noqa: SLF001 - how often it was written to
    again = engine.generate([prompt], max_tokens=1)[0]
    assert (again.num_cached_tokens, again.token_ids) == (255, first.token_ids)
    key = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    padding = padding_batch([ResidentTable(4, 4, torch.device("cpu"))], 256, [1, 2], 2)
    for batch in (padding, StepBatch.build([SequenceRows([1] * 3, 253, [3], 256)], 256)):
        engine.runner.model.attention.begin(batch, cache).store(1, key, key, batch.slot_mappings[0])
    assert cache.memory[0]._version == before  # noqa: SLF001


@pytest.mark.parametrize("rows", [ROWS, [ROWS[0], ROWS[2]]], ids=["mixed", "decodes"])
@pytest.mark.parametrize(
    "how", [LayerAttention(0.125), LayerAttention(0.3, SlidingWindow(1, 40)), LayerAttention(0.125, softcap=3.0)]
)
def test_what_the_package_is_given(rows, how):
    cache = KVCache.allocate(TINY, 6, 256, dtype=torch.bfloat16)
    batch = StepBatch.build(rows, 256)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    step = FlashAttention(fake_flash_attn.module()).begin(batch, cache)
    key, value = torch.randn(2, batch.num_tokens, 1, 64, generator=generator).bfloat16()
    step.store(1, key, value, batch.slot_mappings[0])
    assert torch.equal(cache.keys[1].flatten(0, 1)[batch.slot_mappings[0]], key)
    query = torch.randn(batch.num_tokens, 2, 64, generator=generator).bfloat16()
    expected, _ = oracle.attention(
        *(query, cache.keys[1], cache.values[1], batch.block_tables[0], batch.query_start, batch.seq_lens),
        scale=how.scale,
        window=how.kind.window_tokens,
        softcap=how.softcap,
    )
    assert torch.equal(step.attend(1, query, how), expected.bfloat16())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 128}, "expected a block_size in multiples of 256, its pages, got 128"),
        ({"deterministic": True}, "expected deterministic=False, got True"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Engine(half_precision(), **{"num_blocks": 4, "block_size": 256, "attention": "flash-attn"} | changes)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LoadedModel(TINY, random_weights(TINY)), "expected dtype float16 or bfloat16, got torch.float32"),
        (replace(half_precision(), config=replace(TINY, head_dim=52)), "multiples of 8, at most 256, got 52"),
        (replace(half_precision(), config=replace(TINY, head_dim=264)), "multiples of 8, at most 256, got 264"),
    ],
)
def test_models_that_it_cannot_run_are_refused(model, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Engine(model, num_blocks=4, block_size=256, attention="flash-attn")


def test_a_cpu_is_refused():
    with pytest.raises(InvalidArgumentError, match="attention='flash-attn': expected a CUDA device, got 'cpu'"):
        Engine(half_precision(), num_blocks=4, block_size=256, attention="flash-attn", device="cpu")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(flash_attention_module, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ModelError, match=r"expected the package flash-attn, got: .*--no-build-isolation flash-attn"):
        Engine(half_precision(), num_blocks=4, block_size=256, attention="flash-attn")


SIGNATURES = Path(__file__).parents[1] / "flash_attn_signatures.txt"


def signatures(path):
    """The parameters of the two functions, with their defaults and without annotations, by parsing."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in vars(fake_flash_attn.module()):
            for argument in node.args.args:
                argument.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def test_the_stand_in_has_the_signatures_of_the_package():
    found = signatures(SIGNATURES)
    assert len(found) == 2
    assert signatures(Path(fake_flash_attn.__file__)) == found


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["2.6.3", "2.7.4.post1", "2.8.3"])
def test_the_signatures_are_those_of_the_packages_sources(version, tmp_path):
    tool = Path(__file__).parents[3] / "tools" / "fetch_sdist.py"
    command = [sys.executable, str(tool), f"flash-attn=={version}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"needs PyPI: {done.stderr[-2000:]}"
    source = tmp_path / f"flash-attn-{version}" / "flash_attn" / "flash_attn_interface.py"
    assert signatures(source) == signatures(SIGNATURES)
    assert "page_block_size must be a multiple of 256" in source.read_text()
