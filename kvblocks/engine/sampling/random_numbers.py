"""Seeds, and random numbers made from them by hashing.

A random number depends only on its seed and on the token's position in the answer. So neither the batch nor a
preemption nor a repeated step changes a token, and there is no state to keep or undo. BLAKE2b gives unrelated numbers
for neighboring seeds and positions, takes less than a microsecond, and is the same everywhere.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvblocks.arguments import check_count

MAX_SEED = 2**64 - 1
_NOTHING = bytes(8)


def uniforms(seeds: Iterable[int | None], positions: Iterable[int]) -> NDArray[np.float64]:
    """The random number in [0, 1) for each token, at a position of an answer with a seed. None as the seed gives 0.

    They have 53 bits, the full precision of a float. seeds, positions: 0 to 2**64 - 1, unchecked, and equally many.
    O(1) for each.
    """
    digests = [
        _NOTHING if seed is None else _digest(seed, position, b"kvblocks draw")
        for seed, position in zip(seeds, positions, strict=True)
    ]
    return (np.frombuffer(b"".join(digests), dtype="<u8") >> 11) * np.float64(2.0**-53)


def sample_seed(seed: int, number: int) -> int:
    """The seed of a prompt's sample `number` (from 0) in a call with `seed`. The first sample uses `seed` itself.

    The seeds of the others are hashed, so that calls with neighboring seeds have no sample in common. seed: 0 to
    2**64 - 1. Raises InvalidArgumentError.
    """
    checked, index = check_count("seed", seed, 0, MAX_SEED), check_count("number", number, 0, MAX_SEED)
    return int.from_bytes(_digest(checked, index, b""), "little") if index else checked


def _digest(first: int, second: int, purpose: bytes) -> bytes:
    """A hash of both numbers, 8 bytes. Different purposes give unrelated hashes."""
    digest = _begun(first, purpose).copy()
    digest.update(second.to_bytes(8, "little"))
    return digest.digest()


@lru_cache(maxsize=4096)
def _begun(first: int, purpose: bytes) -> blake2b:
    """A hash to go on from, kept since an answer draws all its numbers from one seed. Don't change it."""
    return blake2b(first.to_bytes(8, "little"), digest_size=8, person=purpose)
