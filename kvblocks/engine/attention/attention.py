"""The paged KV cache, the protocol of attention backends, and the backends in plain torch.

A backend makes one `StepAttention` per step, and computes there what all layers share. The model then calls it layer by
layer, first to store K and V, then to attend. `triton_attention` and `flash_attention` implement the same two
protocols.

Invariant: all K and V of a step are stored in a layer before any of its queries attends there, since a sequence may
share blocks that another sequence of the same step fills.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvblocks import Group
from kvblocks.engine.attention.batch import StepBatch
from kvblocks.engine.attention.kv_scales import KVScales
from kvblocks.engine.attention.latents import attend_latents
from kvblocks.engine.attention.state_memory import StateMemory
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.hybrid.latent import LatentHeads
from kvblocks.engine.model.layer_attention import LayerAttention, LayerLocation
from kvblocks.engine.model.layers import RowOps, TorchRows
from kvblocks.engine.model.rope import RopeTable
from kvblocks.engine.sampling.weights import to_device
from kvblocks.errors import InvalidArgumentError
from kvblocks.kernels import reference

if TYPE_CHECKING:
    from kvblocks.kernels.copy import CacheTable


@dataclass(frozen=True)
class KVCache:
    """K and V of every layer: one tensor [num_blocks, block_size, num_kv_heads, head_dim] each.

    In models with latent attention, keys and values are the same tensor, which holds one entry per token instead of
    heads.

    Layers of different groups may share tensors, since a block belongs to one group at a time. The tensors are views of
    `memory`. On a CPU, `memory` is one tensor [num_blocks, parts of a block, block_size, num_kv_heads, head_dim], so a
    block is contiguous and one copy moves it. On other devices, `memory` has a tensor [2, num_blocks, ...] ([1, ...]
    with latent attention) for each layer of a block, so a layer is contiguous. copies_by_kernel: whether one launch of
    a Triton kernel copies blocks of all layers; otherwise torch copies them. scales: the factors that K and V were
    divided by, for tensors in e4m3. states: the recurrent states, in models whose layers keep some. Those layers have
    no tensors here, and layer numbers skip them.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    memory: tuple[Tensor, ...]
    copies_by_kernel: bool = False
    scales: KVScales | None = None
    states: StateMemory | None = None

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        layer_locations: Sequence[LayerLocation] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "KVCache":
        """A zeroed cache for a model of this shape. Raises InvalidArgumentError for sizes below 1.

        layer_locations: where each layer that attends keeps its KV. Layers of different groups with the same slot share
        memory. None: every layer has memory of its own.
        """
        if num_blocks < 1 or block_size < 1:
            raise InvalidArgumentError(
                f"expected num_blocks and block_size of at least 1, got {num_blocks} and {block_size}"
            )
        shape = (block_size, config.num_kv_heads, config.head_dim)
        slots = range(len(config.attending)) if layer_locations is None else [slot for _, slot in layer_locations]
        places = {slot: place for place, slot in enumerate(dict.fromkeys(slots))}
        each = 2 if config.latent is None else 1  # tensors of a layer
        if torch.device(device).type == "cpu":
            whole = zeros_when_touched((num_blocks, each * len(places), *shape), dtype)
            parts = [(whole[:, each * place], whole[:, each * place + each - 1]) for place in places.values()]
            memory: tuple[Tensor, ...] = (whole,)
        else:
            memory = tuple(torch.zeros(each, num_blocks, *shape, dtype=dtype, device=device) for _ in places)
            parts = [(own[0], own[-1]) for own in memory]
        by_kernel = memory[0].is_cuda and find_spec("triton") is not None and config.head_dim % 8 == 0
        keys, values = zip(*[parts[places[slot]] for slot in slots], strict=True)
        return cls(keys, values, memory, by_kernel)

    @property
    def num_blocks(self) -> int:
        """Blocks in every layer."""
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.keys[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """The bytes of all layers. Shared memory counts once."""
        return sum(tensor.nbytes for tensor in self.memory)

    @property
    def num_block_bytes(self) -> int:
        """The bytes of a block in all layers together."""
        return self.num_bytes // self.num_blocks

    @cached_property
    def block_rows(self) -> Tensor | None:
        """The bytes of every block, uint8 [num_blocks, num_block_bytes], where a block is contiguous; else None."""
        return self.memory[0].flatten(1).view(torch.uint8) if self.memory[0].is_cpu else None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The parts of a block, in order: the layers' tensors of K and V, each once. O(layers)."""
        pairs = zip(self.keys, self.values, strict=True)
        return tuple({tensor.data_ptr(): tensor for tensor in chain.from_iterable(pairs)}.values())

    @property
    def parts_per_block(self) -> int:
        """The distance between two blocks of a layer, counted in blocks of one layer."""
        return self.keys[0].stride(0) // self.keys[0][0].numel()

    @cached_property
    def rows(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """K and V of every layer as contiguous tensors, in which block i is at `i * parts_per_block`."""
        return tuple(
            (self._rows_of(key), self._rows_of(value)) for key, value in zip(self.keys, self.values, strict=True)
        )

    @cached_property
    def slots(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """`rows` by slots: K and V of every layer, [num_slots, num_kv_heads, head_dim]."""
        return tuple((keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self.rows)

    def row_slots(self, slot_mapping: Tensor) -> Tensor:
        """Return the slots in `rows` for slots of blocks, int64 of any shape; -1 stays. O(slots)."""
        size, step = self.block_size, self.parts_per_block
        if step == 1:
            return slot_mapping
        spread = slot_mapping + slot_mapping.div(size, rounding_mode="floor") * (size * (step - 1))
        return torch.where(slot_mapping < 0, slot_mapping, spread)

    def _rows_of(self, part: Tensor) -> Tensor:
        num_parts = (len(part) - 1) * self.parts_per_block + 1
        return part.as_strided((num_parts, *part.shape[1:]), (part[0].numel(), *part.stride()[1:]))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer of every group, as if the (source, destination) pairs came one by one, in order.

        Raises InvalidArgumentError for ids that the cache doesn't have, before anything changes. O(pairs x bytes of a
        block).
        """
        if not pairs:
            return
        for block_id in chain.from_iterable(pairs):
            if not 0 <= block_id < self.num_blocks:
                raise InvalidArgumentError(
                    f"copy_blocks: expected block ids from 0 to {self.num_blocks - 1}, got {block_id}"
                )
        ids = torch.tensor(pairs, dtype=torch.int64)
        if self.copies_by_kernel:
            from kvblocks.kernels import copy  # needs triton

            with torch.cuda.device_of(self.keys[0]):
                copy.copy_blocks(self._copy_table, to_device(ids, self.keys[0].device))
        else:
            reference.copy_blocks(self.memory if self.parts_per_block > 1 else self.parts, ids)

    def gather_blocks(self, block_ids: Tensor, staging: Tensor) -> None:
        """Copy blocks of all layers into a buffer on the cache's device.

        For caches whose layers are contiguous, as on a GPU. block_ids: int64 [num_ids]; staging: uint8 [num_ids,
        num_block_bytes], contiguous, a row for each block.
        """
        ids = to_device(block_ids, staging.device)
        if self.copies_by_kernel:
            from kvblocks.kernels import copy  # needs triton

            copy.gather_blocks(self._copy_table, ids, staging)
        else:
            parts = map(reference.as_indexed, self.parts)
            found = [part.index_select(0, ids).flatten(1).view(torch.uint8) for part in parts]
            torch.cat(found, dim=1, out=staging)

    def scatter_blocks(self, block_ids: Tensor, staging: Tensor) -> None:
        """Copy a buffer that `gather_blocks` filled into these blocks, which must be distinct. Changes the cache."""
        ids = to_device(block_ids, staging.device)
        if self.copies_by_kernel:
            from kvblocks.kernels import copy  # needs triton

            copy.scatter_blocks(self._copy_table, ids, staging)
            return
        parts = map(reference.as_indexed, self.parts)
        for part, given in zip(parts, staging.chunk(len(self.parts), dim=1), strict=True):
            part.index_copy_(0, ids, given.contiguous().view(part.dtype).view(len(ids), *part.shape[1:]))

    def move_states(self, slots: Tensor, pieces: Sequence[tuple[int, int, int]], *, saving: bool) -> None:
        """Copy states between slots and blocks, in one launch. Requires `copies_by_kernel`.

        slots: uint8 [num_slots, bytes of a state]. pieces: triples of a slot, the index of a block within its state,
        and a block id of the cache. No two pieces may write to the same place. With `saving` this changes the cache,
        otherwise the slots.
        """
        from kvblocks.kernels import copy  # needs triton

        move = copy.save_states if saving else copy.restore_states
        with torch.cuda.device_of(slots):
            move(self._copy_table, slots, to_device(torch.tensor(pieces, dtype=torch.int64), slots.device))

    @cached_property
    def _copy_table(self) -> "CacheTable":
        """The caches in the form that copy kernels take. Waits for the device once."""
        from kvblocks.kernels.copy import CacheTable

        return CacheTable.of(self.parts)


def zeros_when_touched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor on the CPU whose pages take memory when they are first written, so an unused pool takes little.

    It begins at a page boundary. On systems without private mappings it takes its memory at once. Raises OSError if the
    system refuses the memory.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype)
    mapping = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)  # the tensor keeps the mapping alive


class StepAttention(Protocol):
    """Attention of one step over one cache."""

    def store(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write K and V of some rows to their slots; -1 stores nothing.

        key, value: [num_rows, num_kv_heads, head_dim]; slot_mapping: int64 [num_rows]. Changes the cache.
        """

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """Attend for all rows of the batch, in order: [num_tokens, num_heads, head_dim] to the same shape."""


@dataclass(frozen=True)
class HeadAngles:
    """How the heads of queries and keys are normed and then rotated by position, before keys are stored.

    norm: the norm's weights, [num_heads + num_kv_heads, head_dim], or None for no norm; eps: the norm's epsilon;
    positions: int64 [num_rows].
    """

    rope: RopeTable
    positions: Tensor
    norm: Tensor | None
    eps: float


@runtime_checkable
class PlacingStep(Protocol):
    """A `StepAttention` that norms, rotates and stores heads itself, as they come from the matrix product."""

    def place(self, layer: int, heads: Tensor, angles: HeadAngles, slot_mapping: Tensor) -> Tensor:
        """Norm and rotate the heads of queries and K, write K and V to their slots, and return the queries.

        heads: [num_rows, num_heads + 2 * num_kv_heads, head_dim], of queries, K and V; slot_mapping: as in `store`.
        Returns [num_rows, num_heads, head_dim], new. Changes the cache.
        """


@runtime_checkable
class LatentStep(Protocol):
    """A `StepAttention` that also supports latent attention, where queries attend to entries instead of K and V."""

    def attend_latents(self, layer: int, query: Tensor, how: LayerAttention, heads: LatentHeads) -> Tensor:
        """Attend for all rows of the batch: [num_tokens, num_heads, key_dim] to [num_tokens, num_heads, value_dim]."""


class AttentionBackend(Protocol):
    """A way to compute paged attention."""

    @property
    def is_tiled(self) -> bool:
        """Whether a row's bits depend only on its sequence and position, not on chunking, caching or the batch."""

    def begin(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        """Prepare one step. The result is valid for this batch only."""

    def row_ops(self, config: ModelConfig) -> RowOps:
        """The operations between a model's products, for the device of this attention."""


Planner = Callable[[Tensor, Tensor, Tensor, int, reference.Sight], reference.AttentionPlan]


@dataclass(frozen=True)
class _PlannedStep:
    """A step of the torch backends: a plan for each group and kind of layers, made when the first layer asks for it."""

    batch: StepBatch
    kv_cache: KVCache
    planner: Planner
    plans: dict[tuple[int, Group], reference.AttentionPlan] = field(default_factory=dict)
    stores: dict[int, tuple[Tensor, reference.StorePlan]] = field(default_factory=dict)

    def store(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        scales = self.kv_cache.scales
        if scales is not None:
            key, value = (
                rows / of[layer][:, None].to(rows.dtype) for rows, of in ((key, scales.keys), (value, scales.values))
            )
        reference.store_planned(key, value, *self.kv_cache.slots[layer], self._plan_store(slot_mapping))

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        keys, values = self.kv_cache.slots[layer]
        scales, plan = self.kv_cache.scales, self._plan(how)
        if scales is None:
            return reference.attend(plan, query, keys, values, scale=how.scale, softcap=how.softcap)
        # A scale for each query head. Scales are powers of 2, so it loses no bits to multiply queries and outputs.
        shared = query.shape[1] // keys.shape[1]
        key_scale, value_scale = (
            of[layer].repeat_interleave(shared)[:, None].to(query.dtype) for of in (scales.keys, scales.values)
        )
        attended = reference.attend(plan, query * key_scale, keys, values, scale=how.scale, softcap=how.softcap)
        return attended * value_scale

    def attend_latents(self, layer: int, query: Tensor, how: LayerAttention, heads: LatentHeads) -> Tensor:
        return attend_latents(self._plan(how), query, self.kv_cache.slots[layer][0], heads, how.scale)

    def _plan(self, how: LayerAttention) -> reference.AttentionPlan:
        kind = how.group, how.kind
        if kind not in self.plans:
            batch = self.batch
            block_tables = batch.block_tables[how.group] * self.kv_cache.parts_per_block
            tables = (block_tables, batch.query_start, batch.seq_lens)
            sight = reference.Sight(how.kind.window_tokens, how.kind.chunk_tokens)
            self.plans[kind] = self.planner(*tables, self.kv_cache.block_size, sight)
        return self.plans[kind]

    def _plan_store(self, slot_mapping: Tensor) -> reference.StorePlan:
        """The plan for a layer's slots, made once for all layers that pass the same tensor."""
        known = self.stores.get(id(slot_mapping))
        if known is None:
            plan = reference.plan_store(self.kv_cache.row_slots(slot_mapping))
            known = self.stores[id(slot_mapping)] = slot_mapping, plan  # the tensor is kept, so its id isn't reused
        return known[1]


@dataclass(frozen=True)
class TorchAttention:
    """Paged attention in plain torch, at natural shapes. Runs on any device."""

    is_tiled: bool = False

    def begin(self, batch: StepBatch, kv_cache: KVCache) -> StepAttention:
        """Plan the step. O(tokens in context), once for each distinct window or chunk size among the layers."""
        return _PlannedStep(batch, kv_cache, reference.plan_tiled if self.is_tiled else reference.plan_paged)

    def row_ops(self, config: ModelConfig) -> RowOps:
        """Operations in plain torch."""
        return TorchRows(config)


@dataclass(frozen=True)
class TiledTorchAttention(TorchAttention):
    """Paged attention in plain torch for the deterministic modes, in tiles of 16 aligned positions."""

    is_tiled: bool = True
