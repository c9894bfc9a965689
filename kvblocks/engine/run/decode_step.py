"""Decode steps in fixed buffers, and their CUDA graphs.

A decode step of a small model is hundreds of launches with little work each. The host can't launch them as fast as a
GPU runs them. So a step is captured once, as a graph, and replayed. A graph reads and writes the same memory each time.
`DecodeStep` is a step over such memory, for a fixed number of sequences. Before a replay, the step's columns and its
sequences' rows of the resident tables are copied into this memory, so the tables may be anywhere, and may grow. Batches
are padded with sequences without tokens, whose slots are -1, so that few graphs serve all batches. Their sizes are
powers of 2, and above 64 multiples of 16, since padding 257 sequences to 512 would nearly double the work. Only one
step runs at a time, so those between two powers of 2 share buffers.

A step whose sequences share prefixes is another graph over the same memory, with padded runs in addition: see
`attention.cascade.RunBucket`. The number of programs is fixed, and they divide the work by the lengths on the device.
So a graph depends only on the bucket and on whether there are runs.

Short prompts, and short suffixes of cached prefixes, are captured too, alone or beside decodes: a step of few tokens is
as hard to launch as a decode step. They are padded to few sizes, of tokens and of sequences (`RaggedStep`).

Capturing is a few lines at the end of this file. Without a GPU the same steps run in the same buffers, uncaptured.

Some steps are not captured: those of more than MAX_BUCKET sequences, whose launches are large, those with runs that no
bucket holds, and those of more tokens than RAGGED_TOKENS.
"""

from collections.abc import Callable, Sequence
from itertools import product
from weakref import WeakSet

import torch
from torch import Tensor

from kvblocks.engine.attention.attention import KVCache
from kvblocks.engine.attention.batch import StepBatch, StepShape
from kvblocks.engine.attention.cascade import BeginCascade, RunBucket
from kvblocks.engine.run.forward import DecoderModel
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.step_upload import DECODE_COLUMNS, RaggedSize, UploadedStep, lay_out

MAX_BUCKET = 512
FINE_FROM, FINE_STEP = 64, 16
"""Above FINE_FROM sequences, buckets are multiples of FINE_STEP."""

RAGGED_TOKENS, RAGGED_SEQS = (16, 32, 64, 128, 256, 512), (4, 16, 64, 256)
"""The sizes that steps with a prompt are padded to: tokens, and sequences with one row of logits each.

A GPU reads all weights for 16 rows as for 256, so padding costs little there (unmeasured). Larger steps take longer
than their launches.
"""


class DecodeBuffers:
    """The memory of steps of up to `num_seqs` sequences: columns, block tables and logits, as in `DecodeStep`.

    All graphs write their logits here. Otherwise each would keep its own: 0.5 MB a sequence at a vocabulary of 128,000.
    """

    def __init__(self, tables: Sequence[ResidentTable], num_seqs: int, vocab_size: int) -> None:
        device = tables[0].blocks.device
        self.columns = torch.empty(DECODE_COLUMNS + len(tables), num_seqs, dtype=torch.int32, device=device)
        self.block_tables = [
            torch.zeros(num_seqs, table.blocks.shape[1], dtype=torch.int32, device=device) for table in tables
        ]
        self.index = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self.logits = torch.empty(num_seqs, vocab_size, dtype=torch.float32, device=device)


class DecodeStep:
    """A step of `num_seqs` sequences with one token each, in the first rows of fixed buffers of at least that size.

    columns: int32 [DECODE_COLUMNS + num_groups, num_seqs], see `step_upload`; at first all sequences are padding.
    block_tables: for each group, int32 [num_seqs, max_blocks]. logits: float32 [num_seqs, vocab]. The other buffers are
    those of `kv_cache`.
    """

    def __init__(self, model: DecoderModel, kv_cache: KVCache, buffers: DecodeBuffers, num_seqs: int) -> None:
        self.columns = buffers.columns[:, :num_seqs]
        self.block_tables = [table[:num_seqs] for table in buffers.block_tables]
        self.logits = buffers.logits[:num_seqs]
        self._index = buffers.index[: num_seqs + 1]
        self._model = model
        self._kv_cache = kv_cache
        self.clear()

    def clear(self) -> None:
        """Replace all sequences by padding."""
        self.columns.zero_()
        self.columns[DECODE_COLUMNS - 1] = 1

    def fill(self, columns: Tensor, tables: Sequence[ResidentTable]) -> None:
        """Copy a step's columns, and its sequences' rows of the tables, to the buffers. Never waits for the device."""
        self.columns.copy_(columns)
        for own, table, rows in zip(self.block_tables, tables, self.columns[DECODE_COLUMNS:], strict=True):
            torch.index_select(table.blocks, 0, rows, out=own)

    def compute(self) -> Tensor:
        """Run the step on what the buffers hold. Changes the cache and `logits`, which is returned.

        Never waits for the device, so that it can be captured.
        """
        batch = self.lay_out()
        return self.logits.copy_(self._model.compute(batch, self._model.attention.begin(batch, self._kv_cache)))

    def lay_out(self) -> StepBatch:
        """The batch that the buffers hold."""
        num_seqs, block_size = self.columns.shape[1], self._kv_cache.block_size
        shape = StepShape(num_seqs, 1, self.block_tables[0].shape[1] * block_size)
        step = UploadedStep.of_decodes(self.columns, self._index, shape)
        return lay_out(step, self.block_tables, block_size)


