"""Copies whole blocks of all layers within the caches or to and from a staging buffer, and states to and from slots.

Copies move bytes, and do not distinguish K, V or layers. A `CacheTable` lists the caches on the device, so that one
launch serves all of them. Make it once, when the caches are allocated. In a staging buffer, a block's bytes of all
caches are contiguous, so blocks move to or from host memory in one transfer: `buffer.copy_(staging,
non_blocking=True)`.

A slot has the bytes of a recurrent state, which layers rewrite. A checkpoint has them cut into blocks, which may be
anywhere. Within a block they continue from one cache to the next, as in a staging buffer, so they need no such buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.layout import (
    KernelArgumentError,
    check_contiguous,
    check_devices,
    check_dtype,
    check_indices,
    check_shape,
)

_WORD_BYTES = 8
_ALIGNMENT = 16
"""Addresses must be multiples of this many bytes, so that one instruction moves two words."""

_CHUNK_WORDS = 1024
"""How many words a program moves at once: 64 bytes per thread."""


@dataclass(frozen=True)
class CacheTable:
    """The caches of all layers, for the kernels of this module. Make one with `CacheTable.of`.

    `addresses`: int64 [num_caches], on the caches' device: where each cache begins. The table also refers to the
    caches, since they must outlive the addresses. A block takes `block_bytes` in each cache, and blocks begin
    `stride_bytes` apart.
    """

    caches: tuple[Tensor, ...]
    addresses: Tensor
    block_bytes: int
    stride_bytes: int

    @classmethod
    def of(cls, caches: Tensor | Sequence[Tensor]) -> "CacheTable":
        """Make the table of caches: a list of tensors [num_blocks, ...] of one shape, or one [num_caches, ...] tensor.

        The elements of a block must be adjacent, in any order; blocks may be apart. Raises KernelArgumentError. Waits
        for the device once, so don't call it in a decode step or a CUDA graph.
        """
        tensors = tuple(caches.unbind(0) if isinstance(caches, Tensor) else caches)
        if not tensors:
            raise KernelArgumentError("caches: expected at least one, got none")
        first = tensors[0]
        if first.dim() < 2 or first.numel() == 0:
            raise KernelArgumentError(f"caches: expected the shape [num_blocks, ...], got {tuple(first.shape)}")
        for index, tensor in enumerate(tensors):
            name = f"caches[{index}]"
            check_shape(name, tensor, tuple(first.shape))
            check_dtype(name, tensor, (first.dtype,))
            check_devices(**{"caches[0]": first, name: tensor})
            if tensor.stride() != first.stride():
                raise KernelArgumentError(f"{name}: expected the strides {first.stride()}, got {tensor.stride()}")
        block_bytes = first[0].numel() * first.element_size()
        stride_bytes = first.stride(0) * first.element_size()
        _check_blocks(first, block_bytes, stride_bytes)
        starts = [tensor.data_ptr() for tensor in tensors]
        if any(start % _ALIGNMENT for start in starts):
            raise KernelArgumentError(f"caches: expected addresses in multiples of {_ALIGNMENT} bytes, got {starts}")
        addresses = torch.tensor(starts, dtype=torch.int64, device=first.device)
        return cls(tensors, addresses, block_bytes, stride_bytes)

    @property
    def staging_bytes(self) -> int:
        """The bytes that one block of all caches takes in a staging buffer."""
        return len(self.caches) * self.block_bytes


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["address_ptr", "pair_ptr"])
def copy_kernel(address_ptr, pair_ptr, num_pairs, block_words, stride_words, CHUNK: tl.constexpr):
    """Copy one chunk of the block of each pair, pair after pair, in one cache. Grid: (chunks of a block, num_caches).

    address_ptr: int64 [num_caches]; pair_ptr: int64 [num_pairs, 2]. No other program touches a chunk's bytes, so the
    pairs take effect in order. Launch it with num_stages=1, since a load must not be moved before the preceding pair's
    store.
    """
    word = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    is_word = word < block_words
    cache = tl.multiple_of(tl.load(address_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int64)), 16)
    for index in tl.range(num_pairs, num_stages=1):
        source = tl.load(pair_ptr + 2 * index)
        destination = tl.load(pair_ptr + 2 * index + 1)
        content = tl.load(cache + source * stride_words + word, mask=is_word)
        tl.store(cache + destination * stride_words + word, content, mask=is_word)
        # The next pair's source may be this pair's destination, and another thread may load it.
        tl.debug_barrier()


@triton.jit(do_not_specialize_on_alignment=["address_ptr", "id_ptr"])
def stage_kernel(
    address_ptr, id_ptr, staging_ptr, block_words, stride_words, CHUNK: tl.constexpr, GATHERING: tl.constexpr
):
    """Move one chunk of one block between one cache and the staging buffer. Grid: (num_ids, chunks, num_caches).

    address_ptr: int64 [num_caches]; id_ptr: int64 [num_ids]; staging_ptr: int64 [num_ids, num_caches, block_words].
    """
    index = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_word = word < block_words
    cache = tl.multiple_of(tl.load(address_ptr + layer).to(tl.pointer_type(tl.int64)), 16)
    block = cache + tl.load(id_ptr + index) * stride_words
    staged = staging_ptr + (index * tl.num_programs(2) + layer) * block_words
    if GATHERING:
        tl.store(staged + word, tl.load(block + word, mask=is_word), mask=is_word)
    else:
        tl.store(block + word, tl.load(staged + word, mask=is_word), mask=is_word)


@triton.jit(do_not_specialize_on_alignment=["address_ptr", "piece_ptr"])
def state_kernel(
    address_ptr,
    piece_ptr,
    slot_ptr,
    state_words,
    block_words,
    stride_words,
    CHUNK: tl.constexpr,
    SAVING: tl.constexpr,
):
    """Move one chunk of one block between a slot and one cache. Grid: (num_pieces, chunks of a block, num_caches).

    address_ptr: int64 [num_caches]; piece_ptr: int64 [num_pieces, 3]: the slot, which block of the state, and the
    block's id; slot_ptr: int64 [num_slots, state_words]. The last block of a state is only partly filled.
    """
    piece = piece_ptr + tl.program_id(0).to(tl.int64) * 3
    slot, index, block_id = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    layer = tl.program_id(2)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = (index * tl.num_programs(2) + layer) * block_words + word
    is_word = (word < block_words) & (place < state_words)
    cache = tl.multiple_of(tl.load(address_ptr + layer).to(tl.pointer_type(tl.int64)), 16)
    block = cache + block_id * stride_words
    state = slot_ptr + slot * state_words
    if SAVING:
        tl.store(block + word, tl.load(state + place, mask=is_word), mask=is_word)
    else:
        tl.store(state + place, tl.load(block + word, mask=is_word), mask=is_word)


def copy_blocks(table: CacheTable, pairs: Tensor) -> None:
    """Copy blocks within every cache, as if pair by pair: a pair sees what earlier pairs have written.

    pairs: int64 [num_pairs, 2], source and destination block ids. A pair of equal ids changes nothing, so it can serve
    as padding. One launch: O(num_pairs) copies one after another, in parallel over caches and the bytes of a block.
    Raises KernelArgumentError. Changes the caches.
    """
    check_shape("pairs", pairs, (*pairs.shape[:1], 2))
    check_dtype("pairs", pairs, (torch.int64,))
    check_contiguous("pairs", pairs)
    check_devices(caches=table.addresses, pairs=pairs)
    words = table.block_bytes // _WORD_BYTES
    if len(pairs) > 0:
        copy_kernel[(triton.cdiv(words, _CHUNK_WORDS), len(table.caches))](
            *(table.addresses, pairs, len(pairs), words, table.stride_bytes // _WORD_BYTES), CHUNK=_CHUNK_WORDS
        )


def gather_blocks(table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
    """Copy blocks of all caches into a staging buffer.

    block_ids: int64 [num_ids]; staging: uint8 [num_ids, table.staging_bytes], contiguous: row i is block block_ids[i]
    of the first cache, of the second, and so on, with its bytes as they are in memory. Raises KernelArgumentError.
    Changes `staging`.
    """
    _stage(table, block_ids, staging, gathering=True)


def scatter_blocks(table: CacheTable, block_ids: Tensor, staging: Tensor) -> None:
    """Copy a staging buffer that `gather_blocks` filled into blocks of all caches.

    Shapes are as there. The ids must be distinct. Raises KernelArgumentError. Changes the caches.
    """
    _stage(table, block_ids, staging, gathering=False)


def save_states(table: CacheTable, slots: Tensor, pieces: Tensor) -> None:
    """Copy states from slots into blocks.

    slots: uint8 [num_slots, bytes of a state], contiguous. pieces: int64 [num_pieces, 3]: a slot, the index of a block
    within its state, and the block's id in the caches; ids must be distinct. Bytes of a state's last block after the
    state's end stay unchanged. One launch, O(bytes). Raises KernelArgumentError. Changes the caches.
    """
    _move(table, slots, pieces, saving=True)


def restore_states(table: CacheTable, slots: Tensor, pieces: Tensor) -> None:
    """Copy states from blocks into slots.

    Arguments are as in `save_states`; each block of a slot's state comes at most once. Raises KernelArgumentError.
    Changes the slots.
    """
    _move(table, slots, pieces, saving=False)


def _stage(table: CacheTable, block_ids: Tensor, staging: Tensor, *, gathering: bool) -> None:
    check_indices("block_ids", block_ids, block_ids.numel(), torch.int64)
    check_shape("staging", staging, (len(block_ids), table.staging_bytes))
    check_dtype("staging", staging, (torch.uint8,))
    check_contiguous("staging", staging)
    check_devices(caches=table.addresses, block_ids=block_ids, staging=staging)
    if staging.data_ptr() % _ALIGNMENT:
        raise KernelArgumentError(
            f"staging: expected an address in multiples of {_ALIGNMENT} bytes, got {staging.data_ptr()}"
        )
    words = table.block_bytes // _WORD_BYTES
    if len(block_ids) > 0:
        stage_kernel[(len(block_ids), triton.cdiv(words, _CHUNK_WORDS), len(table.caches))](
            *(table.addresses, block_ids, staging.view(torch.int64), words, table.stride_bytes // _WORD_BYTES),
            CHUNK=_CHUNK_WORDS,
            GATHERING=gathering,
        )


def _move(table: CacheTable, slots: Tensor, pieces: Tensor, *, saving: bool) -> None:
    check_shape("pieces", pieces, (*pieces.shape[:1], 3))
    check_dtype("pieces", pieces, (torch.int64,))
    check_contiguous("pieces", pieces)
    check_shape("slots", slots, (*slots.shape[:1], *slots.shape[-1:]))
    check_dtype("slots", slots, (torch.uint8,))
    check_contiguous("slots", slots)
    check_devices(caches=table.addresses, slots=slots, pieces=pieces)
    if slots.data_ptr() % _ALIGNMENT or slots.shape[1] % _ALIGNMENT:
        raise KernelArgumentError(
            f"slots: expected an address and rows in multiples of {_ALIGNMENT} bytes, got {slots.data_ptr()} and"
            f" {slots.shape[1]}"
        )
    words = table.block_bytes // _WORD_BYTES
    if len(pieces) > 0:
        state_kernel[(len(pieces), triton.cdiv(words, _CHUNK_WORDS), len(table.caches))](
            *(table.addresses, pieces, slots.view(torch.int64), slots.shape[1] // _WORD_BYTES),
            *(words, table.stride_bytes // _WORD_BYTES),
            CHUNK=_CHUNK_WORDS,
            SAVING=saving,
        )


def _check_blocks(cache: Tensor, block_bytes: int, stride_bytes: int) -> None:
    """Raise KernelArgumentError unless each block is one run of bytes, and no two overlap."""
    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            raise KernelArgumentError(f"caches: expected blocks without gaps, got strides {cache.stride()}")
        expected *= size
    if block_bytes % _ALIGNMENT or stride_bytes % _ALIGNMENT:
        raise KernelArgumentError(
            f"caches: expected blocks in multiples of {_ALIGNMENT} bytes, got {block_bytes} every {stride_bytes}"
        )
    if stride_bytes < block_bytes and len(cache) > 1:
        raise KernelArgumentError(f"caches: expected blocks that do not overlap, got strides {cache.stride()}")
