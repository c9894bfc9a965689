"""examples/mini_sglang/compare.py, over an LLM that only uses its cache: mini-sglang's own needs a GPU."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mini_sglang" / "compare.py"


@pytest.fixture
def example(minisgl, monkeypatch):
    class Model:
        def __init__(self, _, cache_type, page_size):
            minisgl.set_page_size(page_size)
            cache = minisgl.kvcache.create_prefix_cache(torch.device("cpu"), cache_type)
            self.cache_manager = SimpleNamespace(prefix_cache=cache)

        def generate(self, prompts, _):
            cache = self.cache_manager.prefix_cache
            for number, prompt in enumerate(prompts):
                tokens = torch.tensor(prompt, dtype=torch.int32)
                handle = cache.match_prefix(tokens[:-1]).cuda_handle
                cache.lock_handle(handle)
                slots = torch.arange(number * 4096, number * 4096 + len(tokens), dtype=torch.int32)
                slots[: handle.cached_len] = handle.get_matched_indices()
                cache.insert_prefix(tokens, slots)
                cache.lock_handle(handle, unlock=True)
            return [{"token_ids": [len(prompt)]} for prompt in prompts]

    module = ModuleType("minisgl.llm")
    module.LLM = Model
    monkeypatch.setitem(sys.modules, "minisgl.llm", module)
    monkeypatch.setattr(sys.modules["minisgl.core"], "SamplingParams", SimpleNamespace, raising=False)
    return runpy.run_path(str(EXAMPLE))


def test_it_counts_what_the_cache_finds(example, monkeypatch, capsys):
    arguments = SimpleNamespace(model="some", num_requests=8, page_size=16)
    result = example["answer"](arguments, "kvblocks")
    assert len(result["tokens"]) == 8
    assert 0.6 < result["found"] / result["prompt_tokens"] < 1
    assert 0 < result["cache_seconds"] < result["seconds"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "some"])
    monkeypatch.setitem(example["main"].__globals__, "answer_apart", lambda _: result)
    example["main"]()
    assert "equal answers, of 8: 8" in capsys.readouterr().out