class RaggedStep:
    """Any step of at most `num_tokens` tokens and `num_seqs` sequences, in fixed buffers.

    `extend` computes all its rows. The step is padded to these two sizes. It shares block tables and logits with decode
    steps of as many sequences. Its columns are one vector (see `RaggedSize`), at first all padding.
    """

    def __init__(self, model: DecoderModel, kv_cache: KVCache, buffers: DecodeBuffers, size: RaggedSize) -> None:
        self.size = size
        self.block_tables = [table[: size.num_seqs] for table in buffers.block_tables]
        self.logits = buffers.logits[: size.num_seqs]
        self._values = torch.zeros(size.num_values, dtype=torch.int32, device=self.logits.device)
        self._model = model
        self._kv_cache = kv_cache
        self._step = size.split(self._values, self.block_tables[0].shape[1] * kv_cache.block_size)
        self.clear()

    def clear(self) -> None:
        """Replace all sequences by padding, where the first one has all rows."""
        self._values.zero_()
        for counts in (self._step.seq_lens[:1], self._step.num_readonly[:1], self._step.query_start[1:]):
            counts.fill_(self.size.num_tokens)

    def fill(self, values: Tensor, tables: Sequence[ResidentTable]) -> None:
        """Copy a step, as `upload_ragged` uploaded it, and its rows of the tables to the buffers. Never waits."""
        self._values.copy_(values)
        for own, table, rows in zip(self.block_tables, tables, self._step.table_rows, strict=True):
            torch.index_select(table.blocks, 0, rows, out=own)

    def compute(self) -> Tensor:
        """Run the step, as `DecodeStep.compute` does."""
        batch = lay_out(self._step, self.block_tables, self._kv_cache.block_size)
        return self.logits.copy_(self._model.compute(batch, self._model.attention.begin(batch, self._kv_cache)))


class CascadeStep:
    """A decode step whose sequences share runs of blocks. It uses the buffers of `step`, and another one for the runs.

    At first there are no runs. begin: `CascadePlanner.begin`.
    """

    def __init__(self, step: DecodeStep, model: DecoderModel, kv_cache: KVCache, begin: BeginCascade) -> None:
        self.bucket = RunBucket.of(step.columns.shape[1])
        self._step = step
        self._model = model
        self._kv_cache = kv_cache
        self._begin = begin
        self._vector = torch.zeros(self.bucket.num_values, dtype=torch.int32, device=step.columns.device)
        self._filled: Tensor | None = None
        self._runs = self.bucket.split(self._vector)

    def fill(self, vector: Tensor) -> None:
        """Copy runs, as `bucket.pack` packed them, into the buffer, unless they are the same as the last time."""
        if vector is not self._filled:
            self._vector.copy_(vector)
            self._filled = vector

    def compute(self) -> Tensor:
        """Run the step, as `DecodeStep.compute` does."""
        batch = self._step.lay_out()
        return self._step.logits.copy_(self._model.compute(batch, self._begin(batch, self._kv_cache, self._runs)))


Replay = Callable[[], Tensor]
"""Runs a step on what its buffers hold, and returns its logits, which are valid until the next replay of any step."""
FixedStep = DecodeStep | RaggedStep | CascadeStep
Capture = Callable[[FixedStep], Replay]


