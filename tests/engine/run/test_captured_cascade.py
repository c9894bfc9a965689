"""Captured decode steps with shared runs: replays with other runs, lengths and tables equal fresh steps."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("a stand-in for CUDA graphs, in the interpreter", allow_module_level=True)

from engine.run.recorded_graph import capture_recorded
from engine.run.test_decode_step import TINY
from engine.small_models import BLOCK_SIZE, columns, random_tokens, random_weights, step

from kvblocks.engine.attention.attention import TorchAttention
from kvblocks.engine.attention.batch import SequenceRows
from kvblocks.engine.attention.cascade import MAX_LEVELS, CascadePlanner, RunBucket
from kvblocks.engine.attention.triton_attention import TritonAttention
from kvblocks.engine.run.decode_step import DecodeBuckets, bucket_of
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.step_upload import StepUploader
from kvblocks.kernels.runs import SharedRuns

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning:triton")
CPU = torch.device("cpu")
# The first block of all but the last, the second of two, then what each has alone.
TABLES = [[0, 1, 2], [0, 1, 3], [0, 4, 5], [6]]
LENGTHS = [35, 33, 38, 5]
NESTED = [([0, 1, 2], 0, 1), ([0, 1], 1, 2)]


class Case:
    """A cache of random numbers, on which captured steps and torch compute."""

    def __init__(self):
        weights = random_weights(TINY)
        self.graphs = []
        self.plain = DecoderModel(TINY, weights, attention=TorchAttention())
        self.model = DecoderModel(TINY, weights, attention=TritonAttention())
        self.caches = self.plain.new_kv_cache(10, BLOCK_SIZE), self.model.new_kv_cache(10, BLOCK_SIZE)
        numbers = torch.randn(self.caches[0].memory[0].shape, generator=torch.Generator().manual_seed(0))
        for cache in self.caches:
            cache.memory[0].copy_(numbers)
        planner = CascadePlanner(None, BLOCK_SIZE, CPU)
        self.uploader = StepUploader([ResidentTable(10, 10, CPU, num_rows=2)], BLOCK_SIZE)
        capture = partial(capture_recorded, graphs=self.graphs)
        self.buckets = DecodeBuckets(self.model, self.caches[1], self.uploader.tables, capture, planner.begin)
        self.lengths = list(LENGTHS)

    @torch.inference_mode()
    def check(self, sequences, cohorts):
        """Decode a token of some sequences, which share `cohorts` of runs; None: without a cascade."""
        tokens = random_tokens(TINY, len(sequences), seed=sum(self.lengths))
        rows = [
            SequenceRows([token], self.lengths[number], TABLES[number])
            for number, token in zip(sequences, tokens, strict=True)
        ]
        bucket = bucket_of(len(rows))
        packed = None
        if cohorts is not None:
            runs, room = SharedRuns.build(cohorts, len(rows)), RunBucket.of(bucket)
            assert room.holds(runs)
            packed = room.pack(runs)
        uploaded = self.uploader.upload_decodes(columns(rows), bucket)
        got = self.buckets.run(uploaded, len(rows), packed)
        torch.testing.assert_close(got, step(self.plain, self.caches[0], *rows), rtol=0, atol=3e-4)
        torch.testing.assert_close(self.caches[1].memory[0], self.caches[0].memory[0], rtol=0, atol=3e-4)
        for number in sequences:
            self.lengths[number] += 1


@pytest.mark.exhaustive
def test_replays_with_other_runs_lengths_and_tables():
    case = Case()
    case.check([0, 1, 2], NESTED)
    case.check([3, 2, 1, 0], [([1, 2, 3], 0, 1)])  # of one level, and rows in another order
    case.check([2, 0, 3, 1], None)  # the same buffers, in a graph of its own
    table = case.uploader.tables[0]
    address = table.blocks.data_ptr()
    table.reserve(100)
    assert table.blocks.data_ptr() != address
    case.check([2, 1, 0], [([0, 1, 2], 0, 1), ([1, 2], 1, 2)])
    case.check([1, 3, 0], None)
    assert len(case.graphs) == 2 and case.buckets.num_replays == 5
    assert all(graph.num_kernels > 10 for graph in case.graphs)


def test_capturing_late_stores_nothing_of_a_step_before():
    """Capturing runs a step on its buffers, whose old sequences may have lost their blocks."""
    case = Case()
    case.check([0, 1, 2], [([0, 1, 2], 0, 1)])
    stored = case.lengths[0] - 1  # by that step, in a block that is another's from now on
    for cache in case.caches:
        cache.keys[0][TABLES[0][stored // BLOCK_SIZE], stored % BLOCK_SIZE] = 7.0
    case.check([1, 2, 3], None)


def test_what_a_bucket_holds():
    room = RunBucket.of(4)
    assert room.holds(SharedRuns.build(NESTED, 4))
    assert not room.holds(SharedRuns.build(NESTED, 5))
    chain = [([0, 1], start, start + 1) for start in range(MAX_LEVELS + 1)]
    assert room.holds(SharedRuns.build(chain[:-1], 4)) and not room.holds(SharedRuns.build(chain, 4))
    runs = room.split(room.pack(SharedRuns.build(NESTED, 4)))
    assert runs.cohort_start.tolist() == [0, 3, 5, 5, 5] and runs.num_shared.tolist() == [2, 2, 1, 0]
    assert runs.num_levels == MAX_LEVELS and runs.members[5:].eq(0).all()
