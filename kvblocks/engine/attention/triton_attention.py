"""Attention by the Triton kernels: on a GPU, and on a CPU in Triton's interpreter.

Which kernel computes what:

- A step in which every sequence has one row is a decode step. `decode` (stream-K) computes it, and spreads all contexts
  evenly over the GPU. If the step was begun with shared runs, `cascade_decode` computes it.
- In any other step, `decode` computes the leading sequences that have one row each, and `extend` computes the rest.
  (`extend` could compute all in one launch, but its tiles of many rows are for prompts.) The scheduler puts running
  requests first, so the leading sequences are nearly always all decodes of the step.
- Batch-invariant (`is_tiled`): `extend` computes everything, in its batch-invariant form. A row then goes through the
  same operations, and has the same bits, whether it is decoded, prefilled, or computed again behind a cached prefix.
  (`decode` with splits of a fixed size does not depend on the batch either, but its bits are not those of a prefill.)

Layers with the same window divide the work among programs in the same way, so the first of them computes the division
for all. Nothing here reads a tensor on the host.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvblocks.engine.attention.attention import HeadAngles, KVCache, StepAttention
from kvblocks.engine.attention.batch import StepBatch
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layer_attention import LayerAttention
from kvblocks.engine.model.layers import RowOps, TorchRows
from kvblocks.errors import InvalidArgumentError
from kvblocks.kernels.cascade import CascadeShares, OwnParts, cascade_decode, own_parts, share_cascade
from kvblocks.kernels.compiling import compile_seconds
from kvblocks.kernels.decode import decode, share_decodes
from kvblocks.kernels.extend import extend, share_rows
from kvblocks.kernels.launching import Shares
from kvblocks.kernels.layout import (
    BLOCK_SIZES,
    HEAD_DIMS,
    QUERY_DTYPES,
    KernelArgumentError,
    check_fp8_device,
    is_interpreted,
)
from kvblocks.kernels.rows import MAX_COLUMNS, Turn, add_norm, gate, norm, place
from kvblocks.kernels.runs import SharedRuns
from kvblocks.kernels.store import store

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The query, the caches of K and V, the block tables and the lengths."""


