"""Seeds, and random numbers made from them by hashing.

A random number depends only on its seed and on the token's position in the answer. So neither the batch nor a
preemption nor a repeated step changes a token, and there is no state to keep or undo. BLAKE2b gives unrelated numbers
for neighboring seeds and positions, takes a microsecond, and is the same everywhere.
"""

from functools import lru_cache
from hashlib import blake2b

from kvblocks.arguments import check_count

MAX_SEED = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position` of an answer with `seed`. O(1).

    It has 53 bits, the full precision of a float. seed, position: 0 to 2**64 - 1, unchecked.
    """
    return (_hash(seed, position, b"kvblocks draw") >> 11) * 2.0**-53


def sample_seed(seed: int, number: int) -> int:
    """The seed of a prompt's sample `number` (from 0) in a call with `seed`. The first sample uses `seed` itself.

    The seeds of the others are hashed, so that calls with neighboring seeds have no sample in common. seed: 0 to
    2**64 - 1. Raises InvalidArgumentError.
    """
    checked, index = check_count("seed", seed, 0, MAX_SEED), check_count("number", number, 0, MAX_SEED)
    return _hash(checked, index, b"") if index else checked


def _hash(first: int, second: int, purpose: bytes) -> int:
    """A hash of both numbers, 64 bits. Different purposes give unrelated hashes."""
    digest = _begun(first, purpose).copy()
    digest.update(second.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


@lru_cache(maxsize=4096)
def _begun(first: int, purpose: bytes) -> blake2b:
    """A hash to go on from, kept since an answer draws all its numbers from one seed. Don't change it."""
    return blake2b(first.to_bytes(8, "little"), digest_size=8, person=purpose)
