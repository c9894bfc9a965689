"""Decode steps in fixed buffers: replays with new contents equal fresh batches."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.small_models import BLOCK_SIZE, EVEN, columns, converted, prefill, random_tokens, random_weights, step

from kvblocks.engine.attention.attention import TorchAttention
from kvblocks.engine.attention.batch import SequenceRows
from kvblocks.engine.attention.triton_attention import TritonAttention
from kvblocks.engine.run.decode_step import (
    MAX_BUCKET,
    DecodeBuckets,
    DecodeBuffers,
    DecodeStep,
    GraphCapture,
    bucket_of,
    run_in_place,
)
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.step_upload import DECODE_COLUMNS, StepUploader

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning:triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = replace(EVEN, hidden_size=64, intermediate_size=96, num_heads=2, vocab_size=96, num_layers=2)
PROMPTS = [random_tokens(TINY, length, seed=length) for length in (40, 16, 5, 23, 1)]
TABLES = [[3, 1, 9], [4, 0], [7], [5, 11], [2]]


class Case:
    """A model with some computed prompts, and the same model with torch attention, which gives the expected logits."""

    def __init__(self, capture=run_in_place, **attention):
        weights = random_weights(TINY)
        self.plain = DecoderModel(TINY, weights, attention=TorchAttention())
        self.model = DecoderModel(TINY, converted(weights, DEVICE), attention=TritonAttention(**attention))
        self.plain_cache = self.plain.new_kv_cache(12, BLOCK_SIZE)
        for prompt, table in zip(PROMPTS, TABLES, strict=True):
            prefill(self.plain, self.plain_cache, prompt, table)
        self.cache = self.model.new_kv_cache(12, BLOCK_SIZE)
        for mine, other in zip(
            (*self.cache.keys, *self.cache.values), (*self.plain_cache.keys, *self.plain_cache.values), strict=True
        ):
            mine.copy_(other)
        self.uploader = StepUploader([ResidentTable(12, 12, DEVICE, num_rows=2)], BLOCK_SIZE)
        self.buckets = DecodeBuckets(self.model, self.cache, self.uploader.tables, capture)
        self.lengths = [len(prompt) for prompt in PROMPTS]

    @torch.inference_mode()
    def decode(self, sequences, token_ids, num_readonly=0):
        """Decode a token of some sequences in a bucket, and by torch: both logits."""
        rows = [
            SequenceRows([token], self.lengths[number], TABLES[number], num_readonly)
            for number, token in zip(sequences, token_ids, strict=True)
        ]
        uploaded = self.uploader.upload_decodes(columns(rows), bucket_of(len(rows)))
        got = self.buckets.run(uploaded, len(rows)).cpu()
        if not num_readonly:
            for number in sequences:
                self.lengths[number] += 1
        return got, step(self.plain, self.plain_cache, *rows)


def check(case, *arguments, **options):
    got, expected = case.decode(*arguments, **options)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    for mine, other in zip(case.cache.keys, case.plain_cache.keys, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=2e-4)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_replays_with_new_contents_give_what_fresh_batches_give(is_tiled):
    case = Case(is_tiled=is_tiled)
    # In a bucket of 4: three sequences, then others in another order. Then one in a bucket of its own, then four.
    check(case, [0, 1, 2], [5, 6, 7])
    check(case, [3, 0, 4], [8, 9, 10])
    check(case, [0], [11])
    check(case, [2, 4, 0, 3], [12, 13, 14, 15])
    assert case.buckets.num_replays == 4


def test_a_token_in_a_shared_block_is_not_stored():
    case = Case()
    before = [tensor.clone() for tensor in (*case.cache.keys, *case.cache.values)]
    case.lengths[0] = 31  # of a prompt of 40, whose first two blocks are shared
    got, expected = case.decode([0], [PROMPTS[0][31]], num_readonly=32)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    for old, new in zip(before, (*case.cache.keys, *case.cache.values), strict=True):
        assert torch.equal(old, new)


def test_padding_changes_nothing():
    case = Case()
    before = [tensor.clone() for tensor in (*case.cache.keys, *case.cache.values)]
    padded = DecodeStep(case.model, case.cache, DecodeBuffers(case.uploader.tables, 4, TINY.vocab_size), 4)
    with torch.inference_mode():
        assert padded.compute().isfinite().all()
    for old, new in zip(before, (*case.cache.keys, *case.cache.values), strict=True):
        assert torch.equal(old, new)


def test_steps_stay_when_the_tables_move():
    made = []

    def capture(step):
        made.append(step.columns.shape[1])
        return step.compute

    case = Case(capture)
    check(case, [0, 1], [1, 2])
    check(case, [1, 0], [3, 4])
    assert made == [2]
    check(case, [0, 1, 2], [5, 6, 7])  # three rows of a table that has two
    check(case, [0, 1], [8, 9])
    assert made == [2, 4]


def test_a_step_reads_no_tensor_on_the_host(monkeypatch):
    """A captured step must not read a tensor's values. Every such read calls one of these functions."""
    case = Case()
    ready = DecodeStep(case.model, case.cache, DecodeBuffers(case.uploader.tables, 2, TINY.vocab_size), 2)
    reading = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")
    with monkeypatch.context() as patch, torch.inference_mode():
        # The kernels themselves, which the interpreter runs on the host.
        for name, fake in FAKE_KERNELS.items():
            patch.setattr(f"kvblocks.engine.attention.triton_attention.{name}", fake)
        for name in reading:
            patch.setattr(torch.Tensor, name, refuse(name))
        logits = ready.compute()
    assert logits.shape == (2, TINY.vocab_size)


