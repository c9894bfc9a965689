"""Plans which slots, rows and masks paged attention in plain torch needs. Layers with the same sight share a plan.

A step makes one plan for each different `Sight` of a model's layers.

Invariant: a plan names only slots of positions that some row of the sequence sees. It names no position from `seq_len`
on, and none before the first one that a row sees, whose block may belong to another sequence by now. If shapes need
more keys than that, the first visible key is repeated and masked. (Another slot might hold NaN, and masking would not
help: 0 * NaN is NaN.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 16
"""Rows of a query tile in `tiled_paged_attention`."""

_SLICE_ROWS = 128
"""Rows of a query slice in `paged_attention`. Larger slices compute more masked keys, smaller ones make more calls."""

_GROUP_KEYS = 2048
"""Keys of a group of decodes. Groups save calls, but larger ones no longer fit in the processor's cache."""


@dataclass(frozen=True)
class Sight:
    """Which positions a row sees: those up to its own, or with a window the last `window` of them, its own included.

    With a chunk size, it sees those of its own chunk; chunks begin at multiples of `chunk_size`. Set at most one of
    both.
    """

    window: int | None = None
    chunk_size: int | None = None

    def first_seen(self, position: int) -> int:
        """Return the first position that a row at `position` sees."""
        if self.chunk_size is not None:
            return position // self.chunk_size * self.chunk_size
        return 0 if self.window is None else max(0, position - self.window + 1)


EVERYTHING = Sight()


@dataclass(frozen=True)
class QueryTile:
    """A run of consecutive queries of one sequence, computed in one call.

    The queries are rows `first_row` to `first_row + num_rows` of the step. They are computed as the rows from `offset`
    on of a tile of `size` rows, over the keys from `first_key` to `last_key` of the sequence's slots. `mask` is bool
    [size, last_key - first_key], or None if the tile is a whole prompt, in which row i sees the keys up to i.
    """

    first_row: int
    num_rows: int
    offset: int
    size: int
    first_key: int
    last_key: int
    mask: Tensor | None


@dataclass(frozen=True)
class SequenceTiles:
    """The tiles of one sequence, and the slots (int64 [num_keys]) of the keys that they share."""

    slots: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query each, computed in one call.

    `rows`: int64 [num_seqs], ascending. `slots`: int64 [num_seqs * num_keys]. `mask`: bool [num_seqs, 1, 1, num_keys],
    or None if every sequence has exactly `num_keys` keys.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class StorePlan:
    """Where to store the K and V of rows. `rows`: a bool mask of the stored rows; None: all.

    `slots`: int64, their slots.
    """

    rows: Tensor | None
    slots: Tensor


@dataclass(frozen=True)
class UnreadStorePlan:
    """A `StorePlan` that is made without reading the slots, so that the host doesn't wait for a GPU.

    Row `rows[i]` goes to `slots[i]`, both int64. A row that isn't stored is replaced by a repeated stored row.
    """

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """What one step attends to, in every layer with the same sight and block tables."""

    decodes: tuple[DecodeGroup, ...]
    sequences: tuple[SequenceTiles, ...]


def plan_store(slot_mapping: Tensor) -> StorePlan:
    """Make the plan of `store`, leaving out slots of -1. O(rows). Changes nothing."""
    if not slot_mapping.numel() or int(slot_mapping.min()) >= 0:
        return StorePlan(None, slot_mapping)
    kept = slot_mapping >= 0
    return StorePlan(kept, slot_mapping[kept])


def plan_store_unread(slot_mapping: Tensor) -> UnreadStorePlan:
    """Make the plan of `store`, on the slots' device. At least one slot must not be -1. O(rows). Changes nothing."""
    kept = slot_mapping >= 0
    rows = torch.where(kept, torch.arange(len(kept), device=kept.device), kept.int().argmax())
    return UnreadStorePlan(rows, slot_mapping.index_select(0, rows))


def plan_paged(
    block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, block_size: int, sight: Sight = EVERYTHING
) -> AttentionPlan:
    """Make the plan of `paged_attention`. Shapes are as there. O(tokens seen). Changes nothing."""
    decodes: list[tuple[int, int, int, int]] = []
    sequences: list[SequenceTiles] = []
    for index, first_row, num_rows, end in _runs(query_start, seq_lens):
        start = end - num_rows
        first = sight.first_seen(start)
        if num_rows == 1:
            decodes.append((end - first, end, index, first_row))
            continue
        if start == 0 and sight.first_seen(end - 1) == 0:
            tiles = [QueryTile(first_row, end, 0, end, 0, end, None)]
        else:
            masks = _Masks(sight, _SLICE_ROWS, end - first, block_tables.device)
            tiles = []
            for low in range(start, end, _SLICE_ROWS):
                high, lowest = min(low + _SLICE_ROWS, end), sight.first_seen(low)
                seen = masks.of(range(low, high), lowest)
                row = first_row + low - start
                tiles.append(QueryTile(row, high - low, 0, high - low, lowest - first, high - first, seen))
        slots = _slots(block_tables[index], block_size, first, range(first, end))
        sequences.append(SequenceTiles(slots, tuple(tiles)))
    return AttentionPlan(tuple(_group_decodes(decodes, block_tables, block_size)), tuple(sequences))


