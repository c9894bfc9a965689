"""Chooses how to compute so that a row's bits don't depend on its batch, by checking this machine.

`packed16` is nearly as fast as natural shapes, and relies on a property of the matrix library that nothing documents:
over the row counts that the strategy allows, a row's bits depend neither on how many rows there are nor on its place
among them. It varies with the processor, the library and the number of threads. So it is checked, at start, with the
model's own functions and weights, at the current number of threads, for every row count that can occur and every
place in it. If it doesn't hold, `tile16` needs no such property and is chosen.

What is left to trust: that a kernel's order of operations depends on shapes and alignment, not on the numbers; and
that the layers, which have one shape, behave as the first one does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.config import ModelConfig
from kvblocks.engine.layers import DecoderLayers, Linear
from kvblocks.engine.rows import PACKED16, TILE16, RowStrategy, chunks
from kvblocks.engine.weights import ModelWeights

RowFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Takes tensors with the same number of rows, gives tensors with that number of rows."""

# Coprime to 16: moving a row by 7 places, again and again, takes it to every place of a chunk.
_MOVE = 7


def choose_determinism(config: ModelConfig, weights: ModelWeights, *, linear: Linear = F.linear) -> RowStrategy:
    """PACKED16 for the current number of torch threads if this machine has what it needs, TILE16 otherwise.

    `linear` is the matrix product that the model will use. Costs about as much as 1,900 tokens of one layer and 300
    rows of logits: 0.4 s for SmolLM2-135M. Changes nothing.
    """
    if packed_rows_hold(config, weights, PACKED16, linear=linear):
        return replace(PACKED16, num_threads=torch.get_num_threads())
    return TILE16


@torch.inference_mode()
def packed_rows_hold(
    config: ModelConfig, weights: ModelWeights, strategy: RowStrategy, *, linear: Linear = F.linear
) -> bool:
    """Whether every row-wise function of the model gives a row the same bits at all of the strategy's row counts."""
    layers, layer = DecoderLayers(config, linear), weights.layers[0]
    generator = torch.Generator().manual_seed(0)

    def random_rows(counts: tuple[int, ...], *shape: int) -> Tensor:
        values = torch.randn(counts[-1], *shape, generator=generator)
        return values.to(weights.embedding.device, weights.embedding.dtype)

    def project(rows: Sequence[Tensor]) -> Sequence[Tensor]:
        return layers.project(layer, *rows)

    def mix(rows: Sequence[Tensor]) -> Sequence[Tensor]:
        hidden, attended = rows[0].clone(), rows[1]
        layers.mix(layer, hidden, attended)
        return (hidden,)

    def logits(rows: Sequence[Tensor]) -> Sequence[Tensor]:
        return (layers.logits(weights, rows[0]),)

    body, head = strategy.row_counts, strategy.head_row_counts
    hidden = random_rows(body, config.hidden_size)
    cos, sin = random_rows(body, config.head_dim // 2), random_rows(body, config.head_dim // 2)
    attended = random_rows(body, config.num_heads, config.head_dim)
    return (
        rows_are_independent(project, (hidden, cos, sin), body)
        and rows_are_independent(mix, (hidden, attended), body)
        and rows_are_independent(logits, (random_rows(head, config.hidden_size),), head)
    )


def rows_are_independent(function: RowFunction, inputs: Sequence[Tensor], row_counts: tuple[int, ...]) -> bool:
    """Whether `function` gives each row of `inputs` the same bits at every row count, in every place.

    The rows are first computed in chunks of the smallest count. Then each count gets the first rows, once in their
    order and once moved along, and must give the bits of the first time. `inputs` has as many rows as the largest
    count.
    """
    num_rows = inputs[0].shape[0]
    parts = [function([rows[part] for rows in inputs]) for part in chunks(num_rows, row_counts[:1])]
    expected = [torch.cat(outputs) for outputs in zip(*parts, strict=True)]
    for count in row_counts:
        for move in (0, _MOVE):
            outputs = function([rows.roll(move, 0)[:count] for rows in inputs])
            moved = [rows.roll(move, 0)[:count] for rows in expected]
            if not all(torch.equal(got, wanted) for got, wanted in zip(outputs, moved, strict=True)):
                return False
    return True
