"""Seeds and the random numbers that come of them, by hashing: each is a function of what it is for, and nothing else.

A number is that of its seed and its position in the answer, however the step came about: so neither the batch nor a
preemption nor a step that is tried again changes a token, and no state has to be kept or given back. BLAKE2b makes
neighbouring seeds and positions as unlike as any others, takes a microsecond, and is the same everywhere.
"""

from hashlib import blake2b

from kvblocks.arguments import check_count

MAX_SEED = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """The random number, from 0 up to but without 1, for token `position` of the answer with `seed`. O(1).

    53 bits: the whole precision of a float. seed, position: 0 to 2**64 - 1, unchecked.
    """
    return (_hash(seed, position, b"kvblocks draw") >> 11) * 2.0**-53


def sample_seed(seed: int, number: int) -> int:
    """The seed of a prompt's sample `number`, counted from 0, in a call with `seed`: that seed itself for the first.

    The others' are hashed, so that calls with neighbouring seeds have no sample in common. seed: 0 to 2**64 - 1. Raises
    InvalidArgumentError.
    """
    checked, index = check_count("seed", seed, 0, MAX_SEED), check_count("number", number, 0, MAX_SEED)
    return _hash(checked, index, b"") if index else checked


def _hash(first: int, second: int, purpose: bytes) -> int:
    """64 bits of both numbers. purpose: another one gives other bits."""
    digest = blake2b(first.to_bytes(8, "little") + second.to_bytes(8, "little"), digest_size=8, person=purpose)
    return int.from_bytes(digest.digest(), "little")
