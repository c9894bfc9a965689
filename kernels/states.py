"""Copy recurrent states between the slots that layers rewrite and the blocks of checkpoints, in one launch a step.

A slot is a state's bytes. A checkpoint has them cut into blocks, which lie anywhere; in a block they go on from one
cache to the next, as in a staging buffer of `copy`. So a state needs no buffer between slot and blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvblocks.kernels.copy import CacheTable
from kvblocks.kernels.layout import KernelArgumentError, check_contiguous, check_devices, check_dtype, check_shape

_WORD_BYTES = 8
_ALIGNMENT = 16
"""Addresses and sizes of slots are multiples of so many bytes, as blocks are."""

_CHUNK_WORDS = 1024
"""Words that a program moves at once: 64 bytes per thread."""


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
    block's id; slot_ptr: int64 [num_slots, state_words]. The last block of a state is only filled in part.
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


def save_states(table: CacheTable, slots: Tensor, pieces: Tensor) -> None:
    """Copy states from slots into blocks.

    slots: uint8 [num_slots, bytes of a state], contiguous. pieces: int64 [num_pieces, 3]: a slot, the number of a block
    within its state, and the id of the block in the caches; each id at most once. What a state's last block has behind
    the state's end stays. One launch, O(bytes). Raises KernelArgumentError. Changes the caches.
    """
    _move(table, slots, pieces, saving=True)


def restore_states(table: CacheTable, slots: Tensor, pieces: Tensor) -> None:
    """Copy states from blocks into slots.

    Arguments as in `save_states`; each block of a slot's state at most once. Raises KernelArgumentError. Changes the
    slots.
    """
    _move(table, slots, pieces, saving=False)


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
