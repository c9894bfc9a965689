"""Decode steps in fixed buffers, and their CUDA graphs.

A decode step of a small model is hundreds of launches of little work each, and the host can't launch them as fast as a
GPU runs them. So a step is captured once, as a graph, and replayed. A graph reads and writes the same memory each time:
`DecodeStep` is a step over such memory, for a fixed number of sequences. Before a replay the step's columns are
copied into it; block tables are the resident ones, which are where they are. Batches are padded to a power of 2 by
sequences without tokens, whose slots are -1, so that few graphs serve all.

Capturing is a few lines at the end of this file: without a GPU the same steps run in the same buffers, uncaptured.

Not captured, and run as any other step: those with shared prefixes, since their launches depend on how many groups,
members and levels there are; and steps of more than MAX_BUCKET sequences, whose launches are large.
"""

from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.attention.batch import StepShape
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.step_upload import DECODE_COLUMNS, UploadedStep, lay_out

MAX_BUCKET = 512


class DecodeStep:
    """One token of each of `num_seqs` sequences, in fixed buffers.

    columns: int32 [DECODE_COLUMNS + num_groups, num_seqs], see `step_upload`; at first all are padding. The buffers are
    those of `kv_cache` and of `tables` as they are now.
    """

    def __init__(self, model: DecoderModel, kv_cache: KVCache, tables: Sequence[ResidentTable], num_seqs: int) -> None:
        device = tables[0].blocks.device
        self.columns = torch.zeros(DECODE_COLUMNS + len(tables), num_seqs, dtype=torch.int32, device=device)
        self.columns[DECODE_COLUMNS - 1] = 1
        self._model = model
        self._kv_cache = kv_cache
        self._tables = [table.blocks for table in tables]
        self._index = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)

    def compute(self) -> Tensor:
        """Run the step on what the buffers hold: float32 logits [num_seqs, vocab]. Changes the cache.

        Without a wait for the device, so that it can be captured.
        """
        num_seqs, block_size = self.columns.shape[1], self._kv_cache.block_size
        max_seq_len = self._tables[0].shape[1] * block_size
        token_ids, seq_lens, num_readonly, *table_rows = self.columns.unbind(0)
        step = UploadedStep(
            token_ids=token_ids,
            seq_lens=seq_lens,
            num_readonly=num_readonly,
            table_rows=tuple(table_rows),
            query_start=self._index,
            logits_rows=self._index[:-1],
            decode_columns=self.columns,
            shape=StepShape(num_seqs, 1, max_seq_len),
        )
        batch = lay_out(step, self._tables, block_size)
        return self._model.compute(batch, self._model.attention.begin(batch, self._kv_cache))


Replay = Callable[[], Tensor]
"""Runs a step on what its buffers hold, and returns its logits: good until the next replay of any step."""
Capture = Callable[[DecodeStep], Replay]


class DecodeBuckets:
    """The decode steps of one model and cache by their size, made when they are first needed.

    capture: what makes a step one that is replayed. Reads: num_replays.
    """

    def __init__(
        self, model: DecoderModel, kv_cache: KVCache, tables: Sequence[ResidentTable], capture: Capture
    ) -> None:
        self.num_replays = 0
        self._model = model
        self._kv_cache = kv_cache
        self._tables = tables
        self._capture = capture
        self._captured = [table.blocks for table in tables]
        self._steps: dict[int, tuple[DecodeStep, Replay]] = {}

    def run(self, columns: Tensor, num_seqs: int) -> Tensor:
        """Run a decode step of `num_seqs` sequences, padded to a bucket: logits float32 [num_seqs, vocab].

        columns: int32 [DECODE_COLUMNS + num_groups, bucket]. The logits are good until the next run. Changes the cache.
        The first run of a bucket captures it; all are captured again after a resident table had to grow.
        """
        present = [table.blocks for table in self._tables]
        if any(captured is not blocks for captured, blocks in zip(self._captured, present, strict=True)):
            self._captured = present
            self._steps.clear()
        bucket = columns.shape[1]
        if bucket not in self._steps:
            step = DecodeStep(self._model, self._kv_cache, self._tables, bucket)
            self._steps[bucket] = step, self._capture(step)
        step, replay = self._steps[bucket]
        step.columns.copy_(columns)
        self.num_replays += 1
        return replay()[:num_seqs]


def bucket_of(num_seqs: int) -> int | None:
    """The size that a step of `num_seqs` sequences is padded to; None: it isn't captured. O(1)."""
    return None if num_seqs > MAX_BUCKET else 1 << (num_seqs - 1).bit_length()


def run_in_place(step: DecodeStep) -> Replay:
    """Replay a step by running it again: what there is without a GPU."""
    return step.compute


class GraphCapture:
    """Captures steps as CUDA graphs, which share one pool of memory: only one of them runs at a time.

    All are captured in one stream of this object's, in which each step has run before: torch keeps cuBLAS's workspace
    by stream, so it is allocated outside the pool, and graphs of other objects, which may go first, have their own.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: DecodeStep) -> Replay:
        """Capture a step whose columns are all padding, so that running it changes nothing."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # of the device that is the current one now
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step.compute()  # compiles the kernels, and lets libraries allocate what they keep
        torch.cuda.current_stream().wait_stream(self._stream)
        if not self._graphs:  # torch refuses a pool whose last graph has gone while anything of it is left
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads that move blocks may allocate meanwhile: only what this one does may not disturb the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = step.compute()
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
