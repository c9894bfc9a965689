"""The weights of a model, in the form that the forward pass uses.

The query, key and value projections are concatenated into one matrix, and so are gate and up, so a step makes four
matrix products per layer instead of seven. Matrices are [out_features, in_features], as `products.pack` returned them:
plain and contiguous, or in oneDNN's layout.

The dtype of a norm's weight says when values are rounded. With a weight in the model's dtype, normed values are rounded
before the product. With a weight in float32, as for centered norms (to whose weights 1 was added here), the product is
rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvblocks.engine.model.hybrid.latent import LatentHeads
from kvblocks.engine.model.products import take_rows


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a layer, of which each row chooses some by the router's largest logits.

    If the shared expert has a gate, that is the router's last row. bias: added to the weights that a row chooses by, or
    None.
    """

    router: Tensor  # [num_experts, hidden], or one more
    gate_up: tuple[Tensor, ...]  # of each expert: [2 * width, hidden]
    down: tuple[Tensor, ...]  # of each expert: [hidden, width]
    bias: Tensor | None = None  # float32 [num_experts]


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer. Biases and norms are None in models without them.

    In a layer that keeps a state, `qkv` and `output` are the mixer's two projections, and `mixer` has its other
    tensors, in float32. Where the attention's output is gated, the projection of the gates is the last part of `qkv`.

    In a layer with latent attention, `qkv` is the projection of queries and of the entry, and `latent` has the rest.

    `gate_up` and `down` are the MLP's; in a layer with experts, those of the expert that all rows share.
    """

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
    experts: ExpertWeights | None = None
    mixer: Mapping[str, Tensor] | None = None
    latent: LatentHeads | None = None


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a whole model.

    With tied embeddings `embedding` is `lm_head` itself, or `products.packed_rows`' view of it.
    """

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings of int64 token_ids [num_rows], all in the vocabulary: a new tensor [num_rows, hidden]."""
        if self.embedding.dim() == 2:
            return F.embedding(token_ids, self.embedding)
        return take_rows(self.embedding, token_ids, self.final_norm.shape[0])
