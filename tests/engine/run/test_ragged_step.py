"""Steps with short prompts in fixed buffers: replays with new contents equal fresh batches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.run.recorded_graph import capture_recorded
from engine.small_models import BLOCK_SIZE, EVEN, columns, converted, prefill, random_tokens, random_weights, step
from torch.utils._python_dispatch import TorchDispatchMode

from kvblocks.engine import Engine, LoadedModel, StepLimits
from kvblocks.engine.attention.attention import TorchAttention
from kvblocks.engine.attention.batch import SequenceRows
from kvblocks.engine.attention.triton_attention import TritonAttention
from kvblocks.engine.run.decode_step import RAGGED_SEQS, RAGGED_TOKENS, DecodeBuckets, run_in_place
from kvblocks.engine.run.device_runner import DeviceRunner
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.step_upload import RaggedSize, StepUploader

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning:triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = replace(EVEN, hidden_size=64, intermediate_size=96, num_heads=2, vocab_size=96, num_layers=1)
PREFIX = random_tokens(TINY, 32, seed=1)


class Case:
    """A model whose cache has a prefix in blocks 0 and 1, beside torch attention, which gives the expected logits."""

    def __init__(self, capture):
        weights = random_weights(TINY)
        self.plain = DecoderModel(TINY, weights, attention=TorchAttention())
        self.plain_cache = self.plain.new_kv_cache(12, BLOCK_SIZE)
        prefill(self.plain, self.plain_cache, PREFIX, [0, 1])
        self.model = DecoderModel(TINY, converted(weights, DEVICE), attention=TritonAttention())
        self.cache = self.model.new_kv_cache(12, BLOCK_SIZE)
        for mine, other in zip(self.cache.parts, self.plain_cache.parts, strict=True):
            mine.copy_(other)
        self.uploader = StepUploader([ResidentTable(12, 12, DEVICE, num_rows=2)], BLOCK_SIZE)
        self.buckets = DecodeBuckets(self.model, self.cache, self.uploader.tables, capture)

    @torch.inference_mode()
    def check(self, *rows):
        """Compute a step in a bucket, and by torch. All logits, and all of K and V, must be equal."""
        size = self.buckets.ragged_size(sum(len(one.token_ids) for one in rows), len(rows))
        logits = self.buckets.run_ragged(self.uploader.upload_ragged(columns(rows), size), size)
        expected = step(self.plain, self.plain_cache, *rows)
        torch.testing.assert_close(logits[: len(expected)].cpu(), expected, rtol=0, atol=2e-4)
        for mine, other in zip(self.cache.parts, self.plain_cache.parts, strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=2e-4)
        return size


def suffix(number, length, table, **options):
    """New tokens behind the prefix, of which block 1 is shared."""
    return SequenceRows(random_tokens(TINY, length, seed=number), 32, table, 32, **options)


@pytest.mark.parametrize("capture", [pytest.param(run_in_place, marks=pytest.mark.exhaustive), capture_recorded])
def test_replays_with_new_contents_give_what_fresh_batches_give(capture):
    if DEVICE.type == "cuda" and capture is capture_recorded:
        pytest.skip("the stand-in for graphs is for the interpreter")
    case = Case(capture)
    first, second, third = [0, 1, 2], [0, 1, 3], [0, 1, 4]
    assert case.check(suffix(5, 5, first), suffix(6, 3, second)) == RaggedSize(16, 4, 1)
    # A decode in front, a chunk that samples nothing, and tokens that fill the step.
    decode = SequenceRows([7], 37, first, 32)
    assert case.check(decode, suffix(8, 15, third, wants_logits=False)) == RaggedSize(16, 4, 1)
    assert case.check(suffix(9, 1, third)) == RaggedSize(16, 4, 1)
    assert case.buckets.num_ragged_replays == 3


def test_padding_changes_nothing():
    case = Case(run_in_place)
    before = [part.clone() for part in case.cache.parts]
    with torch.inference_mode():
        logits = case.buckets.run_ragged(None, RaggedSize(16, 4, 1))
    assert logits.shape == (4, TINY.vocab_size) and logits.isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(before, case.cache.parts, strict=True))


def test_sizes_hold_steps_and_their_padding():
    tables = [ResidentTable(40, 40, torch.device("cpu"))] * 2
    buckets = DecodeBuckets(SimpleNamespace(), SimpleNamespace(block_size=16), tables, run_in_place)
    for num_tokens in (1, 3, 16, 17, 33, 64, 65, 200, 255, 256, 512):
        for num_seqs in {1, 3, 4, 15, 16, 63, 64, 255, 256, num_tokens} & set(range(1, num_tokens + 1)):
            size = buckets.ragged_size(num_tokens, num_seqs)
            if size is None:  # a sequence for the padding would be missing
                assert num_seqs >= max(RAGGED_SEQS)
                continue
            assert size.num_tokens >= num_tokens and size.num_seqs > num_seqs and size.num_groups == 2
            assert size in buckets.ragged_sizes(num_tokens, num_seqs)  # so a warm-up has captured it
    assert buckets.ragged_size(max(RAGGED_TOKENS) + 1, 1) is None
    small = DecodeBuckets(
        SimpleNamespace(), SimpleNamespace(block_size=16), [ResidentTable(40, 3, torch.device("cpu"))], run_in_place
    )
    assert {size.num_tokens for size in small.ragged_sizes(300, 300)} == {16, 32}  # 3 blocks have room for 48 tokens


def test_an_engine_replays_steps_with_short_suffixes():
    model = LoadedModel(TINY, converted(random_weights(TINY), DEVICE))
    engine, plain = (
        Engine(model, num_blocks=40, attention=name, limits=StepLimits(64, 3)) for name in ("triton", "torch")
    )
    engine.runner = DeviceRunner(engine.runner.model, 40, BLOCK_SIZE, capture=run_in_place)
    prompts = [PREFIX + random_tokens(TINY, length, seed=length) for length in (9, 2, 14)]
    answers = []
    for one in (plain, engine):
        one.generate([PREFIX], max_tokens=1, ignore_eos=True)
        completions = one.generate(prompts, max_tokens=2, ignore_eos=True)
        answers.append([completion.token_ids for completion in completions])
        assert all(completion.num_cached_tokens == 32 for completion in completions)
    assert answers[0] == answers[1]
    # The prefix, three suffixes, and a decode step.
    assert (engine.runner.num_ragged_replays, engine.runner.num_replays, engine.num_steps) == (2, 1, 3)


class Operations(TorchDispatchMode):
    """Counts what a step asks of a device: operators that compute or copy, whatever their tensors are on here."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema  # noqa: SLF001 - what says whether a result is a view
        is_view = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
        if not is_view and not any(free in schema.name for free in ("empty", "detach", "lift_fresh")):
            self.names.append(schema.name.removeprefix("aten::"))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("num_layers", [1, 4])
def test_a_replayed_step_is_a_handful_of_operations_whatever_the_model(num_layers):
    config = replace(TINY, num_layers=num_layers)
    model = DecoderModel(config, random_weights(config), attention=TritonAttention())
    cache = model.new_kv_cache(12, BLOCK_SIZE)
    uploader = StepUploader([ResidentTable(12, 12, torch.device("cpu"))], BLOCK_SIZE)
    buckets = DecodeBuckets(model, cache, uploader.tables, lambda step: lambda: step.logits)  # a graph is one launch
    size = buckets.ragged_size(8, 2)
    for _ in range(2):  # the first one makes the buffers
        rows = [suffix(5, 5, [0, 1, 2]), suffix(6, 3, [0, 1, 3])]
        with torch.inference_mode(), Operations() as counted:
            buckets.run_ragged(uploader.upload_ragged(columns(rows), size), size)
    # To pinned memory and to the device, new entries of block tables, to the buffers, and each sequence's table.
    assert counted.names == ["copy_", "copy_", "index_copy_", "copy_", "index_select"]
