"""vLLM's hashes: golden vectors, an oracle, and errors for bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from model.vllm_reference import HASHES, block_hashes, block_keys

from kvblocks import FullAttention, InvalidArgumentError, KVCacheManager, Sequence, SlidingWindow
from kvblocks.hashing.vllm import VllmHashScheme, split_lora

GOLDEN = json.loads(Path(__file__).with_name("golden_vllm.json").read_text())


def sequence_of(case: dict[str, Any]) -> Sequence:
    """A golden case's prompt."""
    keys = [
        (start, end, bytes.fromhex(key["bytes"]) if isinstance(key, dict) else key) for start, end, key in case["keys"]
    ]
    return Sequence("golden", case["tokens"], salt=case["salt"], lora=case["lora"], extra_keys=keys)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_vllms_golden_vectors(case):
    """Made by vLLM 0.32 itself; tests/integrations/vllm/test_block_hashes.py has it make them again."""
    manager = KVCacheManager(
        16, case["block_size"], hash_algorithm=VllmHashScheme(case["algorithm"], seed=case["seed"])
    )
    assert [digest.hex() for digest in manager.inspect.block_hashes(sequence_of(case))] == case["hashes"]


def random_prompt(random: Random) -> tuple[list[int], str | None, str | None, list[Any]]:
    """Return tokens, salt, adapter and keys: of images that may overlap, and of embeddings."""
    tokens = [random.randrange(random.choice([50, 2**17, 2**32])) for _ in range(random.randrange(1, 90))]
    salt = random.choice([None, None, "salt", "ß"])
    lora = random.choice([None, None, "ad", "ad\0/path", "ad\0/path\0version 2"])
    keys: list[Any] = []
    for _ in range(random.choice([0, 0, 1, 3])):
        start = random.randrange(len(tokens))
        keys.append((start, random.randrange(start + 1, len(tokens) + 1), random.choice("xyz")))
    if random.random() < 0.2:
        size = random.choice([3, 7])
        keys += [(at, min(at + size, len(tokens)), random.randbytes(40)) for at in range(0, len(tokens) // 2, size)]
    return tokens, salt, lora, keys


@pytest.mark.parametrize("algorithm", HASHES)
def test_hashes_are_the_oracles(algorithm):
    random, num_blocks = Random(algorithm), 0
    for number in range(1500):
        tokens, salt, lora, keys = random_prompt(random)
        size = random.choice([1, 3, 4, 16])
        seed = f"seed {number % 3}"
        manager = KVCacheManager(100, size, hash_algorithm=VllmHashScheme(algorithm, seed=seed))
        sequence = Sequence("random", tokens, salt=salt, lora=lora, extra_keys=keys)
        path = None if lora is None else split_lora(lora)
        expected = block_hashes(algorithm, seed, tokens, block_keys(salt, path, keys, size, len(tokens) // size), size)
        assert manager.inspect.block_hashes(sequence) == expected
        manager.allocate_slots(sequence, random.randrange(1, len(tokens) + 1))  # in two chunks, and by the run alone
        if sequence.num_computed_tokens < len(tokens):
            manager.allocate_slots(sequence)
        assert [block.block_hash for block in sequence.blocks if block.is_cached] == expected
        num_blocks += len(expected)
    assert num_blocks > 5000


def test_an_adapter_is_its_name_and_path():
    assert split_lora("a") == ("a", "") and split_lora("a\0b") == split_lora("a\0b\0c\0d") == ("a", "b")
    assert split_lora("a\0") == ("a", "")


def test_hashes_tell_of_the_adapter_in_every_block():
    """Behind a node whose first block is in another run, too."""
    manager = KVCacheManager(64, 4, hash_algorithm="vllm:sha256_cbor", enable_events=True)
    for number, tokens in enumerate(([1] * 16, [1] * 8 + [2] * 8, [1] * 12 + [3] * 8)):
        sequence = Sequence(number, tokens, lora="ad\0/path")
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        seed = os.environ.get("PYTHONHASHSEED", "vllm-none-hash")
        expected = block_hashes("sha256_cbor", seed, tokens, [(("lora", "ad", "/path"),)] * 5, 4)
        assert [block.block_hash for block in sequence.blocks] == expected == manager.inspect.block_hashes(sequence)
        assert manager.take_events()[0].block_hashes[-1] == expected[-1]


def test_seeds():
    program = (
        "from kvblocks.hashing.vllm import VllmHashScheme as V\n"
        "schemes = [V('sha256'), V('xxhash'), V('xxhash'), V('xxhash', seed='s')]\n"
        "print([scheme.seed for scheme in schemes])"
    )

    def seeds(**environment: str) -> list[str]:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        output = subprocess.run(
            [sys.executable, "-c", program], env=clean | environment, capture_output=True, check=True
        ).stdout
        return json.loads(output.decode().replace("'", '"'))

    default, one, other, given = seeds()
    assert (default, given) == ("vllm-none-hash", "s") and one != other and len(one) == 64
    assert seeds(PYTHONHASHSEED="7") == ["7", "7", "7", "s"]


def test_a_seed_makes_hashes_that_others_can_compute():
    scheme = VllmHashScheme("xxhash_cbor")
    manager = KVCacheManager(8, 2, hash_algorithm=scheme)
    expected = block_hashes("xxhash_cbor", scheme.seed, [1, 2, 3, 4], [(), ()], 2)
    assert manager.inspect.block_hashes(Sequence("a", [1, 2, 3, 4])) == expected


@pytest.mark.parametrize("groups", [[FullAttention(4), SlidingWindow(4, 6)], [SlidingWindow(4, 6)]])
def test_groups_have_the_same_hashes(groups):
    manager = KVCacheManager(32, groups=groups, hash_algorithm="vllm:sha256", enable_events=True)
    sequence = Sequence("a", range(20), salt="s")
    manager.allocate_slots(sequence)
    hashes = manager.inspect.block_hashes(sequence)
    for event in manager.take_events():
        assert set(event.block_hashes) <= set(hashes)


@pytest.mark.parametrize("algorithm", ["md5", "", None, 3, "vllm:sha256"])
def test_unknown_algorithms_are_refused(algorithm):
    with pytest.raises(InvalidArgumentError, match="expected one of 'sha256', 'sha256_cbor', 'xxhash', 'xxhash_cbor'"):
        VllmHashScheme(algorithm)
    if isinstance(algorithm, str):
        with pytest.raises(InvalidArgumentError, match="expected one of 'sha256'"):
            KVCacheManager(8, 2, hash_algorithm=f"vllm:{algorithm}")


@pytest.mark.parametrize("seed", [3, b"s", "\ud800"])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(InvalidArgumentError, match="seed"):
        VllmHashScheme("sha256", seed=seed)


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(InvalidArgumentError, match=r"sha256_cbor: expected the package cbor2.*kvblocks\[wire\]"):
        KVCacheManager(8, 2, hash_algorithm="vllm:sha256_cbor")
    assert KVCacheManager(8, 2, hash_algorithm="vllm:sha256").inspect.block_hashes(Sequence("a", [1, 2]))


def test_it_loads_neither_the_core_nor_the_wire():
    program = (
        "import sys; sys.modules['msgspec'] = sys.modules['zmq'] = sys.modules['cbor2'] = None; "
        "import kvblocks.hashing.vllm; print(*sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = {name for name in output.split() if name.startswith("kvblocks.")}
    assert not [name for name in loaded if name.startswith(("kvblocks.wire", "kvblocks.core"))]
    assert "kvblocks.hashing.vllm" in loaded
