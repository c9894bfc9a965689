"""The weights of a model, in the form that the forward pass uses.

Query, key and value projections are one matrix (their outputs one after another), and so are gate and up: a step then
makes four matrix products a layer instead of seven. Matrices are [out_features, in_features], contiguous.

A norm's weight says by its dtype where its product is rounded: one in the model's dtype multiplies what was rounded to
that already; one in float32 multiplies first, and the product is rounded (centred norms, with the 1 added here).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Biases and norms are None in models that have none."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    output: Tensor  # [hidden, num_heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qk_norm: Tensor | None = None  # [num_heads + num_kv_heads, head_dim]
    attention_output_norm: Tensor | None = None  # [hidden]
    mlp_output_norm: Tensor | None = None  # [hidden]


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. With tied embeddings `lm_head` is `embedding` itself."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