def plan_tiled(
    block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, block_size: int, sight: Sight = EVERYTHING
) -> AttentionPlan:
    """Make the plan of `tiled_paged_attention`. Shapes are as there. O(tokens seen). Changes nothing.

    A tile's keys also begin at a multiple of TILE_ROWS, so a tile's shape and its alignment in memory depend only on
    its position.
    """
    sequences: list[SequenceTiles] = []
    for index, first_row, num_rows, end in _runs(query_start, seq_lens):
        start = end - num_rows
        first_tile = start // TILE_ROWS * TILE_ROWS
        first = sight.first_seen(first_tile) // TILE_ROWS * TILE_ROWS
        num_keys = -(-end // TILE_ROWS) * TILE_ROWS - first
        masks = _Masks(sight, TILE_ROWS, num_keys, block_tables.device)
        tiles: list[QueryTile] = []
        for at in range(first_tile, end, TILE_ROWS):
            low, high, stop = max(at, start), min(at + TILE_ROWS, end), at + TILE_ROWS
            lowest = sight.first_seen(at) // TILE_ROWS * TILE_ROWS
            seen, row = masks.of(range(at, stop), lowest), first_row + low - start
            tiles.append(QueryTile(row, high - low, low - at, TILE_ROWS, lowest - first, stop - first, seen))
        seen_positions = range(sight.first_seen(start), end)
        slots = _slots(block_tables[index], block_size, first, seen_positions, num_keys)
        sequences.append(SequenceTiles(slots, tuple(tiles)))
    return AttentionPlan((), tuple(sequences))


def _runs(query_start: Tensor, seq_lens: Tensor) -> list[tuple[int, int, int, int]]:
    """(index, first row, number of rows, tokens in context) of each sequence that has rows."""
    starts: list[int] = query_start.tolist()
    ends: list[int] = seq_lens.tolist()
    return [(i, starts[i], starts[i + 1] - starts[i], end) for i, end in enumerate(ends) if starts[i + 1] > starts[i]]


class _Masks:
    """Which keys the rows of a sequence's tiles may see. A tile has at most `num_rows` rows, `num_keys` keys in front.

    Without chunks, which begin at fixed positions, one tensor serves all tiles: its last r rows and k columns are the
    mask of the last r of any k positions.
    """

    def __init__(self, sight: Sight, num_rows: int, num_keys: int, device: torch.device) -> None:
        self._chunk_size, self._device, self._shared = sight.chunk_size, device, None
        if sight.chunk_size is None:
            seen = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_rows)
            self._shared = seen if sight.window is None else seen.triu(num_keys - num_rows - sight.window + 1)

    def of(self, rows: range, first_key: int) -> Tensor:
        """bool [len(rows), rows.stop - first_key]: which keys from the first one on each of these positions may see."""
        if self._shared is not None:
            return self._shared[-len(rows) :, first_key - rows.stop :]
        assert self._chunk_size is not None
        positions = torch.arange(rows.start, rows.stop, device=self._device)[:, None]
        keys = torch.arange(first_key, rows.stop, device=self._device)
        return (keys <= positions) & (keys >= positions - positions % self._chunk_size)


def _slots(block_table: Tensor, block_size: int, first: int, seen: range, num_keys: int | None = None) -> Tensor:
    """int64 [num_keys]: the slots of positions from `first` on. Those not in `seen` get the slot of its first one."""
    num_keys = len(seen) if num_keys is None else num_keys
    positions = torch.arange(first, first + num_keys, device=block_table.device)
    positions[(positions < seen.start) | (positions >= seen.stop)] = seen.start
    return block_table[positions // block_size].long() * block_size + positions % block_size


def _group_decodes(
    decodes: list[tuple[int, int, int, int]], block_tables: Tensor, block_size: int
) -> list[DecodeGroup]:
    """Group decodes of similar numbers of keys, since a group computes the largest number for each.

    decodes: (keys seen, tokens in context, sequence, row).
    """
    groups: list[list[tuple[int, int, int, int]]] = []
    for decode in sorted(decodes, reverse=True):
        if not groups or (len(groups[-1]) + 1) * groups[-1][0][0] > _GROUP_KEYS:
            groups.append([])
        groups[-1].append(decode)
    return [_decode_group(group, block_tables, block_size) for group in groups]


def _decode_group(group: list[tuple[int, int, int, int]], block_tables: Tensor, block_size: int) -> DecodeGroup:
    device, num_keys = block_tables.device, max(group)[0]
    group = sorted(group, key=lambda decode: decode[3])
    lengths, ends, indices, rows = (torch.tensor(column, device=device) for column in zip(*group, strict=True))
    keys = torch.arange(num_keys, device=device)
    mask = keys < lengths[:, None]
    positions = (ends - lengths)[:, None] + torch.where(mask, keys, 0)
    blocks = block_tables[indices].long().gather(1, positions // block_size)
    slots = (blocks * block_size + positions % block_size).flatten()
    return DecodeGroup(rows, slots, None if min(group)[0] == num_keys else mask[:, None, None])
