"""Endpoints that generate nothing: tokens of texts in vLLM's form, server information in SGLang's, model names."""

import openai
import pytest
from server.server_harness import MODEL, running_server, tiny_loaded

from kvblocks.errors import InvalidArgumentError
from kvblocks.server.settings import ServerSettings
from kvblocks.version import __version__

CHAT = [{"role": "user", "content": "the cat <|im_end|> in the hat"}]
KEYLESS = ["/version"]
WITH_KEY = ["/tokenizer_info", "/model_info", "/get_model_info", "/server_info", "/get_server_info"]


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with server.http() as http:
        yield http


def post(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_text_becomes_the_tokens_of_a_completion_and_back(server, http, model):
    text = "the hen<|im_end|> in 12 dens: é"
    answer = post(http, "/tokenize", model=MODEL, prompt=text, return_token_strs=True)
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 1024)
    assert answer["token_strs"] == [model.tokenizer.id_to_token(token) for token in answer["tokens"]]
    assert post(http, "/tokenize", prompt=text)["token_strs"] is None
    with server.client() as client:
        echoed = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0)
    assert echoed.usage.prompt_tokens == answer["count"]
    assert post(http, "/detokenize", model=MODEL, tokens=answer["tokens"]) == {"prompt": text}
    assert post(http, "/tokenize", prompt="")["tokens"] == []
    assert post(http, "/detokenize", tokens=[]) == {"prompt": ""}
    server.wait_until_idle()


def test_a_chat_becomes_the_tokens_that_it_would_be_answered_from(http, model):
    for begins in (True, False):
        expected = model.tokenizer.apply_chat_template(CHAT, add_generation_prompt=begins)
        assert post(http, "/tokenize", messages=CHAT, add_generation_prompt=begins)["tokens"] == expected
    assert post(http, "/tokenize", messages=CHAT)["tokens"] == model.tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "add_generation_prompt": "yes"}, "add_generation_prompt"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [[1], [2]]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "prompt"),
        ("/detokenize", {"tokens": [1] * 1025}, "tokens"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens"),
    ],
)
def test_other_bodies_are_refused_by_name_and_leave_nothing(server, http, path, body, param):
    error = refused(http, path, **body)
    assert error["param"] == param
    assert "expected" in error["message"]
    assert (server.service.num_open, server.service.bodies.num_bytes) == (0, 0)


def test_a_text_that_the_context_has_no_room_for_is_refused_before_it_is_encoded(server, http, monkeypatch):
    monkeypatch.setattr(server.engine.model.tokenizer, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    assert refused(http, "/tokenize", prompt="x" * 100_000)["code"] == "context_length_exceeded"
    assert (server.service.num_open, server.service.bodies.num_bytes) == (0, 0)


def test_what_is_served_is_told(server, http):
    assert http.get("/version").json() == {"version": __version__}
    info = http.get("/model_info").json()
    assert (info["model_path"], info["is_generation"], info["max_model_len"]) == (MODEL, True, 1024)
    assert http.get("/get_model_info").json() == info
    info = http.get("/server_info").json()
    assert (info["served_model_name"], info["page_size"], info["num_blocks"], info["status"]) == (
        MODEL,
        16,
        256,
        "ready",
    )
    assert info["max_total_num_tokens"] == 256 * 16
    assert http.get("/get_server_info").json() == info


def test_what_texts_begin_and_end_with_is_told(http, model):
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert "add_generation_prompt" in info["chat_template"]
    assert model.tokenizer.chat_template == info["chat_template"]


def test_another_model_is_not_found(http):
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = http.post(path, json={"model": "gpt-5", **body})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_may_have_several_names_and_answers_with_the_first(model):
    with running_server(model, model_names=("large", "small")) as server, server.client() as client:
        assert [known.id for known in client.models.list().data] == ["large", "small"]
        for name in ("large", "small"):
            assert client.models.retrieve(name).id == name
            assert client.completions.create(model=name, prompt="hello", max_tokens=1).model == "large"
        with pytest.raises(openai.NotFoundError, match="expected one of 'large', 'small', got 'tiny'"):
            client.completions.create(model=MODEL, prompt="hello")
    for names in (("",), ("a\nb",)):
        with pytest.raises(InvalidArgumentError, match="--served-model-name"):
            ServerSettings(model_names=names)


def test_with_keys_all_but_the_version_want_one(model):
    with running_server(model, api_key="secret") as server, server.http() as http:
        assert [http.get(path).status_code for path in KEYLESS] == [200]
        assert [http.get(path).status_code for path in WITH_KEY] == [401] * len(WITH_KEY)
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 401
        assert http.post("/detokenize", json={"tokens": [1]}).status_code == 401
        http.headers["authorization"] = "Bearer secret"
        assert [http.get(path).status_code for path in WITH_KEY] == [200] * len(WITH_KEY)
        assert post(http, "/tokenize", prompt="a")["count"] == 1


def test_ping_load_and_embeddings(http, server):
    assert (http.get("/ping").status_code, http.get("/ping").content) == (200, b"")
    assert http.get("/load").json() == {"server_load": 0}
    refused = http.post("/v1/embeddings", json={"input": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_embeddings")
    assert "/v1/chat/completions" in refused.json()["error"]["message"]
    del server


def test_all_endpoints_are_described_in_openapi(http):
    described = http.get("/openapi.json").json()
    assert described["openapi"].startswith("3.")
    paths = described["paths"]
    assert {"/v1/messages", "/v1/responses", "/v1/chat/completions", "/v1/cache/explain", "/health"} <= set(paths)
    operations = [of for methods in paths.values() for of in methods.values()]
    assert all(of["summary"] for of in operations)
    names = [of["operationId"] for of in operations]
    assert len(set(names)) == len(names)
    assert "security" in paths["/v1/messages"]["post"]
    assert "security" not in paths["/health"]["get"]
    assert paths["/v1/responses/{response_id}"]["get"]["parameters"][0]["name"] == "response_id"
    page = http.get("/docs")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "://" not in page.text
