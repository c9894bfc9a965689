"""`kvblocks serve --remember-next-token`, end to end: usage, streams, tenants, metrics, and resets."""

import re

import pytest
from server.server_harness import MODEL, running_server, tiny_loaded

PROMPT = [number % 250 for number in range(3, 62)]  # three blocks and eleven tokens


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"remember_next_token": True}) as running:
        yield running


def complete(http, **options):
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 4, **options}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def read_metric(http, name):
    (value,) = re.findall(rf"^{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(value)


def test_a_repeat_has_its_whole_prompt_cached(server):
    with server.http() as http:
        text, num_cached = complete(http)
        assert num_cached == 0
        assert complete(http) == (text, len(PROMPT))
        assert complete(http, temperature=0.5, seed=1)[1] < len(PROMPT)
        assert complete(http, max_tokens=1)[1] == len(PROMPT)
        assert complete(http, cache_salt="other") == (text, 0)
        assert read_metric(http, "kvblocks_remembered_answers_total") == 2
        assert read_metric(http, "kvblocks_remembered_prompts") == 2
        assert read_metric(http, "kvblocks_remembered_blocks") == 8
        assert http.get("/v1/cache/stats").json()["remembered"] == {"num_prompts": 2, "num_blocks": 8, "num_answers": 2}
        assert http.post("/v1/cache/reset", json={}).status_code == 200
        assert complete(http) == (text, 0)


def test_a_streamed_repeat_is_the_same(server):
    client = server.client()
    texts = []
    for _ in range(2):
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        texts.append("".join(choice.text for chunk in chunks for choice in chunk.choices))
    assert texts[0] == texts[1]
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(PROMPT)


def test_without_the_flag_there_is_none(tiny_folder):
    with running_server(tiny_loaded(tiny_folder)) as running, running.http() as http:
        complete(http)
        assert complete(http)[1] == 48
        assert "remembered" not in http.get("/metrics").text
        assert http.get("/v1/cache/stats").json()["remembered"] is None
