"""Our block hashes are vLLM's: compared for random requests with its engine's hasher, and for the golden vectors."""

import json
import os
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model.vllm_reference import block_hashes, block_keys
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from integrations.vllm.stand import image
from kvblocks import KVCacheManager, Sequence
from kvblocks.hashing.vllm import VllmHashScheme

ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
GOLDEN = Path(__file__).resolve().parents[2] / "hashing" / "golden_vllm.json"


def vllms_hashes(algorithm: str, seed: str | None, size: int, tokens: list[int], **what: Any) -> list[bytes]:
    """Return the hashes that vLLM's engine gives a request's blocks. seed: PYTHONHASHSEED, None: not set."""
    hashed = get_hash_fn_by_name(algorithm)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            patch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(hashed)
    num_prompt = what.pop("num_prompt", len(tokens))
    request = Request(
        request_id="r",
        prompt_token_ids=tokens[:num_prompt] if what.get("prompt_embeds") is None else None,
        sampling_params=SamplingParams(max_tokens=1000),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(size, hashed),
        **what,
    )
    for token in tokens[num_prompt:]:
        request.append_output_token_ids(token)
    return list(request.block_hashes)


def fresh(text: str) -> str:
    """Return a str of its own, as a decoder makes one."""
    return text.encode().decode()


def random_ask(random: Random, size: int) -> tuple[list[int], dict[str, Any], list[Any], str | None]:
    """Return tokens, what vLLM's request has beside them, and our keys and adapter for the same."""
    num_prompt = random.randrange(1, 200)
    tokens = [random.randrange(random.choice([40, 2**17])) for _ in range(num_prompt + random.randrange(60))]
    what: dict[str, Any] = {"num_prompt": num_prompt, "cache_salt": random.choice([None, fresh("salt"), fresh("ßalt")])}
    keys: list[Any] = []
    lora = None
    if random.random() < 0.4:
        path = random.choice(["/adapters/one", "org/two"])
        what["lora_request"] = LoRARequest(lora_name="adapter", lora_int_id=1, lora_path=fresh(path))
        lora = f"adapter\0{path}\0version 3"
    kind = random.random()
    if kind < 0.4:
        start, features = 0, []
        while (start := start + random.randrange(30)) < num_prompt:
            length = random.randrange(1, 40)
            name = f"image {random.randrange(1000)} {len(features)}"
            features.append(image(name, start, min(length, num_prompt - start)))
            keys.append((start, min(start + length, num_prompt), name))
            start += length
        what["mm_features"] = features
    elif kind < 0.5:
        tokens[:num_prompt] = [0] * num_prompt
        embeddings = torch.randn(num_prompt, 4)
        what["prompt_embeds"] = embeddings
        for first in range(0, num_prompt, size):
            part = embeddings[first : first + size].contiguous()
            digest = sha256(part.flatten().view(torch.uint8).numpy().tobytes()).digest()
            keys.append((first, first + len(part), digest + b"float32"))
    return tokens, what, keys, lora


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hashes_are_vllms(algorithm):
    """25,000 blocks of each algorithm, of requests as the engine gets them, and grows them token by token."""
    random, num_blocks, number = Random(algorithm), 0, 0
    while num_blocks < 25_000:
        number += 1
        size = random.choice([1, 4, 16, 32])
        tokens, what, keys, lora = random_ask(random, size)
        seed = random.choice(["0", "a seed", "random"] if algorithm.startswith("xxhash") else [None, "a seed"])
        theirs = vllms_hashes(algorithm, seed, size, tokens, **what)
        scheme = VllmHashScheme(algorithm, seed=seed or kv_cache_utils.DEFAULT_NONE_HASH_SEED)
        sequence = Sequence("s", tokens, salt=what["cache_salt"], lora=lora, extra_keys=keys)
        assert KVCacheManager(1, size, hash_algorithm=scheme).inspect.block_hashes(sequence) == theirs, number
        path = None if lora is None else ("adapter", what["lora_request"].lora_path)
        reference = block_keys(what["cache_salt"], path, keys, size, len(tokens) // size)
        assert block_hashes(algorithm, scheme.seed, tokens, reference, size) == theirs, number
        num_blocks += len(theirs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_seeds_are_vllms(algorithm, monkeypatch):
    hashed = get_hash_fn_by_name(algorithm)
    for seed in (None, "", "0", "7", "random"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(hashed)
        scheme = VllmHashScheme(algorithm)
        if seed is None and algorithm.startswith("xxhash"):
            assert len(scheme.seed) == len(kv_cache_utils.get_none_hash_seed())  # random, both of them
        else:
            assert (scheme.seed, scheme.none_hash) == (kv_cache_utils.get_none_hash_seed(), kv_cache_utils.NONE_HASH)


def golden_cases() -> list[dict[str, Any]]:
    """Return what the golden vectors are of."""
    plain: dict[str, Any] = {"block_size": 4, "tokens": [*range(5, 19)], "salt": None, "lora": None, "keys": []}
    images = [(1, 3, "cat"), (3, 10, "dog"), (12, 13, "a bird with a name of its own")]
    kinds = {
        "plain": {},
        "large tokens, blocks of 16": {"block_size": 16, "tokens": [2**31 - 1 - 7919 * i for i in range(40)]},
        "salt": {"salt": "tenant-ä"},
        "adapter": {"lora": "adapter\0/adapters/one"},
        "images": {"keys": images},
        "everything": {"keys": images, "salt": "tenant-a", "lora": "adapter\0/adapters/one"},
        "another seed": {"salt": "tenant-a", "seed": "4242"},
    }
    return [
        plain | {"name": f"{algorithm}, {kind}", "algorithm": algorithm, "seed": "vllm-none-hash"} | what
        for algorithm in ALGORITHMS
        for kind, what in kinds.items()
    ]


def golden_hashes(case: dict[str, Any]) -> list[str]:
    """Return vLLM's hashes of a golden case."""
    lora = None
    if case["lora"] is not None:
        name, path = case["lora"].split("\0")
        lora = LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)
    features = [image(name, start, end - start) for start, end, name in case["keys"]]
    what = {"cache_salt": case["salt"], "lora_request": lora, "mm_features": features}
    hashes = vllms_hashes(case["algorithm"], case["seed"], case["block_size"], case["tokens"], **what)
    return [digest.hex() for digest in hashes]


def test_the_golden_vectors_are_vllms():
    """With GOLDEN_HASHES=write they are written anew."""
    made = json.loads(json.dumps([case | {"hashes": golden_hashes(case)} for case in golden_cases()]))
    if os.environ.get("GOLDEN_HASHES") == "write":
        GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    assert json.loads(GOLDEN.read_text()) == made
