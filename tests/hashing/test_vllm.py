"""Names in other systems: golden vectors, an oracle, and errors for bad input."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from model.vllm_reference import HASHES, block_keys, block_names

from kvblocks import FullAttention, InvalidArgumentError, InvalidTokensError, KVCacheManager, Sequence, SlidingWindow
from kvblocks.wire.extra_keys import split_lora
from kvblocks.wire.names import VllmNames, dynamo_block_hashes, llm_d_block_hashes

GOLDEN = json.loads(Path(__file__).with_name("golden_names.json").read_text())


def sequence_of(case: dict[str, Any]) -> Sequence:
    """A golden case's prompt."""
    keys = [
        (start, end, bytes.fromhex(key["bytes"]) if isinstance(key, dict) else key) for start, end, key in case["keys"]
    ]
    return Sequence("golden", case["tokens"], salt=case["salt"], lora=case["lora"], extra_keys=keys)


@pytest.mark.parametrize("case", GOLDEN["vllm"], ids=lambda case: case["name"])
def test_vllms_golden_vectors(case):
    """Made by vLLM 0.32 itself; tests/integrations/vllm/test_names.py has it make them again."""
    manager = KVCacheManager(16, case["block_size"], hash_algorithm=VllmNames(case["algorithm"], seed=case["seed"]))
    assert [name.hex() for name in manager.inspect.block_hashes(sequence_of(case))] == case["hashes"]


@pytest.mark.parametrize("case", GOLDEN["dynamo"], ids=lambda case: " ".join(case) or "plain")
def test_dynamos_golden_vectors(case):
    """Made by ai-dynamo-runtime 1.6.1."""
    given = {name: case[name] for name in ("lora", "salt") if name in case}
    images = {int(block): numbers for block, numbers in case.get("mm_hashes", {}).items()}
    assert dynamo_block_hashes(case["tokens"], case["block_size"], mm_hashes=images, **given) == case["hashes"]


