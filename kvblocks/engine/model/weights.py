"""The weights of a model, in the form that the forward pass uses.

Query, key and value projections are one matrix (their outputs one after another), and so are gate and up. So a step
makes four matrix products a layer instead of seven. Matrices are [out_features, in_features], as `products.pack`
returned them: plain and contiguous, or in a layout of the library's.

The dtype of a norm's weight says when values are rounded. With a weight in the model's dtype, normed values are rounded
before the product. With a weight in float32 the product is rounded (centered norms, to whose weights 1 is added here).
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

    If the shared expert has a gate, that is the router's last row. bias: of what a row chooses by, or None.
    """

    router: Tensor  # [num_experts, hidden], or one more
    gate_up: tuple[Tensor, ...]  # of each expert: [2 * width, hidden]
    down: tuple[Tensor, ...]  # of each expert: [hidden, width]
    bias: Tensor | None = None  # float32 [num_experts]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Biases and norms are None in models that have none.

    In a layer that keeps a state, `qkv` and `output` are the mixer's two projections, and `mixer` is what else it
    needs, in float32. Where the attention's output is gated, the gates' projection is the last part of `qkv`.

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
    """A whole model.

    With tied embeddings `embedding` is `lm_head` itself, or `products.packed_rows`' view of it.
    """

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings of int64 token_ids [num_rows], which are in the vocabulary: [num_rows, hidden], new."""
        if self.embedding.dim() == 2:
            return F.embedding(token_ids, self.embedding)
        return take_rows(self.embedding, token_ids, self.final_norm.shape[0])
