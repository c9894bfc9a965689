"""Paged attention in plain torch: store K and V in slots, and attend over block tables, with windows, chunks, softcaps.

Two kinds of attention take the same shapes. `paged_attention` is the natural one: a whole prompt is one causal call,
later chunks of a prompt are cut into slices that skip the keys that no row of the slice may see, and single queries
(decodes) of similar length are computed together. `tiled_paged_attention` computes every query in a tile of 16 rows
that starts at a multiple of 16 positions, with the keys padded to the tile's end. The shapes that produce a row, and
its index in them, then depend on its position alone, so its bits do not depend on how a prompt was cut into chunks, on
what was cached, or on the rest of the batch.

Invariant: a slot that no row of the batch sees is never read.

`plan_paged` and `plan_tiled` (`plan`) compute once what all layers with the same sight have in common. `attend` then
runs the plan in each of these layers.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.kernels.reference.plan import (
    TILE_ROWS,
    AttentionPlan,
    DecodeGroup,
    QueryTile,
    Sight,
    StorePlan,
    UnreadStorePlan,
    plan_paged,
    plan_store,
    plan_store_unread,
    plan_tiled,
)

__all__ = [
    "E4M3",
    "E4M3_MAX",
    "TILE_ROWS",
    "AttentionPlan",
    "Sight",
    "as_indexed",
    "attend",
    "attend_decodes",
    "attend_tiles",
    "copy_blocks",
    "paged_attention",
    "plan_paged",
    "plan_store",
    "plan_store_unread",
    "plan_tiled",
    "store",
    "store_planned",
    "store_unread",
    "tiled_paged_attention",
]


E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""The largest e4m3 number."""
_E4M3_NUMBERS = torch.arange(256, dtype=torch.uint8).view(E4M3).float()


def store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's K and V to its slot; a slot of -1 stores nothing.

    key, value: [num_tokens, num_kv_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size, num_kv_heads,
    head_dim]; slot_mapping: int64 [num_tokens]. Changes both caches.
    """
    store_planned(key, value, key_cache.flatten(0, 1), value_cache.flatten(0, 1), plan_store(slot_mapping))


def store_planned(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, plan: StorePlan) -> None:
    """As `store`, by a plan of `plan_store`, which is the same in all layers.

    keys, values: the caches by slots, [num_slots, num_kv_heads, head_dim]; in e4m3, numbers that are too large are
    stored as the largest one. Changes both caches.
    """
    if plan.rows is not None:
        key, value = key[plan.rows], value[plan.rows]
    if keys.dtype == E4M3:  # older versions of torch convert too large numbers to NaN
        key, value = (rows.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3) for rows in (key, value))
    as_indexed(keys).index_copy_(0, plan.slots, as_indexed(key))
    as_indexed(values).index_copy_(0, plan.slots, as_indexed(value))


def store_unread(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, plan: UnreadStorePlan) -> None:
    """As `store_planned`, by a plan of `plan_store_unread`, for caches in the dtype of `key`.

    Never waits for the device. Changes both caches.
    """
    for cache, rows in ((keys, key), (values, value)):
        cache.index_copy_(0, plan.slots, rows.index_select(0, plan.rows))


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy whole blocks within each cache, as if pair by pair: a pair sees what earlier pairs have written.

    caches: of shape [num_blocks, ...], all with the same num_blocks; pairs: int64 [num_pairs, 2], source and
    destination block ids, on any device. Changes the caches.
    """
    origins: dict[int, int] = {}  # block -> the block whose present bytes it gets: then all copies can be done at once
    for source, destination in pairs.tolist():
        origins[destination] = origins.get(source, source)
    moves = [(origin, destination) for destination, origin in origins.items() if origin != destination]
    if not moves:
        return
    sources, destinations = torch.tensor(moves, device=caches[0].device).unbind(1)
    for cache in map(as_indexed, caches):
        cache.index_copy_(0, destinations, cache.index_select(0, sources))


def as_indexed(cache: Tensor) -> Tensor:
    """A view of a cache for torch's index functions. These don't support e4m3, so such a cache is viewed as bytes."""
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of a ragged batch over block tables: prefill chunks and decodes in one call.

    query: [num_tokens, num_heads, head_dim], the sequences' rows one after another; key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, head_dim], where num_heads is a multiple of num_kv_heads; block_tables:
    int32 [num_seqs, max_blocks]; query_start: int32 [num_seqs + 1], each sequence's first row, then num_tokens;
    seq_lens: int32 [num_seqs], the tokens in context, this step's included. Row i of a sequence with n rows is at
    position `seq_len - n + i` and attends to the positions up to its own: the last `window` of them, its own included,
    those from the last multiple of `chunk_size` on, or all. Blocks before all that are not read. A score is
    `scale * (q . k)`, then `softcap * tanh(score / softcap)` if there is a softcap. A sequence may have no rows.
    Returns [num_tokens, num_heads, head_dim]. Changes nothing.
    """
    plan = plan_paged(block_tables, query_start, seq_lens, key_cache.shape[1], Sight(window, chunk_size))
    return attend(plan, query, key_cache.flatten(0, 1), value_cache.flatten(0, 1), scale=scale, softcap=softcap)


def tiled_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `paged_attention`, but each row's bits depend only on its query and position and its sequence's K and V.

    Shapes as in `paged_attention`. A decode costs as much as 16 queries would. Changes nothing.
    """
    plan = plan_tiled(block_tables, query_start, seq_lens, key_cache.shape[1], Sight(window, chunk_size))
    return attend(plan, query, key_cache.flatten(0, 1), value_cache.flatten(0, 1), scale=scale, softcap=softcap)


