"""The hashes of Dynamo's and llm-d's routers: golden vectors, Dynamo's own function, and errors for bad input."""

import importlib.util
import json
import sys
from pathlib import Path
from random import Random

import pytest

from kvblocks import InvalidArgumentError, InvalidTokensError
from kvblocks.wire.router_hashes import dynamo_block_hashes, llm_d_block_hashes

GOLDEN = json.loads(Path(__file__).with_name("golden_router_hashes.json").read_text())


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
    first, num_placeholders, last = case["tokens"]
    tokens = first + [case["placeholder"]] * num_placeholders + last
    end = len(first) + num_placeholders
    blocks = range(len(first) // 4, -(-end // 4))
    images = {block: [case["image"]] for block in blocks}
    hashes = llm_d_block_hashes(tokens, 4, case["model"], images=images)
    assert [f"{number:016x}" for number in hashes] == case["hashes"]
    assert llm_d_block_hashes(tokens, 4, case["model"], images=images, seed="other")[0] != hashes[0]
    assert llm_d_block_hashes(tokens, 4, "an adapter")[0] != llm_d_block_hashes(tokens, 4, case["model"])[0]


def test_bad_input_is_refused():
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
    with pytest.raises(InvalidArgumentError, match=r"kvblocks\[wire\]"):
        llm_d_block_hashes([1], 1, "model")
