"""Latent attention over a plan of paged attention, in the cheaper of two forms: expanded or absorbed.

`model.hybrid.latent` describes the two forms.
"""

from itertools import chain

import torch
from torch import Tensor

from kvblocks.engine.model.hybrid.latent import LatentHeads
from kvblocks.kernels import reference

EXPANDED_ELEMENTS = 2**24
"""The most elements of keys and values to hold at once. If there are more, heads are computed a few at a time."""


def attend_latents(
    plan: reference.AttentionPlan, query: Tensor, entries: Tensor, heads: LatentHeads, scale: float
) -> Tensor:
    """Attend for all rows of a plan: [num_rows, num_heads, key_dim] to [num_rows, num_heads, value_dim].

    entries: the cache by slots, [num_slots, 1, entry_dim]. Changes nothing.
    """
    output = query.new_empty(*query.shape[:2], heads.sizes.value_dim)
    few: list[reference.SequenceTiles] = []
    for sequence in plan.sequences:
        if heads.sizes.expands(sum(tile.num_rows for tile in sequence.tiles)):
            _expand(sequence, query, entries, heads, scale, output)
        else:
            few.append(sequence)
    tiles = chain.from_iterable(sequence.tiles for sequence in few)
    spans = [torch.arange(tile.first_row, tile.first_row + tile.num_rows, device=query.device) for tile in tiles]
    rows = [group.rows for group in plan.decodes] + spans
    if not rows:
        return output
    own = torch.cat(rows)
    absorbed = query.new_empty(*query.shape[:2], heads.sizes.entry_dim)
    absorbed.index_copy_(0, own, heads.absorb(query.index_select(0, own)))
    attended = torch.empty_like(absorbed)
    for group in plan.decodes:
        queries = absorbed.index_select(0, group.rows)
        attended.index_copy_(0, group.rows, reference.attend_decodes(group, queries, entries, entries, scale))
    for sequence in few:
        context = entries.index_select(0, sequence.slots)
        reference.attend_tiles(sequence.tiles, absorbed, (context, context), attended, scale)
    return output.index_copy_(0, own, heads.values(attended.index_select(0, own)))


def _expand(
    sequence: reference.SequenceTiles, query: Tensor, entries: Tensor, heads: LatentHeads, scale: float, output: Tensor
) -> None:
    """Attention of the rows of a sequence in the expanded form. Changes them in `output`."""
    context, sizes = entries.index_select(0, sequence.slots)[:, 0], heads.sizes
    step = max(1, EXPANDED_ELEMENTS // (len(context) * (sizes.key_dim + sizes.value_dim)))
    for first in range(0, sizes.num_heads, step):
        some = slice(first, first + step)
        expanded = heads.expand(context, some)
        reference.attend_tiles(sequence.tiles, query[:, some], expanded, output[:, some], scale)
