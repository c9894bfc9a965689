"""OpenAI's API over loopback: the real `openai` client, a real uvicorn, and a tiny random model."""

import json
import threading

import httpx2
import openai
import pytest
from server.server_harness import MODEL, in_background, running_server, tiny_loaded, wait_for

from kvblocks.engine import Engine
from kvblocks.server import service_metrics

CHAT = [{"role": "system", "content": "the cat is in the hat. " * 8}, {"role": "user", "content": "hello"}]
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model, cache={"deterministic": True}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture
def cold(server):
    """Nothing is cached when the test begins, and nothing runs when it ends."""
    server.on_thread(server.engine.manager.reset_prefix_cache)
    yield
    server.wait_until_idle()


@pytest.fixture(scope="module")
def engine(model):
    """What the server's answers must be equal to."""
    return Engine(model, num_blocks=64, deterministic=True)


def test_models(client):
    (only,) = client.models.list().data
    assert (only.id, only.object, only.max_model_len) == (MODEL, "model", 1024)
    assert client.models.retrieve(MODEL) == only
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_chat_says_what_the_engine_says_and_what_was_cached(client, engine, cold):
    prompt = engine.model.tokenizer.apply_chat_template(CHAT)
    (expected,) = engine.generate([prompt], max_tokens=12)
    first, second = (
        client.chat.completions.create(messages=CHAT, max_completion_tokens=12, **GREEDY) for _ in range(2)
    )
    for answer in (first, second):
        (choice,) = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
        assert choice.finish_reason == expected.finish_reason
        assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
        assert answer.usage.prompt_tokens == len(prompt) == expected.num_prompt_tokens
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16 > 150
    assert first.id != second.id


def test_a_streamed_chat_is_the_same_in_pieces(client, cold):
    options = {"messages": CHAT, "max_tokens": 12, **GREEDY}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    *texts, last = chunks
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in texts)
    assert last.choices == []
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens_details.cached_tokens > 150


def test_a_stream_without_usage_ends_with_its_last_choice(client, cold):
    chunks = list(client.chat.completions.create(messages=CHAT, max_tokens=3, stream=True, **GREEDY))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_of_several_prompts_and_samples_stand_in_order(client, engine, cold):
    options = {"max_tokens": 6, "temperature": 0.9, "seed": 7, "n": 2}
    prompts = ["the hen", "in the den"]
    expected = engine.generate(prompts, **options)
    answer = client.completions.create(model=MODEL, prompt=prompts, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [completion.text for completion in expected]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage.prompt_tokens == sum(len(engine.model.tokenizer.encode(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == sum(len(completion.token_ids) for completion in expected)
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model=MODEL, prompt=prompts, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_tokens_in_and_out(client, engine, cold):
    prompt = list(range(10, 60))
    (expected,) = engine.generate([prompt], max_tokens=5, ignore_eos=True)
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(prompt=prompt, max_tokens=5, extra_body=extra, **GREEDY)
    assert answer.choices[0].token_ids == expected.token_ids
    stream = client.completions.create(prompt=prompt, max_tokens=5, extra_body=extra, stream=True, **GREEDY)
    assert [token for chunk in stream for token in chunk.choices[0].token_ids] == expected.token_ids


def test_a_stop_string_ends_the_text_before_it(client, cold):
    whole = client.completions.create(prompt="hello", max_tokens=30, **GREEDY).choices[0].text
    stop = whole[12:14]
    answer = client.completions.create(prompt="hello", max_tokens=30, stop=[stop, "never"], **GREEDY)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    stream = client.completions.create(prompt="hello", max_tokens=30, stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole[: whole.index(stop)]


def test_a_seed_repeats_and_none_does_not(client, cold):
    def sample(seed):
        answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=20, temperature=1, seed=seed)
        return answer.choices[0].text

    assert sample(3) == sample(3)
    assert len({sample(None), sample(None), sample(3), sample(4)}) == 4


def test_without_max_tokens_a_chat_may_go_to_the_end_of_the_context(client, server, cold):
    answer = client.chat.completions.create(messages=CHAT, extra_body={"ignore_eos": True}, **GREEDY)
    assert answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_what_the_engine_refuses_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="expected at most 1024 tokens, the model's context") as raised:
        client.completions.create(prompt="hello", max_tokens=2000, **GREEDY)
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="expected token ids below 266, the vocabulary's size, got 5000"):
        client.completions.create(prompt=[5000], **GREEDY)
    with pytest.raises(openai.BadRequestError, match="logprobs: expected true or false, got 5"):
        client.chat.completions.create(messages=CHAT, logprobs=5, **GREEDY)
    with pytest.raises(
        openai.NotFoundError, match=f"expected '{MODEL}', the one that is served, got 'gpt-5'"
    ) as raised:
        client.completions.create(model="gpt-5", prompt="hello")
    assert raised.value.code == "model_not_found"


def test_a_stream_that_cannot_begin_is_an_http_error(client):
    with pytest.raises(openai.BadRequestError, match="model's context"):
        client.completions.create(prompt="hello", max_tokens=2000, stream=True, **GREEDY)


def test_salts_share_nothing(client, cold):
    def cached(salt):
        extra = {"cache_salt": salt} if salt else {}
        answer = client.chat.completions.create(messages=CHAT, max_tokens=2, extra_body=extra, **GREEDY)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert min(cached("a"), cached("b"), cached(None)) > 150


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/completions", 405, "expected POST, got GET"),
        ("DELETE", "/v1/models", 405, "expected GET, HEAD, got DELETE"),
        ("PUT", "/v1/cache/pins", 405, "expected GET, HEAD, POST, got PUT"),
    ],
)
def test_wrong_paths_and_methods_have_openais_shape(server, method, path, status, words):
    with server.http() as http:
        response = http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert path in error["message"]


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1
        ("/v1/v1/chat/completions", "/v1/chat/completions"),  # and one with it twice
        ("/v1/chat", "/v1/chat/completions"),
        ("/V1/Models", "/v1/models"),
        ("/healthz", "/health"),
        ("/v1/cache/stat", "/v1/cache/stats"),
        ("/v1/audio/speech", None),
        ("/swagger", None),
        ("/" + "x" * 5000, None),
        ("/v1/%F0%9F%90%88/%00", None),
    ],
)
def test_a_path_that_the_server_does_not_have_is_told_with_those_that_it_has(server, path, nearest):
    with server.http() as http:
        response = http.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (404, "no_such_path", "invalid_request_error")
    for ours in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/v1/cache/pins"):
        assert ours in error["message"]
    assert "{" not in error["message"]
    assert error["message"].endswith(f": did you mean {nearest}?") or (
        nearest is None and "mean" not in error["message"]
    )
    assert len(error["message"]) < 1000


