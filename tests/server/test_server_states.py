"""`kvblocks serve` with a model whose layers keep states: what clients and operators see of them."""

import json
import os
import shutil

import httpx2
import openai
import pytest
from engine.hybrid_models import save_tiny
from server.server_harness import series, serving

pytestmark = pytest.mark.skipif(os.name != "posix", reason="ends a process by a signal")

STORY = "the hen and the cat sat on the mat and " * 12
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.fixture(scope="module")
def kimi_folder(tmp_path_factory, tiny_folder):
    """A random Kimi Linear with the tiny model's tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("kimi")
    tiny = json.loads((tiny_folder / "config.json").read_text())
    fields = {"vocab_size": tiny["vocab_size"], "eos_token_id": tiny["eos_token_id"], "dtype": "float32"}
    save_tiny(folder, "kimi_linear", num_files=2, **fields)
    for name in TOKENIZER_FILES:
        shutil.copy(tiny_folder / name, folder / name)
    return folder


def test_a_conversation_hits_its_state(kimi_folder):
    with serving(kimi_folder, "--deterministic", "--num-blocks", "120", "--num-state-slots", "3") as (_, url, lines):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        http = httpx2.Client(base_url=url.removesuffix("/v1"), timeout=60, trust_env=False)
        with client, http:
            messages = [{"role": "user", "content": STORY}]

            def ask():
                answer = client.chat.completions.create(
                    model=kimi_folder.name,
                    messages=messages,
                    max_tokens=12,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                return answer.choices[0].message.content, answer.usage

            said, usage = ask()
            assert usage.prompt_tokens_details.cached_tokens == 0
            length = usage.prompt_tokens
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and the hen?"}]
            second, usage = ask()
            cached = usage.prompt_tokens_details.cached_tokens
            assert length * 31 // 32 - 16 <= cached <= length  # up to the state at the end of the first prompt

            metrics = series(url)
            assert metrics["kvblocks_state_slots"] == metrics["kvblocks_free_state_slots"] == 3
            assert metrics['kvblocks_state_copies_total{kind="restored"}'] == 1
            assert metrics['kvblocks_state_copies_total{kind="saved"}'] >= 2

            # It parts from the story where K and V are cached, and no state is.
            parted = STORY[: len(STORY) // 2] + "dog " * 8
            asked = http.post("/v1/cache/explain", json={"messages": [{"role": "user", "content": parted}]}).json()
            assert asked["prompts"][0]["cause"] == "state"

            assert http.post("/v1/cache/reset", json={}).status_code == 200
            again, usage = ask()
            assert (again, usage.prompt_tokens_details.cached_tokens) == (second, 0)
    assert lines[0].startswith("KV cache: 120 blocks of 16 tokens")
