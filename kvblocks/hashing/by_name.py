"""Finds a hash scheme by the name that a caller gives, such as "sha256" or "vllm:sha256_cbor"."""

from typing import Any

from xxhash import xxh3_128_digest

from kvblocks.arguments import Text, is_a, plain_text, wrong
from kvblocks.errors import InvalidArgumentError
from kvblocks.hashing.scheme import HashFunction, HashScheme, check_digest, sha256_digest

HASH_FUNCTIONS: dict[str, HashFunction] = {"xxh3_128": xxh3_128_digest, "sha256": sha256_digest}

VLLM = "vllm:"
"""How the names of vLLM's schemes begin. vLLM's name of the algorithm follows it."""


def get_hash_scheme(algorithm: Text | HashFunction | HashScheme) -> HashScheme:
    """Return the hash scheme for `algorithm`: a name, a callable bytes -> bytes that hashes preimages, or a scheme.

    A name is "xxh3_128" or "sha256", or "vllm:" followed by an algorithm of `kvblocks.hashing.vllm.VllmHashScheme`. A
    `HashScheme` is returned as it is. Raises InvalidArgumentError for an unknown name, and for a callable that doesn't
    take bytes or doesn't return at least one byte.
    """
    given: Any = algorithm
    if is_a(given, HashScheme):
        scheme: HashScheme = given
        return scheme
    if is_a(given, str):
        name = plain_text(given)
        if name.startswith(VLLM):
            from kvblocks.hashing.vllm import VllmHashScheme

            return VllmHashScheme(name.removeprefix(VLLM))
        if name not in HASH_FUNCTIONS:
            known = ", ".join(repr(name) for name in HASH_FUNCTIONS)
            raise wrong("hash_algorithm", f"{known}, 'vllm:…' or a callable", name)
        given = HASH_FUNCTIONS[name]
    if not callable(given):
        raise InvalidArgumentError(f"hash_algorithm: expected a name or a callable, got {type(given).__name__}")
    try:
        digest = given(b"")
    except TypeError as error:
        raise wrong("hash_algorithm", f"a callable bytes -> bytes; it says {error}", given) from error
    return HashScheme(given, len(check_digest(digest, None)))
