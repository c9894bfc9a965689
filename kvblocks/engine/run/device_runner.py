"""The model side of a step on a device: block tables stay there, and decode steps may be replayed.

It does the same as `ModelRunner`. Every step is checked on the host, from what the host knows, since reading a tensor
would wait for the device. Then the step is uploaded and computed. A decode step, or one with short prompts, runs in its
bucket's fixed buffers, so that it can be a CUDA graph. A decode step runs as a cascade if that pays off. Other steps
run directly.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from kvblocks.engine.attention.batch import StepBatch, StepColumns
from kvblocks.engine.attention.cascade import CascadePlanner, RunBucket
from kvblocks.engine.attention.kv_scales import KVScales
from kvblocks.engine.run.decode_step import RAGGED_TOKENS, Capture, DecodeBuckets, bucket_of
from kvblocks.engine.run.forward import DecoderModel, Score
from kvblocks.engine.run.resident_table import ResidentTable
from kvblocks.engine.run.runner import ModelRunner
from kvblocks.engine.run.step_upload import DECODE_COLUMNS, RaggedSize, StepUploader, UploadCounts
from kvblocks.engine.run.warm_up import WarmUpStep, batches, padding_batch
from kvblocks.engine.sampling.batch_sampler import DrawTokens
from kvblocks.engine.schedule.step import ScheduledChunk
from kvblocks.errors import InvalidArgumentError


class DeviceRunner(ModelRunner):
    """Runs steps of one model over a KV cache of `num_blocks` blocks, on the model's device.

    scales: the factors of K and V in 8 bits, as in `ModelRunner`. capture: captures small steps for replay; None: no
    step is captured. cascade: finds the shared runs of decode steps; None: no cascades.
    Attributes: num_cascades, num_replays, num_ragged_replays, uploads, draw_tokens. Raises InvalidArgumentError for
    sizes below 1.
    """

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        block_size: int,
        *,
        scales: KVScales | None = None,
        capture: Capture | None = None,
        cascade: CascadePlanner | None = None,
    ) -> None:
        super().__init__(model, num_blocks, block_size, scales=scales)
        self.num_cascades = 0
        device = model.weights.embedding.device
        self._device = device
        max_blocks = -(-model.config.max_position_embeddings // block_size)
        if any(how.kind.sees_all for how in model.layer_attention):  # with only windows, a context may exceed the pool
            max_blocks = min(num_blocks, max_blocks)
        tables = [ResidentTable(num_blocks, max_blocks, device) for _ in range(model.num_groups)]
        self._uploader = StepUploader(tables, block_size)
        self._cascade = cascade
        # A strategy that aligns rows reads their number from the device, which no capture allows.
        can_capture = capture is not None and not model.strategy.is_aligned
        begin = None if cascade is None else cascade.begin
        self._buckets = DecodeBuckets(model, self.kv_cache, tables, capture, begin) if capture and can_capture else None

    @property
    def num_slice_layers(self) -> int:
        """Always 1: this runner computes a chunk through all layers at once."""
        return 1

    @property
    def num_replays(self) -> int:
        """How many decode steps ran in a bucket."""
        return self._buckets.num_replays if self._buckets else 0

    @property
    def num_ragged_replays(self) -> int:
        """How many steps with prompts ran in a bucket."""
        return self._buckets.num_ragged_replays if self._buckets else 0

    @property
    def uploads(self) -> UploadCounts:
        """What steps have uploaded so far, without shared runs, which the cascade planner counts."""
        return self._uploader.counts

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk], score: Score | None = None, drawn: Tensor | None = None) -> Tensor:
        """Compute all chunks in one forward pass: float32 logits [chunks that sample, vocab]. Changes the KV cache.

        score, drawn: as in `ModelRunner`. The logits are valid until the next step, which the device may be given
        before they are used there. Raises InvalidArgumentError, before anything is written, for a token id or a
        position that the model doesn't have, and ModelError if the number of torch threads differs from the one that
        was checked.
        """
        step = columns_of(chunks, self.model.num_groups)
        self._check(step, 0 if drawn is None else len(drawn))
        with self._on_device():
            self.kv_cache.copy_blocks([pair for chunk in chunks for pair in chunk.copies])
            if score is None and step.is_decode:
                return self._decode(chunks, step, drawn)
            size = self._ragged_size(step) if score is None else None
            if size is not None:
                assert self._buckets is not None
                logits = self._buckets.run_ragged(self._uploader.upload_ragged(step, size, drawn), size)
                return logits[: sum(step.wants_logits)]
            return self._compute(self._uploader.batch(self._uploader.upload(step, drawn)), score)

    def _ragged_size(self, step: StepColumns) -> RaggedSize | None:
        """What a step with a prompt is padded to for its graph; None: it runs without one."""
        if self._buckets is None or self.model.strategy.is_deterministic:
            return None
        return self._buckets.ragged_size(len(step.token_ids), len(step.starts))

    def warm_up_steps(self, max_num_seqs: int, max_num_tokens: int = max(RAGGED_TOKENS)) -> list[WarmUpStep]:
        """Prompts, decodes with prompts, decode steps and cascades of all buckets, draws, and copies of blocks."""
        tables, size = self._uploader.tables, self.kv_cache.block_size
        steps: list[WarmUpStep] = [
            (name, partial(self._compute, batch))
            for name, batch in batches(tables, size, self.model.config.max_position_embeddings)
        ]
        for table in tables:
            table.reserve(max_num_seqs)
        sizes = map(bucket_of, range(1, max_num_seqs + 1))
        buckets = sorted({bucket for bucket in sizes if bucket is not None})
        if self._buckets is None:
            decodes = padding_batch(tables, size, [1, 1], 1)
            steps.append(("decodes", partial(self._compute, decodes)))
        else:
            steps += [(f"decodes of {bucket}", partial(self._replay, bucket)) for bucket in buckets]
            if not self.model.strategy.is_deterministic:
                for one in self._buckets.ragged_sizes(max_num_tokens, max_num_seqs):
                    name = f"{one.num_tokens} tokens of {one.num_seqs} prompts"
                    steps.append((name, partial(self._buckets.run_ragged, None, one)))
        if self._cascade is not None:
            steps.append(("cascades", self._cascade_once))
            if self._buckets is not None:
                sharing = (bucket for bucket in buckets if bucket > 1)
                steps += [(f"cascades of {bucket}", partial(self._replay, bucket, shares=True)) for bucket in sharing]
        if self.draw_tokens is not None:
            steps.append(("draws", partial(self._draw_once, self.draw_tokens)))
        steps.append(("copies", self._copy_once))
        return [(name, partial(self._run_on_device, step)) for name, step in steps]

    @torch.inference_mode()
    def _run_on_device(self, step: Callable[[], object]) -> None:
        with self._on_device():
            step()

    def _compute(self, batch: StepBatch, score: Score | None = None) -> Tensor:
        return self.model.compute(batch, self.model.attention.begin(batch, self.kv_cache), score)

    def _replay(self, bucket: int, *, shares: bool = False) -> Tensor:
        """Run a bucket's step on padding. shares: run its cascade, without runs."""
        assert self._buckets is not None
        num_columns = DECODE_COLUMNS + len(self._uploader.tables)
        columns = torch.zeros(num_columns, bucket, dtype=torch.int32, device=self._device)
        columns[DECODE_COLUMNS - 1] = 1
        num_values = RunBucket.of(bucket).num_values
        packed = torch.zeros(num_values, dtype=torch.int32, device=self._device) if shares else None
        return self._buckets.run(columns, bucket, packed)

    def _copy_once(self) -> None:
        """Copy a block onto itself, within the caches and through a buffer."""
        cache = self.kv_cache
        cache.copy_blocks([(0, 0)])
        staging = torch.empty(1, cache.num_block_bytes, dtype=torch.uint8, device=self._device)
        block_id = torch.zeros(1, dtype=torch.int64)
        cache.gather_blocks(block_id, staging)
        cache.scatter_blocks(block_id, staging)

    def _draw_once(self, draw_tokens: DrawTokens) -> Tensor:
        """Draw a token, by all of what the kernel does."""
        vocab_size = self.model.config.vocab_size
        logits = torch.zeros(1, vocab_size, dtype=torch.float32, device=self._device)
        parameters = [[0, 1.0, vocab_size, 0.5, 0.0, 0.5]]
        return draw_tokens(logits, torch.tensor(parameters, dtype=torch.float64).to(self._device))

    def _cascade_once(self) -> Tensor:
        """Run a decode step of two sequences that share a block."""
        assert self._cascade is not None
        batch = padding_batch(self._uploader.tables, self.kv_cache.block_size, [1, 1], self.kv_cache.block_size)
        return self.model.compute(batch, self._cascade.begin_any(batch, self.kv_cache))

    def _decode(self, chunks: Sequence[ScheduledChunk], step: StepColumns, drawn: Tensor | None) -> Tensor:
        """Compute one token of each sequence."""
        num_seqs = len(chunks)
        bucket = None if self._buckets is None else bucket_of(num_seqs)
        runs, packed = None, None
        if self._cascade is not None:
            room = None if bucket is None else RunBucket.of(bucket)
            runs = self._cascade.plan([chunk.request.sequence for chunk in chunks], room)
            packed = self._cascade.packed
            self.num_cascades += runs is not None
        if self._buckets is not None and bucket is not None and (runs is None or packed is not None):
            return self._buckets.run(self._uploader.upload_decodes(step, bucket, drawn), num_seqs, packed)
        batch = self._uploader.batch(self._uploader.upload(step, drawn))
        if self._cascade is None or runs is None:
            return self._compute(batch)
        return self.model.compute(batch, self._cascade.begin(batch, self.kv_cache, runs))

    def _check(self, step: StepColumns, num_drawn: int) -> None:
        """Raise what `DecoderModel.forward` would, without reading from the device. The uploader checks block ids.

        num_drawn: how many tokens the step before has drawn, which codes below 0 may stand for.
        """
        config = self.model.config
        self.model.check_threads()
        low, high = min(step.token_ids), max(step.token_ids)
        if low < -num_drawn or high >= config.vocab_size:
            got = low if low < -num_drawn else high
            raise InvalidArgumentError(f"expected token ids from 0 to {config.vocab_size - 1}, got {got}")
        first, end = min(step.starts), max(step.seq_lens)
        if first < 0 or end > config.max_position_embeddings:
            got = first if first < 0 else end - 1
            raise InvalidArgumentError(f"expected positions from 0 to {config.max_position_embeddings - 1}, got {got}")

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the model's device the current one, on which kernels are launched."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def columns_of(chunks: Sequence[ScheduledChunk], num_groups: int) -> StepColumns:
    """The chunks of a step by columns. Their block tables are the sequences' own lists. O(tokens + groups x chunks)."""
    sequences = [chunk.request.sequence for chunk in chunks]
    if sequences[0].side_tables is None:
        tables = [[own.block_ids for own in sequences]]
    else:
        tables = [[own.group_block_ids(group) for own in sequences] for group in range(num_groups)]
    return StepColumns(
        token_ids=[*chain.from_iterable([chunk.token_ids for chunk in chunks])],
        lengths=[chunk.num_tokens for chunk in chunks],
        starts=[chunk.start for chunk in chunks],
        num_readonly_tokens=[own.num_readonly_tokens for own in sequences],
        wants_logits=[chunk.samples for chunk in chunks],
        block_tables=tables,
    )