BODIES = {
    b"": (400, "expected a JSON body"),
    b"{": (400, "expected a JSON body"),
    b"\xff\xfe": (400, "expected a JSON body"),
    b"[" * 100_000: (400, "nested too deep"),
    b"[]": (400, "JSON object"),
    b'{"prompt": "ab\\ud800"}': (
        400,
        "expected a text of valid Unicode, got a lone surrogate, \\ud800, as character 3",
    ),
    b'{"prompt": "a", "\\ud800": 1}': (400, "expected known fields"),
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}": (400, "expected a JSON body"),
}


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "top_k", "presence_penalty"])
@pytest.mark.parametrize("number", ["1" + "0" * 400, "9" * 4300])
def test_numbers_that_nothing_can_hold_are_refused(server, field, number):
    body = b'{"prompt": "a", "%s": %s}' % (field.encode(), number.encode())
    with server.http() as http:
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400


@pytest.mark.parametrize("body", BODIES, ids=lambda body: ascii(body[:12]))
def test_malformed_bodies_are_refused(server, body):
    status, words = BODIES[body]
    with server.http() as http:
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("Zstd", 415), ("utf-8", 200), ("identity", 200)])
def test_a_compressed_body_is_refused_by_name(server, encoding, status):
    headers = {"content-type": "application/json", "content-encoding": encoding}
    with server.http() as http:
        response = http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert response.status_code == status
    if status == 415:
        wanted = f"content-encoding: expected a body that isn't compressed, got {encoding.lower()}"
        assert response.json()["error"]["message"] == wanted


def test_a_web_page_cannot_use_the_server(server):
    """A browser sends text/plain to other sites without asking them; JSON only if they agree, and this one doesn't."""
    with server.http() as http:
        for path in ("/v1/completions", "/v1/cache/reset"):
            response = http.post(path, content=json.dumps({}), headers={"content-type": "text/plain"})
            assert response.status_code == 415
            assert "application/json" in response.json()["error"]["message"]
        preflight = http.options(
            "/v1/completions", headers={"origin": "http://x", "access-control-request-method": "POST"}
        )
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers


def test_health_and_metrics(server, client, cold):
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok", "needs_key": False}
        before = _metrics(http)
        client.completions.create(prompt="hello", max_tokens=5, **GREEDY)
        after = _metrics(http)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}  # some ages have no series at first
    assert grown['kvblocks_server_requests_total{outcome="finished"}'] == 1
    assert grown["kvblocks_server_generated_tokens_total"] == 5
    assert grown["kvblocks_server_ttft_seconds_count"] == 1
    assert grown["kvblocks_queries_total"] == 1
    assert after["kvblocks_server_open_answers"] == 0
    assert after["kvblocks_free_blocks"] == 256


def test_a_page_of_metrics_is_made_on_a_thread_and_shared(server, monkeypatch):
    made, may_end = [], threading.Event()

    def make(registry):
        made.append(threading.current_thread().name)
        assert may_end.wait(60)
        return b"# page %d of %d\n" % (len(made), bool(registry))

    monkeypatch.setattr(service_metrics, "generate_latest", make)
    monkeypatch.setattr(service_metrics, "PAGE_S", 3600.0)
    monkeypatch.setattr(server.service.metrics, "_page", None)
    with server.http() as http:
        pages = []
        asking = [
            in_background(lambda: pages.append(httpx2.get(f"{server.url}/metrics", timeout=60, trust_env=False).text))
            for _ in range(5)
        ]
        wait_for(lambda: made)
        assert http.get("/health").status_code == 200  # though the page isn't made yet
        may_end.set()
        for thread in asking:
            thread.join(60)
        assert pages == ["# page 1 of 1\n"] * 5
        monkeypatch.setattr(service_metrics, "PAGE_S", 0.0)
        assert http.get("/metrics").text == "# page 2 of 1\n"
    assert len(made) == 2 and "uvicorn" not in made  # which is the event loop's thread


def _metrics(http):
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
