"""Paged attention in plain torch: store K and V in slots, and attend over block tables.

Two kinds of attention share their shapes. `paged_attention` is the natural one: a whole prompt is one causal call,
the later chunks of a prompt are cut into slices that skip the keys no row of the slice may see, and single queries
(decodes) of similar length are computed together. `tiled_paged_attention` computes every query in a tile of 16 rows
that starts at a multiple of 16 positions, with the keys padded to the tile's end. The shapes that produce a row, and
its place in them, then depend on its position alone, so its bits do not depend on how a prompt was cut into chunks,
on what was cached, or on the rest of the batch.

Invariant: a slot that is not one of the sequence's own `seq_lens` tokens is never read. Padding keys repeat the
sequence's first slot and are masked, because a masked NaN would still spoil the result (0 * NaN is NaN).

Which slots, rows and masks a call needs is the same in every layer of a model: `plan_paged` and `plan_tiled` work it
out once, `attend` then runs it for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 16
"""Rows of a query tile in `tiled_paged_attention`."""

_SLICE_ROWS = 128
"""Rows of a query slice in `paged_attention`: few calls, and little work on keys that are masked anyway."""

_GROUP_KEYS = 2048
"""Keys of a group of decodes: grouping saves calls, and larger groups lose more by leaving the processor's cache."""


@dataclass(frozen=True)
class QueryTile:
    """A run of consecutive queries of one sequence, computed in one call.

    The queries are rows `first_row` to `first_row + num_rows` of the step. They are computed as rows `offset` and
    following of a tile of `size` rows, over the sequence's first `num_keys` keys; `mask` is bool [size, num_keys], or
    None when the tile is a whole prompt: row i then sees the keys up to i.
    """

    first_row: int
    num_rows: int
    offset: int
    size: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True)
class SequenceTiles:
    """The tiles of one sequence, and the slots (int64 [num_keys]) of the keys that they share."""

    slots: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one query each, computed in one call.

    `rows` is int64 [num_seqs], `slots` int64 [num_seqs * num_keys], `mask` bool [num_seqs, 1, 1, num_keys], or None
    when every sequence has exactly `num_keys` keys.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """What one step attends to, in every layer."""

    decodes: tuple[DecodeGroup, ...]
    sequences: tuple[SequenceTiles, ...]


def store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's K and V to its slot; a slot of -1 stores nothing.

    key, value: [num_tokens, num_kv_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size, num_kv_heads,
    head_dim]; slot_mapping: int64 [num_tokens]. Changes both caches.
    """
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy whole blocks within each cache, as if pair after pair: a pair sees what the pairs before it have written.

    caches: of shape [num_blocks, ...], all with the same num_blocks; pairs: int64 [num_pairs, 2], source and
    destination block ids, on any device. Changes the caches.
    """
    origins: dict[int, int] = {}  # where what a block will hold is now: pairs in a row become copies all at once
    for source, destination in pairs.tolist():
        origins[destination] = origins.get(source, source)
    moves = [(origin, destination) for destination, origin in origins.items() if origin != destination]
    if not moves:
        return
    sources, destinations = torch.tensor(moves, device=caches[0].device).unbind(1)
    for cache in caches:
        cache.index_copy_(0, destinations, cache.index_select(0, sources))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Causal attention of a ragged batch over block tables: prefill chunks and decodes in one call.

    query: [num_tokens, num_heads, head_dim], the sequences' rows one after another; key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, head_dim], where num_heads is a multiple of num_kv_heads; block_tables:
    int32 [num_seqs, max_blocks]; query_start: int32 [num_seqs + 1], each sequence's first row, then num_tokens;
    seq_lens: int32 [num_seqs], the tokens in context, this step's included. Row i of a sequence with n rows is at
    position `seq_len - n + i` and attends to the positions up to its own. A sequence may have no rows. Returns
    [num_tokens, num_heads, head_dim]. Changes nothing.
    """
    plan = plan_paged(block_tables, query_start, seq_lens, key_cache.shape[1])
    return attend(plan, query, key_cache, value_cache, scale=scale)


def tiled_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """`paged_attention`, each row's bits a function of its own sequence's K, V, query and position only.

    Shapes as in `paged_attention`. A decode costs as much as 16 queries would. Changes nothing.
    """
    plan = plan_tiled(block_tables, query_start, seq_lens, key_cache.shape[1])
    return attend(plan, query, key_cache, value_cache, scale=scale)


def plan_paged(block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, block_size: int) -> AttentionPlan:
    """The plan of `paged_attention`. Shapes as there. O(tokens in context)."""
    decodes: list[tuple[int, int, int]] = []
    sequences: list[SequenceTiles] = []
    for index, first_row, num_rows, end in _runs(query_start, seq_lens):
        if num_rows == 1:
            decodes.append((end, index, first_row))
            continue
        if num_rows == end:
            tiles = [QueryTile(first_row, end, 0, end, end, None)]
        else:
            mask = _causal_mask(_SLICE_ROWS, end, block_tables)
            tiles = []
            for start in range(end - num_rows, end, _SLICE_ROWS):
                stop = min(start + _SLICE_ROWS, end)
                row = first_row + start - (end - num_rows)
                tiles.append(QueryTile(row, stop - start, 0, stop - start, stop, mask[start - stop :, -stop:]))
        sequences.append(SequenceTiles(_slots(block_tables[index], end, end, block_size), tuple(tiles)))
    return AttentionPlan(tuple(_group_decodes(decodes, block_tables, block_size)), tuple(sequences))


def plan_tiled(block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, block_size: int) -> AttentionPlan:
    """The plan of `tiled_paged_attention`. Shapes as there. O(tokens in context)."""
    sequences: list[SequenceTiles] = []
    for index, first_row, num_rows, end in _runs(query_start, seq_lens):
        start, num_keys = end - num_rows, -(-end // TILE_ROWS) * TILE_ROWS
        mask = _causal_mask(TILE_ROWS, num_keys, block_tables)
        tiles: list[QueryTile] = []
        for at in range(start // TILE_ROWS * TILE_ROWS, end, TILE_ROWS):
            stop = at + TILE_ROWS
            low, high = max(at, start), min(stop, end)
            row = first_row + low - start
            tiles.append(QueryTile(row, high - low, low - at, TILE_ROWS, stop, mask[:, -stop:]))
        sequences.append(SequenceTiles(_slots(block_tables[index], end, num_keys, block_size), tuple(tiles)))
    return AttentionPlan((), tuple(sequences))


def attend(plan: AttentionPlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, *, scale: float) -> Tensor:
    """Run a plan in one layer. Shapes as in `paged_attention`; every row of `query` is in the plan. Changes nothing."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    for group in plan.decodes:
        shape = (len(group.rows), -1)
        key = keys.index_select(0, group.slots).unflatten(0, shape).transpose(1, 2)
        value = values.index_select(0, group.slots).unflatten(0, shape).transpose(1, 2)
        attended = _sdpa(query.index_select(0, group.rows).unsqueeze(2), key, value, group.mask, scale)
        output.index_copy_(0, group.rows, attended.squeeze(2))
    for sequence in plan.sequences:
        key = keys.index_select(0, sequence.slots).transpose(0, 1).unsqueeze(0)
        value = values.index_select(0, sequence.slots).transpose(0, 1).unsqueeze(0)
        for tile in sequence.tiles:
            rows = slice(tile.first_row, tile.first_row + tile.num_rows)
            places = slice(tile.offset, tile.offset + tile.num_rows)
            # Always a tensor of its own: the address and strides of rows of `query` vary, and could change bits.
            queries = query.new_zeros(tile.size, *query.shape[1:])
            queries[places] = query[rows]
            queries = queries.transpose(0, 1).unsqueeze(0)
            attended = _sdpa(queries, key[:, :, : tile.num_keys], value[:, :, : tile.num_keys], tile.mask, scale)
            output[rows] = attended[0].transpose(0, 1)[places]
    return output


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    is_causal = mask is None and query.shape[2] > 1
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True)