@pytest.mark.skipif(not importlib.util.find_spec("dynamo"), reason="needs ai-dynamo-runtime")
def test_dynamos_own_function_says_the_same():
    from dynamo.llm import compute_block_hash_for_seq

    random = Random(1)
    for _ in range(2000):
        size, tokens = random.randrange(1, 33), [random.randrange(2**32) for _ in range(random.randrange(1, 200))]
        lora, salt = random.choice([None, "a", "ü" * 90]), random.choice([None, "s", "t" * 300])
        images = {
            block: [random.randrange(2**64) for _ in range(random.randrange(1, 4))]
            for block in range(len(tokens) // size)
            if random.random() < 0.2
        }
        mm_infos = [
            {"mm_objects": [{"mm_hash": number, "offsets": []} for number in images[block]]}
            if block in images
            else None
            for block in range(len(tokens) // size)
        ]
        theirs = compute_block_hash_for_seq(tokens, size, mm_infos or None, lora_name=lora, cache_namespace=salt)
        assert dynamo_block_hashes(tokens, size, lora=lora, salt=salt, mm_hashes=images) == theirs


def test_llm_ds_golden_vectors():
    """The ones of its own tests: a prompt with an image, 104 blocks of 4 tokens."""
    case = GOLDEN["llm-d"]
    first, number, last = case["tokens"]
    tokens = first + [case["placeholder"]] * number + last
    end = len(first) + number
    blocks = range(len(first) // 4, -(-end // 4))
    images = {block: [case["image"]] for block in blocks}
    names = llm_d_block_hashes(tokens, 4, case["model"], images=images)
    assert [f"{name:016x}" for name in names] == case["hashes"]
    assert llm_d_block_hashes(tokens, 4, case["model"], images=images, seed="other")[0] != names[0]
    assert llm_d_block_hashes(tokens, 4, "an adapter")[0] != llm_d_block_hashes(tokens, 4, case["model"])[0]


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
def test_names_are_the_oracles(algorithm):
    random, num_blocks = Random(algorithm), 0
    for number in range(1500):
        tokens, salt, lora, keys = random_prompt(random)
        size = random.choice([1, 3, 4, 16])
        seed = f"seed {number % 3}"
        manager = KVCacheManager(100, size, hash_algorithm=VllmNames(algorithm, seed=seed))
        sequence = Sequence("random", tokens, salt=salt, lora=lora, extra_keys=keys)
        path = None if lora is None else split_lora(lora)
        expected = block_names(algorithm, seed, tokens, block_keys(salt, path, keys, size, len(tokens) // size), size)
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


def test_names_tell_of_the_adapter_in_every_block():
    """Behind a node whose first block is in another run, too."""
    manager = KVCacheManager(64, 4, hash_algorithm="vllm:sha256_cbor", enable_events=True)
    for number, tokens in enumerate(([1] * 16, [1] * 8 + [2] * 8, [1] * 12 + [3] * 8)):
        sequence = Sequence(number, tokens, lora="ad\0/path")
        manager.allocate_slots(sequence, hit=manager.get_computed_blocks(sequence))
        seed = os.environ.get("PYTHONHASHSEED", "vllm-none-hash")
        expected = block_names("sha256_cbor", seed, tokens, [(("lora", "ad", "/path"),)] * 5, 4)
        assert [block.block_hash for block in sequence.blocks] == expected == manager.inspect.block_hashes(sequence)
        assert manager.take_events()[0].block_hashes[-1] == expected[-1]


def test_seeds():
    program = (
        "from kvblocks.wire.names import VllmNames as V\n"
        "names = [V('sha256'), V('xxhash'), V('xxhash'), V('xxhash', seed='s')]\n"
        "print([name.seed for name in names])"
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


def test_a_seed_makes_names_that_others_can_compute():
    names = VllmNames("xxhash_cbor")
    manager = KVCacheManager(8, 2, hash_algorithm=names)
    expected = block_names("xxhash_cbor", names.seed, [1, 2, 3, 4], [(), ()], 2)
    assert manager.inspect.block_hashes(Sequence("a", [1, 2, 3, 4])) == expected


@pytest.mark.parametrize("groups", [[FullAttention(4), SlidingWindow(4, 6)], [SlidingWindow(4, 6)]])
def test_groups_have_the_same_names(groups):
    manager = KVCacheManager(32, groups=groups, hash_algorithm="vllm:sha256", enable_events=True)
    sequence = Sequence("a", range(20), salt="s")
    manager.allocate_slots(sequence)
    names = manager.inspect.block_hashes(sequence)
    for event in manager.take_events():
        assert set(event.block_hashes) <= set(names)


@pytest.mark.parametrize("algorithm", ["md5", "", None, 3, "vllm:sha256"])
def test_unknown_algorithms_are_refused(algorithm):
    with pytest.raises(InvalidArgumentError, match="expected one of 'sha256', 'sha256_cbor', 'xxhash', 'xxhash_cbor'"):
        VllmNames(algorithm)
    if isinstance(algorithm, str):
        with pytest.raises(InvalidArgumentError, match="expected one of 'sha256'"):
            KVCacheManager(8, 2, hash_algorithm=f"vllm:{algorithm}")


def test_bad_input_is_refused():
    for seed in (3, b"s", "\ud800"):
        with pytest.raises(InvalidArgumentError, match="seed"):
            VllmNames("sha256", seed=seed)  # type: ignore[arg-type]
    for arguments in (((1,), 0), ((1,), "2")):
        with pytest.raises(InvalidArgumentError, match="block_size"):
            dynamo_block_hashes(*arguments)
        with pytest.raises(InvalidArgumentError, match="block_size"):
            llm_d_block_hashes(*arguments, "model")
    for tokens in ([], [-1], "text"):
        with pytest.raises(InvalidTokensError):
            dynamo_block_hashes(tokens, 1)
        with pytest.raises(InvalidTokensError):
            llm_d_block_hashes(tokens, 1, "model")
    with pytest.raises(InvalidArgumentError, match="lora"):
        dynamo_block_hashes([1], 1, lora="")
    with pytest.raises(InvalidArgumentError, match="salt"):
        dynamo_block_hashes([1], 1, salt=3)
    with pytest.raises(InvalidArgumentError, match="mm_hashes"):
        dynamo_block_hashes([1], 1, mm_hashes={0: [2**64]})
    for model in (None, "", 3):
        with pytest.raises(InvalidArgumentError, match="model"):
            llm_d_block_hashes([1], 1, model)
    with pytest.raises(InvalidArgumentError, match="seed"):
        llm_d_block_hashes([1], 1, "model", seed=None)


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(InvalidArgumentError, match=r"sha256_cbor: expected the package cbor2.*kvblocks\[wire\]"):
        KVCacheManager(8, 2, hash_algorithm="vllm:sha256_cbor")
    with pytest.raises(InvalidArgumentError, match=r"kvblocks\[wire\]"):
        llm_d_block_hashes([1], 1, "model")
    assert KVCacheManager(8, 2, hash_algorithm="vllm:sha256").inspect.block_hashes(Sequence("a", [1, 2]))