class DecodeBuckets:
    """The fixed steps of one model and cache, by size. Each is made when it is first needed.

    capture: turns a step into its replay. begin_cascade: `CascadePlanner.begin`, or None for no cascades. Attributes:
    num_replays and num_ragged_replays, which count replays of decode steps and of steps with prompts.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KVCache,
        tables: Sequence[ResidentTable],
        capture: Capture,
        begin_cascade: BeginCascade | None = None,
    ) -> None:
        self.num_replays = 0
        self.num_ragged_replays = 0
        self._model = model
        self._kv_cache = kv_cache
        self._tables = tables
        self._capture = capture
        self._begin_cascade = begin_cascade
        self._buffers: dict[int, DecodeBuffers] = {}
        self._steps: dict[int, DecodeStep] = {}
        self._cascades: dict[int, CascadeStep] = {}
        self._ragged: dict[RaggedSize, RaggedStep] = {}
        self._replays: dict[FixedStep, Replay] = {}

    def run(self, columns: Tensor, num_seqs: int, packed: Tensor | None = None) -> Tensor:
        """Run a decode step of `num_seqs` sequences, padded to a bucket: logits float32 [num_seqs, vocab].

        columns: int32 [DECODE_COLUMNS + num_groups, bucket]. packed: runs that the sequences share, as the bucket's
        `RunBucket` packs them. The logits are valid until the next run. Changes the cache. The first run of a bucket
        captures it.
        """
        step = self._step(columns.shape[1])
        cascade = None if packed is None else self._cascade(step)
        replayed = step if cascade is None else cascade
        if replayed not in self._replays:
            step.clear()  # capturing runs the step, whose buffers may hold an older step's blocks
            self._replays[replayed] = self._capture(replayed)
        step.fill(columns, self._tables)
        if cascade is not None and packed is not None:
            cascade.fill(packed)
        self.num_replays += 1
        return self._replays[replayed]()[:num_seqs]

    def run_ragged(self, values: Tensor | None, size: RaggedSize) -> Tensor:
        """Run a step that `StepUploader.upload_ragged` has padded: logits float32 [size.num_seqs, vocab].

        values: the uploaded step; None: only padding. The rest is as in `run`.
        """
        step = self._ragged.get(size)
        if step is None:
            buffers = self._buffers_of(size.num_seqs)
            step = self._ragged[size] = RaggedStep(self._model, self._kv_cache, buffers, size)
        if step not in self._replays or values is None:
            step.clear()
        if step not in self._replays:
            self._replays[step] = self._capture(step)
        if values is not None:
            step.fill(values, self._tables)
        self.num_ragged_replays += 1
        return self._replays[step]()

    def ragged_size(self, num_tokens: int, num_seqs: int) -> RaggedSize | None:
        """The size that a step of these many tokens and sequences is padded to; None if it isn't captured. O(sizes)."""
        room = self._tables[0].blocks.shape[1] * self._kv_cache.block_size
        for padded_tokens in RAGGED_TOKENS:
            for padded_seqs in RAGGED_SEQS:
                # The padding's tokens need a sequence of their own.
                if num_tokens <= padded_tokens <= room and num_seqs < padded_seqs <= padded_tokens:
                    return RaggedSize(padded_tokens, padded_seqs, len(self._tables))
        return None

    def ragged_sizes(self, most_tokens: int, most_seqs: int) -> list[RaggedSize]:
        """All sizes that `ragged_size` returns for steps up to these many tokens and sequences, the smallest first."""
        steps = product(range(1, min(most_tokens, RAGGED_TOKENS[-1]) + 1), (1, *RAGGED_SEQS))
        found = {self.ragged_size(*step) for step in steps if step[1] <= min(step[0], most_seqs)}
        return sorted((size for size in found if size is not None), key=lambda size: (size.num_tokens, size.num_seqs))

    def _step(self, bucket: int) -> DecodeStep:
        if bucket not in self._steps:
            buffers = self._buffers_of(1 << (bucket - 1).bit_length())
            self._steps[bucket] = DecodeStep(self._model, self._kv_cache, buffers, bucket)
        return self._steps[bucket]

    def _buffers_of(self, num_seqs: int) -> DecodeBuffers:
        if num_seqs not in self._buffers:
            self._buffers[num_seqs] = DecodeBuffers(self._tables, num_seqs, self._model.config.vocab_size)
        return self._buffers[num_seqs]

    def _cascade(self, step: DecodeStep) -> CascadeStep:
        bucket = step.columns.shape[1]
        if bucket not in self._cascades:
            assert self._begin_cascade is not None
            self._cascades[bucket] = CascadeStep(step, self._model, self._kv_cache, self._begin_cascade)
        return self._cascades[bucket]


def bucket_of(num_seqs: int) -> int | None:
    """The size that a step of `num_seqs` sequences is padded to; None if it isn't captured. O(1)."""
    if num_seqs > MAX_BUCKET:
        return None
    return -(-num_seqs // FINE_STEP) * FINE_STEP if num_seqs > FINE_FROM else 1 << (num_seqs - 1).bit_length()


def run_in_place(step: FixedStep) -> Replay:
    """A replay that simply runs the step again, for machines without a GPU."""
    return step.compute


class GraphCapture:
    """Captures steps as CUDA graphs, which share one pool of memory: only one of them runs at a time.

    All are captured in one stream of this object, in which each step has run once before. torch keeps a cuBLAS
    workspace per stream. So the workspace is allocated outside the pool, and isn't shared with the graphs of other
    objects, which may be deleted first.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, step: FixedStep) -> Replay:
        """Capture a step whose columns are all padding, so that running it changes nothing."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # of the current device
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):  # torch's own context doesn't put the stream back if a capture fails
            step.compute()  # compiles the kernels, and lets libraries allocate what they keep
            before.wait_stream(self._stream)
            if not self._graphs:  # torch refuses a pool without graphs if any of its memory is still in use
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile, to move blocks. So only this thread's calls are checked.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                logits = step.compute()
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