FAKE_KERNELS = {
    "decode": lambda query, *_, **__: (query, None),
    "norm": lambda rows, *_: rows,
    "add_norm": lambda hidden, *_, **__: hidden,
    "gate": lambda gate_up, *_: gate_up.chunk(2, -1)[0],
    "place": lambda heads, *_: heads[:, : TINY.num_heads],
}


def refuse(name):
    def read(*_):
        raise AssertionError(f"{name}: a value of a tensor is read on the host")

    return read


def test_buckets():
    asked = (1, 2, 3, 4, 5, 64, 65, 80, 81, 257, MAX_BUCKET)
    assert [bucket_of(number) for number in asked] == [1, 2, 4, 4, 8, 64, 80, 80, 96, 272, MAX_BUCKET]
    assert bucket_of(MAX_BUCKET + 1) is None
    padded = [bucket_of(number) / number for number in range(65, MAX_BUCKET + 1)]
    assert max(padded) < 1.24


def test_buckets_between_two_powers_of_two_share_memory():
    case, made = Case(), {}
    buckets = DecodeBuckets(case.model, case.cache, case.uploader.tables, fake_capture(made))
    for bucket in (80, 96, 128, 144):
        padding = torch.zeros(DECODE_COLUMNS + 1, bucket, dtype=torch.int32, device=DEVICE)
        assert buckets.run(padding, bucket - 3).shape == (bucket - 3, TINY.vocab_size)
    assert [made[bucket].logits.data_ptr() == made[128].logits.data_ptr() for bucket in made] == [True] * 3 + [False]
    assert made[144].logits.untyped_storage().nbytes() == 256 * TINY.vocab_size * 4


def fake_capture(made):
    """A capture that notes steps by their size, and computes nothing."""

    def capture(step):
        made[step.columns.shape[1]] = step
        return lambda: step.logits

    return capture


@pytest.mark.skipif(
    DEVICE.type == "cpu", reason="CUDA graphs need a GPU; without one the same steps run in place, above"
)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_captured_steps_give_what_fresh_batches_give(is_tiled):
    case = Case(GraphCapture(), is_tiled=is_tiled)
    for sequences in ([0, 1, 2], [3, 0, 4], [0], [2, 4, 0, 3], [1, 3, 2]):
        check(case, sequences, [7 + number for number in sequences])


@pytest.mark.skipif(
    DEVICE.type == "cpu", reason="CUDA graphs need a GPU; without one the same steps run in place, above"
)
def test_captured_steps_stay_good_when_the_tables_move():
    case = Case(GraphCapture())
    check(case, [0, 1], [1, 2])
    check(case, [0, 1, 2], [5, 6, 7])  # three rows of a table that has two
    check(case, [0, 1], [8, 9])
    check(case, [2], [3])


def capture_into(pools):
    """With a stand-in for `torch.cuda.graph`: threads that move blocks don't disturb a capture."""

    def graph(graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        return nullcontext(pools.append(pool))

    return graph


def test_a_pool_without_graphs_is_not_captured_into_again(monkeypatch):
    """With stand-ins for torch's functions that refuse what torch refuses on a GPU."""
    pools, numbers = [], iter(range(100))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), {"replay": lambda self: None}))
    monkeypatch.setattr(torch.cuda, "graph", capture_into(pools))
    capture, step = GraphCapture(), SimpleNamespace(compute=lambda: torch.zeros(1))
    kept = [capture(step), capture(step)]
    assert pools[0] == pools[1]
    kept.pop(0)
    kept.append(capture(step))
    assert pools[2] == pools[0]
    kept.clear()
    kept.append(capture(step))
    assert pools[3] != pools[0]


class Using:
    """Stands for `torch.cuda.stream`."""

    current = None

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before, Using.current = Using.current, self.stream

    def __exit__(self, *_):
        Using.current = self.before


@pytest.mark.parametrize("failing", ["capture_begin", "capture_end"])
def test_a_capture_that_fails_leaves_the_stream_that_was_current(failing, monkeypatch):
    """An engine refuses another stream. `torch.cuda.graph` is torch's own, which puts no stream back if these fail."""
    before, other = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))
    monkeypatch.setattr(Using, "current", before)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Using.current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: other)
    monkeypatch.setattr(torch.cuda, "stream", Using)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)  # noqa: SLF001
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))

    def fail(*_, **__):
        raise RuntimeError("previous error during capture")

    calls = {"capture_begin": lambda *_, **__: None, "capture_end": lambda _: None, failing: fail}
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), calls))
    with pytest.raises(RuntimeError, match="previous error"):
        GraphCapture()(SimpleNamespace(compute=lambda: torch.zeros(1)))
    assert Using.current is before