def _runs(query_start: Tensor, seq_lens: Tensor) -> list[tuple[int, int, int, int]]:
    """(index, first row, number of rows, tokens in context) of each sequence that has rows."""
    starts: list[int] = query_start.tolist()
    ends: list[int] = seq_lens.tolist()
    return [(i, starts[i], starts[i + 1] - starts[i], end) for i, end in enumerate(ends) if starts[i + 1] > starts[i]]


def _causal_mask(num_rows: int, num_keys: int, like: Tensor) -> Tensor:
    """bool [num_rows, num_keys]: which of the first `num_keys` positions each of the last `num_rows` of them may see.

    Its last r rows and k columns are the mask of the last r of k positions, so one tensor serves all tiles of a
    sequence.
    """
    return torch.ones(num_rows, num_keys, dtype=torch.bool, device=like.device).tril(num_keys - num_rows)


def _slots(block_table: Tensor, seq_len: int, num_keys: int, block_size: int) -> Tensor:
    """int64 [num_keys]: the slot of each position below `seq_len`, then position 0's again and again."""
    positions = torch.arange(num_keys, device=block_table.device)
    positions[seq_len:] = 0
    return block_table[positions // block_size].long() * block_size + positions % block_size


def _group_decodes(decodes: list[tuple[int, int, int]], block_tables: Tensor, block_size: int) -> list[DecodeGroup]:
    """Group (tokens in context, sequence, row), neighbours in length together: all pay for the longest of a group."""
    groups: list[list[tuple[int, int, int]]] = []
    for decode in sorted(decodes, reverse=True):
        if not groups or (len(groups[-1]) + 1) * groups[-1][0][0] > _GROUP_KEYS:
            groups.append([])
        groups[-1].append(decode)
    return [_decode_group(group, block_tables, block_size) for group in groups]


def _decode_group(group: list[tuple[int, int, int]], block_tables: Tensor, block_size: int) -> DecodeGroup:
    device = block_tables.device
    lengths, indices, rows = (torch.tensor(column, device=device) for column in zip(*group, strict=True))
    num_keys = group[0][0]
    positions = torch.arange(num_keys, device=device)
    mask = positions < lengths[:, None]
    positions = torch.where(mask, positions, 0)
    blocks = block_tables[indices].long().gather(1, positions // block_size)
    slots = (blocks * block_size + positions % block_size).flatten()
    return DecodeGroup(rows, slots, None if group[-1][0] == num_keys else mask[:, None, None])
