"""Copies of recurrent states between slots and blocks: as bytes, cut by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvblocks.kernels.copy import CacheTable, restore_states, save_states
from kvblocks.kernels.layout import KernelArgumentError

NUM_BLOCKS, NUM_SLOTS = 9, 3


def random_bytes(*shape, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)


def by_hand(slots, blocks, pieces, *, saving):
    """blocks: [num_blocks, bytes of a block of all caches]."""
    size = blocks.shape[1]
    for slot, index, block in pieces:
        own = slots[slot, index * size : (index + 1) * size]
        if saving:
            blocks[block, : len(own)] = own
        else:
            own.copy_(blocks[block, : len(own)])


@st.composite
def cases(draw):
    """Sizes of a cache and of a state, and pieces: of some slots their states, in blocks in any order."""
    num_caches, block_bytes = draw(st.integers(1, 3)), 16 * draw(st.sampled_from([1, 3, 600]))
    size = num_caches * block_bytes
    state_bytes = draw(st.integers(1, 3 * size // 16)) * 16
    number = -(-state_bytes // size)
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=min(NUM_SLOTS, NUM_BLOCKS // number)))
    blocks = iter(draw(st.permutations(range(NUM_BLOCKS))))
    return num_caches, block_bytes, state_bytes, [(slot, n, next(blocks)) for slot in slots for n in range(number)]


@settings(max_examples=30)
@given(case=cases(), is_apart=st.booleans(), saving=st.booleans())
def test_bytes_are_those_of_copies_by_hand(case, is_apart, saving):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_caches, block_bytes, state_bytes, pieces = case
    shape = (NUM_BLOCKS, num_caches, block_bytes) if is_apart else (num_caches, NUM_BLOCKS, block_bytes)
    memory, slots = (
        random_bytes(*shape, seed=1, device=device),
        random_bytes(NUM_SLOTS, state_bytes, seed=2, device=device),
    )
    caches = list(memory.unbind(1) if is_apart else memory)
    expected_slots, expected = slots.clone(), torch.cat(caches, 1)
    by_hand(expected_slots, expected, pieces, saving=saving)
    move = save_states if saving else restore_states
    move(CacheTable.of(caches), slots, torch.tensor(pieces, dtype=torch.int64, device=device).view(-1, 3))
    assert torch.equal(torch.cat(caches, 1), expected)
    assert torch.equal(slots, expected_slots)


@pytest.mark.parametrize(
    ("slots", "pieces", "message"),
    [
        (
            torch.zeros(2, 24, dtype=torch.uint8),
            torch.zeros(1, 3, dtype=torch.int64),
            "multiples of 16 bytes, got .* 24",
        ),
        (torch.zeros(2, 32, dtype=torch.uint8)[1:], torch.zeros(1, 3), "pieces: expected .*int64"),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int64), "pieces: expected .* 3"),
        (torch.zeros(2, 32), torch.zeros(1, 3, dtype=torch.int64), "slots: expected .*uint8"),
    ],
)
def test_what_cannot_be_copied(device, slots, pieces, message):
    table = CacheTable.of([torch.zeros(2, 32, dtype=torch.uint8, device=device)])
    with pytest.raises(KernelArgumentError, match=message):
        save_states(table, slots.to(device), pieces.to(device))


def test_rows_of_wider_ones_cannot_be_copied(device):
    table = CacheTable.of([torch.zeros(2, 32, dtype=torch.uint8, device=device)])
    slots = torch.zeros(2, 64, dtype=torch.uint8, device=device)[:, :32]
    with pytest.raises(KernelArgumentError, match="slots: expected"):
        save_states(table, slots, torch.zeros(1, 3, dtype=torch.int64, device=device))
