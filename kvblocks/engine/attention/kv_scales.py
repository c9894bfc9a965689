"""K and V in 8 bits (e4m3), and their factors.

An e4m3 number has 4 significant bits and lies between 2**-9 and 448. A head's K and V are stored divided by a factor
that brings them into this range. Factors are powers of 2, so dividing and multiplying by them is exact in every dtype.
The only rounding is to e4m3's 4 significant bits, whatever the factor.

Invariant: an engine's factors never change. So a token's K and V have the same bits in every request, and a block can
be shared, kept on a disk, and found again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvblocks.arguments import check_one_of
from kvblocks.engine.attention.names import KV_CACHE_DTYPES

E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0

_HEADROOM = 2.0
"""Values up to this multiple of the largest one seen in calibration are not clipped."""


@dataclass(frozen=True)
class KVScales:
    """The factors of K and V. keys, values: for each layer, fp32 [num_kv_heads] on the model's device."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def of_largest(cls, keys: list[Tensor], values: list[Tensor]) -> "KVScales":
        """The factors, powers of 2, from the largest magnitudes of K and V by layer and head.

        One [num_kv_heads] per layer.
        """
        return cls(tuple(map(_scale, keys)), tuple(map(_scale, values)))

    def __str__(self) -> str:
        """All factors as exponents, for a fingerprint. Waits for the device."""
        exponents = torch.stack([*self.keys, *self.values]).log2().int().tolist()
        return f"e4m3 {exponents}"


def is_8_bit(name: Any) -> bool:
    """Whether `kv_cache_dtype` names 8 bits. Raises InvalidArgumentError for a name that isn't in KV_CACHE_DTYPES."""
    check_one_of("kv_cache_dtype", name, KV_CACHE_DTYPES)
    return bool(name != "auto")


def _scale(largest: Tensor) -> Tensor:
    """The power of 2 that brings numbers of up to `largest` to at most 448 / _HEADROOM; 1 for a head of zeros."""
    _, exponent = torch.frexp(largest.float() * (_HEADROOM / _E4M3_MAX))
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent), 1.0)
