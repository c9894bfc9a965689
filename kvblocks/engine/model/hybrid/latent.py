"""Multi-head latent attention (DeepSeek-AI 2024), the attention of Kimi Linear, without RoPE.

A token keeps one *entry* for all heads: a latent of `rank` elements, and `shared_dim` elements that every head's key
ends with. A head's key and value are linear functions of the latent. The same result can be computed in two forms:

- *Expanded*: the keys and values of all heads are made from the entries of the context. This suits many rows at once.
- *Absorbed*: the queries are multiplied by the keys' matrix instead, and the results by the values'. All heads then
  attend to the entries themselves, as to one head of K and V. This suits few rows, for which the expansion would not
  pay off.

The two differ in the last bits. Apart from attention itself, the absorbed form is row-wise. So where bits must not
depend on how a prompt was chunked, all rows use it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_EPSILON = 1e-6
"""The epsilon of the latents' norm, whatever the model's other norms have."""

_INPUTS = ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
_OUTPUT, _NORM = "self_attn.o_proj.weight", "self_attn.kv_a_layernorm.weight"
_EXPANSION = "self_attn.kv_b_proj.weight"


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of a layer. own_dim: the elements of a key that a head has to itself, computed from the latent."""

    num_heads: int
    rank: int
    own_dim: int
    shared_dim: int
    value_dim: int

    @property
    def entry_dim(self) -> int:
        """Elements that the cache keeps for a token."""
        return self.rank + self.shared_dim

    @property
    def key_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.own_dim + self.shared_dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors whose outputs, one after another, are the queries and the entry."""
        return _INPUTS

    @property
    def output(self) -> str:
        """The name of the tensor that projects the attention's output."""
        return _OUTPUT

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer in a folder: their names, without the layer's prefix, and their shapes."""
        query, entry = _INPUTS
        return {
            query: (self.num_heads * self.key_dim, hidden_size),
            entry: (self.entry_dim, hidden_size),
            _NORM: (self.rank,),
            _EXPANSION: (self.num_heads * (self.own_dim + self.value_dim), self.rank),
            _OUTPUT: (hidden_size, self.num_heads * self.value_dim),
        }

    def load(self, read: Callable[[str], Tensor]) -> "LatentHeads":
        """Read the tensors of a layer that aren't projections of rows. `read` returns a tensor in the model's dtype."""
        return LatentHeads(self, read(_NORM), read(_EXPANSION).unflatten(0, (self.num_heads, -1)))

    def expands(self, num_rows: int) -> bool:
        """Whether the expanded form takes fewer multiplications for `num_rows` rows of a sequence. O(1)."""
        expanding = self.rank * (self.own_dim + self.value_dim)
        return expanding + num_rows * (self.key_dim + self.value_dim) < num_rows * (self.entry_dim + self.rank)


@dataclass(frozen=True)
class LatentHeads:
    """How queries, keys and values of a layer's heads come from rows and entries.

    norm: the weights of the latents' norm, [rank]. expansion: [num_heads, own_dim + value_dim, rank]. No method changes
    anything.
    """

    sizes: LatentAttention
    norm: Tensor
    expansion: Tensor

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Split projected rows into queries, [num_rows, num_heads, key_dim], and entries, [num_rows, 1, entry_dim]."""
        sizes = self.sizes
        columns = [sizes.num_heads * sizes.key_dim, sizes.rank, sizes.shared_dim]
        query, latent, shared = projected.split_with_sizes(columns, 1)
        precise = latent.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + _EPSILON)
        normed = (precise * scale).to(projected.dtype) * self.norm
        return query.unflatten(1, (sizes.num_heads, sizes.key_dim)), torch.cat([normed, shared], 1)[:, None]

    def absorb(self, query: Tensor) -> Tensor:
        """Turn queries for keys into queries for entries: [num_rows, num_heads, key_dim] to [.., .., entry_dim]."""
        own, shared = query.split_with_sizes([self.sizes.own_dim, self.sizes.shared_dim], -1)
        over_latents = own.transpose(0, 1) @ self.expansion[:, : self.sizes.own_dim]
        return torch.cat([over_latents.transpose(0, 1), shared], -1)

    def values(self, attended: Tensor) -> Tensor:
        """Turn sums of entries into outputs: [num_rows, num_heads, entry_dim] to [num_rows, num_heads, value_dim]."""
        latents = attended[..., : self.sizes.rank].transpose(0, 1)
        return (latents @ self.expansion[:, self.sizes.own_dim :].mT).transpose(0, 1)

    def expand(self, entries: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Make keys, [num_entries, heads, key_dim], and values, [.., value_dim], of some heads from entries."""
        sizes, some = self.sizes, self.expansion[heads]
        latents, shared = entries.split_with_sizes([sizes.rank, sizes.shared_dim], 1)
        made = (latents @ some.flatten(0, 1).T).unflatten(1, some.shape[:2])
        own, value = made.split_with_sizes([sizes.own_dim, sizes.value_dim], -1)
        return torch.cat([own, shared[:, None].expand(-1, len(some), -1)], -1), value
