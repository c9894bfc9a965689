"""Checks this machine, and chooses a way to compute in which a row's bits don't depend on its batch.

`packed16` is nearly as fast as natural shapes. It relies on an undocumented property of the matrix library: for the row
counts that the strategy allows, a row's bits depend neither on the number of rows nor on the row's index. Whether this
holds varies with the processor, the library and the number of threads. For packed weights it was found to hold from 2
rows on, so `packed2` needs less padding. The property is checked at start, with the model's own functions and weights,
at the current number of threads, for every possible row count and every index. GPU libraries choose kernels by the
number of rows, so on a GPU `fixed64` is tried next: it needs the property for one number of rows only. If none of these
holds, `tile16` is chosen, which only requires that a row's bits don't depend on the numbers in other rows.

Triton kernels replace torch's norms, gates and rotations on a GPU. They aren't checked, since each program of theirs
sees only one row.

Two assumptions are left: that a kernel's order of operations depends on shapes and alignment, not on numbers, and that
all layers of one shape behave like the first of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.layers import DecoderLayers, Linear
from kvblocks.engine.model.products import product
from kvblocks.engine.model.weights import LayerWeights, ModelWeights
from kvblocks.engine.run.rows import FIXED64, PACKED2, PACKED16, TILE16, RowStrategy, chunks

RowFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Takes tensors with equally many rows, and returns tensors with as many rows."""

ARITHMETIC = 4
"""The version of the engine's arithmetic.

It goes up with each change that gives rows other bits, so that older blocks in tiers are no longer used.
"""

# Coprime to 16: a row that is moved on by 7, again and again, reaches every index of a chunk.
_MOVE = 7


def choose_determinism(config: ModelConfig, weights: ModelWeights, *, linear: Linear = product) -> RowStrategy:
    """The first strategy that holds on this machine: PACKED2 (packed weights), PACKED16, FIXED64 (GPU) or TILE16.

    On a CPU a strategy is valid for the current number of torch threads. `linear` is the matrix product that the model
    will use. Raises ModelError if not even TILE16 holds. Costs about as much as 1,900 tokens of one layer and 300 rows
    of logits: 0.4 s for SmolLM2-135M on a CPU. Changes nothing.
    """
    is_cpu = weights.embedding.device.type == "cpu"
    for strategy in (PACKED2, PACKED16) if weights.lm_head.is_mkldnn else (PACKED16,):
        if packed_rows_hold(config, weights, strategy, linear=linear):
            return replace(strategy, num_threads=torch.get_num_threads()) if is_cpu else strategy
    if not is_cpu and packed_rows_hold(config, weights, FIXED64, linear=linear):
        return FIXED64
    if aligned_rows_hold(config, weights, TILE16, linear=linear):
        return TILE16
    raise ModelError(
        "deterministic: expected matrix products whose rows don't depend on the numbers in other rows, got others from"
        f" this machine's library, in {weights.embedding.dtype} on {str(weights.embedding.device)!r}"
    )


@torch.inference_mode()
def packed_rows_hold(
    config: ModelConfig, weights: ModelWeights, strategy: RowStrategy, *, linear: Linear = product
) -> bool:
    """Whether every row-wise function of the model gives a row the same bits at every row count of the strategy."""
    return all(
        rows_are_independent(function, inputs, counts)
        for function, inputs, counts in _row_functions(config, weights, strategy, linear)
    )


@torch.inference_mode()
def aligned_rows_hold(
    config: ModelConfig, weights: ModelWeights, strategy: RowStrategy, *, linear: Linear = product
) -> bool:
    """Whether every row-wise function gives a row at one index the same bits whatever is in the other rows."""
    return all(
        rows_ignore_others(function, inputs)
        for function, inputs, _ in _row_functions(config, weights, strategy, linear)
    )


def _row_functions(
    config: ModelConfig, weights: ModelWeights, strategy: RowStrategy, linear: Linear
) -> list[tuple[RowFunction, Sequence[Tensor], tuple[int, ...]]]:
    """The model's row-wise functions, each with random inputs of the largest row count, and its allowed row counts."""
    layers = DecoderLayers(config, linear, keeps_rows=True)
    generator = torch.Generator().manual_seed(0)

    def random_rows(counts: tuple[int, ...], *shape: int) -> Tensor:
        values = torch.randn(counts[-1], *shape, generator=generator)
        return values.to(weights.embedding.device, weights.embedding.dtype)

    def project(layer: LayerWeights, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        hidden, cos, sin = rows
        if layer.mixer is not None:
            return (layers.project(layer, layers.norm(hidden, layer.input_norm)),)
        if layer.latent is not None:
            return layers.latents(layer, layers.norm(hidden, layer.input_norm), absorbs=True)
        return layers.turn(layer, layers.heads(layer, layers.norm(hidden, layer.input_norm)), cos, sin)

    def mix(layer: LayerWeights, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        hidden, attended = rows[0].clone(), rows[1]
        gates = (
            None
            if layer.mixer is not None or layer.latent is not None
            else layers.gates(layers.heads(layer, layers.norm(hidden, layer.input_norm)))
        )
        normed = layers.mix(layer, hidden, attended, layer.input_norm, gates, absorbed=layer.latent is not None)
        assert normed is not None
        return (hidden, normed)

    def logits(rows: Sequence[Tensor]) -> Sequence[Tensor]:
        return (layers.logits(weights, rows[0]),)

    body, head = strategy.row_counts, strategy.head_row_counts
    hidden = random_rows(body, config.hidden_size)
    cos, sin = random_rows(body, 1, config.head_dim), random_rows(body, 1, config.head_dim)
    first_of = {
        (layer.qk_norm is None, layer.experts is None, mixer): (layer, mixer)
        for layer, mixer in reversed(
            list(zip(weights.layers, config.mixers or [None] * config.num_layers, strict=True))
        )
    }
    found: list[tuple[RowFunction, Sequence[Tensor], tuple[int, ...]]] = []
    for layer, mixer in first_of.values():
        shape = (config.num_heads, config.head_dim) if mixer is None else (mixer.num_outputs,)
        attended = random_rows(body, *shape)
        found += [(partial(project, layer), (hidden, cos, sin), body), (partial(mix, layer), (hidden, attended), body)]
    return [*found, (logits, (random_rows(head, config.hidden_size),), head)]


def rows_ignore_others(function: RowFunction, inputs: Sequence[Tensor]) -> bool:
    """Whether each row of the result keeps its bits when the other rows of the input get other numbers.

    First every second row gets other numbers, then the remaining rows. Rows that keep their numbers must keep their
    bits.
    """
    expected = function(inputs)
    if not all(torch.equal(got, wanted) for got, wanted in zip(function(inputs), expected, strict=True)):
        return False
    for kept, changed in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        others = [rows.clone() for rows in inputs]
        for rows in others:
            rows[changed] = rows[changed].flip(0) * 3 + 1
        outputs = function(others)
        if not all(torch.equal(got[kept], wanted[kept]) for got, wanted in zip(outputs, expected, strict=True)):
            return False
    return True


def rows_are_independent(function: RowFunction, inputs: Sequence[Tensor], row_counts: tuple[int, ...]) -> bool:
    """Whether `function` gives each row of `inputs` the same bits at every row count, at every index.

    The rows are first computed in chunks of the smallest count. Then the first rows are computed at each count, once in
    order and once shifted, and must have the same bits. `inputs` has as many rows as the largest count.
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