@dataclass(frozen=True)
class TritonAttention:
    """Paged attention by the Triton kernels.

    With `is_tiled` a row's bits don't depend on its batch, which is slower.
    """

    is_tiled: bool = False

    def begin(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        """Prepare one step. O(1), without waiting for the device."""
        num_decodes = 0 if self.is_tiled else batch.shape.num_decodes
        rest = batch.query_start[num_decodes:] - num_decodes if num_decodes else batch.query_start
        return TritonStep(batch, kv_cache, num_decodes, rest, self.is_tiled)

    def row_ops(self, config: ModelConfig) -> RowOps:
        """Triton kernels, or plain torch for rows that are too wide for them."""
        return TritonRows(config) if config.hidden_size <= MAX_COLUMNS else TorchRows(config)

    def begin_cascade(self, batch: StepBatch, kv_cache: KVCache, runs: SharedRuns, group: int = 0) -> StepAttention:
        """Prepare a decode step whose sequences share `runs` of blocks. Each run is read once for all.

        O(1), one launch. group: the KV-cache group of the runs' blocks; layers of other groups don't use the runs.
        Raises InvalidArgumentError for a step that isn't all decodes, and for a batch-invariant backend, since a
        cascade's bits depend on which sequences share a prefix.
        """
        num_seqs = batch.seq_lens.shape[0]
        if self.is_tiled or batch.shape.num_decodes != num_seqs:
            raise InvalidArgumentError(
                f"begin_cascade: expected one row of each of {num_seqs} sequences, and a backend that isn't"
                f" batch-invariant; got {batch.shape.num_decodes}, and {self!r}"
            )
        own = own_parts(batch.block_tables[group], batch.seq_lens, runs, kv_cache.block_size)
        return _CascadeStep(batch, kv_cache, num_seqs, batch.query_start, self.is_tiled, runs, own, group)


@dataclass(frozen=True)
class TritonRows:
    """`RowOps` as Triton kernels, with one launch per operation."""

    config: ModelConfig

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """As `RowOps` says."""
        return norm(rows, weight, self.config.rms_norm_eps)

    def add(self, hidden: Tensor, added: Tensor, output_norm: Tensor | None, next_norm: Tensor | None) -> Tensor | None:
        """As `RowOps` says."""
        return add_norm(hidden, added, self.config.rms_norm_eps, output_norm=output_norm, weight=next_norm)

    def gate(self, gate_up: Tensor) -> Tensor:
        """As `RowOps` says."""
        return gate(gate_up, self.config.architecture.activation)


@dataclass(frozen=True)
class TritonStep:
    """One step. The first `num_decodes` sequences are decodes; `rest_start` has the first rows of the other sequences.

    shares: how the work is divided among programs, by kernel and window.
    """

    batch: StepBatch
    kv_cache: KVCache
    num_decodes: int
    rest_start: Tensor
    batch_invariant: bool
    shares: dict[tuple[str, int | None], Shares] = field(default_factory=dict, kw_only=True)

    def store(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """As `StepAttention` says."""
        caches = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        store(key, value, *caches, slot_mapping, **self._scales(layer))

    def place(self, layer: int, heads: Tensor, angles: HeadAngles, slot_mapping: Tensor) -> Tensor:
        """As `PlacingStep` says."""
        rope = angles.rope
        turn = Turn(rope.cos, rope.sin, angles.positions, angles.norm, angles.eps)
        caches, scales = (self.kv_cache.keys[layer], self.kv_cache.values[layer]), self.kv_cache.scales
        own = None if scales is None else (scales.keys[layer], scales.values[layer])
        return place(heads, turn, caches, slot_mapping, own)

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """As `StepAttention` says."""
        caches = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        tables, seq_lens, num_decodes = self.batch.block_tables[how.group], self.batch.seq_lens, self.num_decodes
        options = _options(how) | self._scales(layer)
        if num_decodes == seq_lens.shape[0]:
            return self._decode((query, *caches, tables, seq_lens), options)
        if not num_decodes:
            return self.extend_rest(layer, query, how)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = slice(None, num_decodes)
        self._decode((query[decodes], *caches, tables[decodes], seq_lens[decodes]), options, output[decodes])
        self.extend_rest(layer, query[num_decodes:], how, output[num_decodes:])
        return output

    def extend_rest(self, layer: int, query: Tensor, how: LayerAttention, output: Tensor | None = None) -> Tensor:
        """Attend for the sequences after the decodes. query: their rows. Writes to `output` if it is given."""
        caches = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        tables, seq_lens = self.batch.block_tables[how.group], self.batch.seq_lens
        if self.num_decodes:
            tables, seq_lens = tables[self.num_decodes :], seq_lens[self.num_decodes :]
        return self._extend((query, *caches, tables, seq_lens), _options(how) | self._scales(layer), output)

    def _decode(self, tensors: _Tensors, options: dict[str, Any], output: Tensor | None = None) -> Tensor:
        query, keys, *_, seq_lens = tensors
        window = options["window"]
        kind = "decodes", window
        if kind not in self.shares:
            self.shares[kind] = share_decodes(query, keys, seq_lens, window=window)
        return decode(*tensors, output=output, shares=self.shares[kind], **options)[0]

    def _extend(self, tensors: _Tensors, options: dict[str, Any], output: Tensor | None = None) -> Tensor:
        query, keys, values, tables, seq_lens = tensors
        window = options["window"]
        kind = "rows", window
        start, is_fixed = self.rest_start, self.batch_invariant
        if kind not in self.shares:
            rows = (query, keys, start, seq_lens)
            self.shares[kind] = share_rows(*rows, window=window, batch_invariant=is_fixed)
        how = options | {"batch_invariant": is_fixed, "shares": self.shares[kind], "output": output}
        return extend(query, keys, values, tables, start, seq_lens, **how)[0]

    def _scales(self, layer: int) -> dict[str, Tensor]:
        """The factors of K and V in 8 bits, as arguments of the kernels."""
        scales = self.kv_cache.scales
        return {} if scales is None else {"k_scale": scales.keys[layer], "v_scale": scales.values[layer]}


@dataclass(frozen=True)
class _CascadeStep(TritonStep):
    """A decode step whose sequences share runs of blocks of a group. own: each sequence's part behind its runs.

    cascade_shares: empty until the first layer has made them, for all.
    """

    runs: SharedRuns
    own: OwnParts
    group: int
    cascade_shares: list[CascadeShares] = field(default_factory=list, kw_only=True)

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        if not how.kind.sees_all or how.group != self.group:
            return super().attend(layer, query, how)
        keys, values, tables = (
            self.kv_cache.keys[layer],
            self.kv_cache.values[layer],
            self.batch.block_tables[self.group],
        )
        if not self.cascade_shares:
            self.cascade_shares.append(share_cascade(query, keys, self.own, self.runs))
        options: dict[str, Any] = {"scale": how.scale, "softcap": how.softcap} | self._scales(layer)
        options["shares"] = self.cascade_shares[0]
        return cascade_decode(query, keys, values, self.own, tables, self.runs, **options)[0]


def watch_compiling() -> AbstractContextManager[dict[str, float]]:
    """Measure compiling inside this context: seconds by kernel name, as `kernels.compiling` says."""
    return compile_seconds()


def check_device(block_size: int, device: torch.device) -> None:
    """Raise InvalidArgumentError for a block size or a device that the kernels don't support, whatever the model."""
    if device.type != "cuda" and not is_interpreted():
        raise InvalidArgumentError(
            "attention='triton': expected a CUDA device, or TRITON_INTERPRET=1 in the environment before Python starts"
            f" (slow, for tests); got the device {str(device)!r}"
        )
    _check_among({"a block_size": (block_size, BLOCK_SIZES)})


def check_supported(config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise InvalidArgumentError for a model, block size, dtype or device that the kernels don't support."""
    check_device(block_size, device)
    _check_among({"a head_dim": (config.head_dim, HEAD_DIMS), "a dtype": (dtype, QUERY_DTYPES)})


def _check_among(wanted: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
    for name, (got, supported) in wanted.items():
        if got not in supported:
            choices = ", ".join(map(str, supported))
            raise InvalidArgumentError(
                f"attention='triton': expected {name} among {choices}, got {got}; attention='torch' takes any"
            )


def check_8_bit(device: torch.device) -> None:
    """Raise InvalidArgumentError for a device that can't convert e4m3."""
    try:
        check_fp8_device(device)
    except KernelArgumentError as error:
        raise InvalidArgumentError(f"kv_cache_dtype='fp8_e4m3': {error}; attention='torch' takes any device") from error


def _options(how: LayerAttention) -> dict[str, Any]:
    return {"scale": how.scale, "window": how.kind.window_tokens, "softcap": how.softcap}
