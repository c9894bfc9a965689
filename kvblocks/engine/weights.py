"""The weights of a Llama model, in the form that the forward pass uses.

Query, key and value projections are one matrix (their outputs one after another), and so are gate and up: a step then
makes four matrix products a layer instead of seven. Matrices are [out_features, in_features], contiguous.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer. The biases are None in models that have none."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    output: Tensor  # [hidden, num_heads * head_dim]
    post_attention_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. With tied embeddings `lm_head` is `embedding` itself."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
