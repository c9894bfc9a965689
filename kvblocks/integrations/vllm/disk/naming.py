"""Describes everything that the bytes of a folder's blocks depend on. The fingerprint is the description's digest.

vLLM gives a tier keys and bytes, but no tokens. A key is vLLM's hash of a block and all blocks before it, so it means
nothing without the hash function and the seed of the first block. `Hashes` knows both before the first request, and
checks that vLLM uses the same.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvblocks import BlockIdentity, UnsupportedEngineError
from kvblocks.integrations.vllm import probe

_FORMAT = "kvblocks disk tier of vLLM 1"
_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
_NO_TOKENS = b"\0" * 4  # a store with blocks of one token: the key alone says which block it is
_PARALLEL = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.json")


def identity_of(key: bytes) -> BlockIdentity:
    """Return the identity under which a key of vLLM is recorded. O(1)."""
    return BlockIdentity(b"", key, _NO_TOKENS)


def key_of(identity: BlockIdentity) -> bytes | None:
    """Return the key of an identity, or None if `identity_of` didn't make it. O(1)."""
    return identity.extra_keys if identity == identity_of(identity.extra_keys) else None


class Hashes:
    """The hash function of vLLM's keys, and its seed.

    algorithm: as in vLLM's option --prefix-caching-hash-algo. Raises UnsupportedEngineError for an algorithm that vLLM
    lacks, and for a seed that differs in each process, with which nothing would be found after a restart.
    """

    def __init__(self, algorithm: str) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        if algorithm not in _ALGORITHMS:
            raise probe.refuse(
                f"the hash {algorithm!r}", f"prefix_caching_hash_algo is one of {', '.join(_ALGORITHMS)}"
            )
        function = get_hash_fn_by_name(algorithm)
        seeds = {kv_cache_utils.resolve_none_hash_seed(function) for _ in range(2)}
        if len(seeds) > 1:
            reason = "no block would be found after a restart; set PYTHONHASHSEED, or take sha256"
            raise probe.refuse(f"a random seed of {algorithm}", reason)
        self.algorithm = algorithm
        self.none_hash: bytes = function(seeds.pop())

    def check(self) -> None:
        """Raise UnsupportedEngineError if vLLM hashes with another function, or from another seed. O(1)."""
        from vllm.v1.core import kv_cache_utils

        found = getattr(kv_cache_utils, "NONE_HASH", None)
        if found == self.none_hash:
            return
        got = "none: vLLM has not begun to hash" if found is None else f"{_maker(found)}"
        raise UnsupportedEngineError(
            f"{probe.NAME}: DiskTier: expected hashes by {self.algorithm!r} from the seed that the tier was made with, "
            f"got {got}; set the tier's prefix_caching_hash_algo to vLLM's --prefix-caching-hash-algo"
        )


def _maker(none_hash: bytes) -> str:
    """Return the name of the function that made the hash that first blocks begin with."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed

    for algorithm in _ALGORITHMS:
        try:
            if get_hash_fn_by_name(algorithm)(get_none_hash_seed()) == none_hash:
                return repr(algorithm)
        except ModuleNotFoundError:  # without xxhash, vLLM has only two of them
            continue
    return "another seed"


def describe(spec: Any, num_block_bytes: int, hashes: Hashes, weights: str) -> dict[str, Any]:
    """Return everything that bytes depend on, as far as vLLM says. spec: an OffloadingSpec."""
    import vllm

    config = spec.config
    parallel = config.parallel
    is_portable = parallel.is_parallelism_agnostic or config.replicated_layout  # vLLM's own file tier shares these too
    return {
        "format": _FORMAT,
        "vllm": str(vllm.__version__),
        "model": asdict(config.model),
        "files": _files(config.model.name),
        "weights": weights,
        "groups": [asdict(group) for group in config.groups],
        "cache": asdict(config.cache),
        "num_block_bytes": num_block_bytes,
        "parallel": "any" if is_portable else {name: getattr(parallel, name) for name in _PARALLEL},
        "replicated_layout": config.replicated_layout,
        "canonical_layout": config.canonical_layout,
        "kv_cache_layout": str(config.kv_cache_layout),
        "hash": hashes.algorithm,
        "none_hash": hashes.none_hash.hex(),
    }


def _files(model: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files of a model's folder. They differ when its weights change."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    found = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]


def fingerprint(description: dict[str, Any]) -> bytes:
    """Return the 32-byte digest of a description that `describe` made. O(its length)."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