def attend(
    plan: AttentionPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Run a plan in one layer. `query` and the result are as in `paged_attention`; every row of `query` is in the plan.

    keys, values: the caches by slots, [num_slots, num_kv_heads, head_dim], in the query's dtype or in e4m3. Changes
    nothing.
    """
    if len(plan.decodes) == 1 and not plan.sequences:  # the one group has all rows, in their order
        return attend_decodes(plan.decodes[0], query, keys, values, scale, softcap)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.decodes:
        queries = query.index_select(0, group.rows)
        output.index_copy_(0, group.rows, attend_decodes(group, queries, keys, values, scale, softcap))
    for sequence in plan.sequences:
        context = _take(keys, sequence.slots, query.dtype), _take(values, sequence.slots, query.dtype)
        attend_tiles(sequence.tiles, query, context, output, scale, softcap)
    return output


def attend_tiles(
    tiles: Sequence[QueryTile],
    query: Tensor,
    context: tuple[Tensor, Tensor],
    output: Tensor,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Compute the tiles of one sequence. context: its keys and values, [num_keys, num_kv_heads, dim] each.

    query, output: [num_tokens, num_heads, dim] for the whole step. Queries have the dim of keys, outputs that of
    values. Changes the tiles' rows of `output`.
    """
    key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in context)
    for tile in tiles:
        rows = slice(tile.first_row, tile.first_row + tile.num_rows)
        inside = slice(tile.offset, tile.offset + tile.num_rows)
        # A new tensor each time: the address and strides of rows of `query` vary, and could change bits.
        queries = query.new_zeros(tile.size, *query.shape[1:])
        queries[inside] = query[rows]
        queries = queries.transpose(0, 1).unsqueeze(0)
        seen = slice(tile.first_key, tile.last_key)
        attended = _attend(queries, key[:, :, seen], value[:, :, seen], tile.mask, scale, softcap)
        output[rows] = attended[0].transpose(0, 1)[inside]


def attend_decodes(
    group: DecodeGroup, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Attend for a group's queries: [num_seqs, num_heads, head_dim] to the same shape.

    keys, values: [num_slots, num_kv_heads, head_dim]. Changes nothing.
    """
    shape = (len(group.rows), -1, *keys.shape[1:])
    key = _take(keys, group.slots, queries.dtype).view(shape).transpose(1, 2)
    value = _take(values, group.slots, queries.dtype).view(shape).transpose(1, 2)
    return _attend(queries.unsqueeze(2), key, value, group.mask, scale, softcap).squeeze(2)


def _take(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """K or V of slots, [num_slots, num_kv_heads, head_dim], in `dtype`."""
    found = as_indexed(cache).index_select(0, slots)
    if cache.dtype != E4M3:
        return found
    if not found.is_cpu:
        return found.view(E4M3).to(dtype)
    # On a CPU torch converts e4m3 one number at a time, ten times as slowly as this table.
    return _E4M3_NUMBERS.to(dtype).index_select(0, found.flatten().int()).view(found.shape)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Dense attention: [batch, num_heads, num_rows, head_dim] over [batch, num_kv_heads, num_keys, head_dim].

    mask: bool, broadcast to the scores; None: a single row sees all keys, row i of several the keys up to i.
    """
    is_causal = mask is None and query.shape[2] > 1
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )
    # Query heads that share K and V become rows of one product.
    shared = query.unflatten(1, (key.shape[1], -1))
    scores = (shared.flatten(2, 3) @ key.transpose(2, 3)).float() * scale
    scores = (torch.tanh(scores / softcap) * softcap).unflatten(2, shared.shape[2:4])
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores.masked_fill_(~mask if mask.dim() == 2 else ~mask.unsqueeze(1), -torch.inf)
    weights = scores.softmax(-1).to(query.dtype)
    attended: Tensor = (weights.flatten(2, 3) @ value).unflatten(2, shared.shape[2:4]).flatten(1, 2)
    return attended
