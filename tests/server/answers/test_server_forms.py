"""Answers of a given form over loopback: OpenAI's and vLLM's fields, and schemas that are meant to stop a server."""

import asyncio
import json
import sys
import threading
import time

import openai
import pytest
from server.server_harness import MODEL, Gate, in_background, outcomes, running_server, tiny_loaded, wait_for

from kvblocks.engine.grammar.grammar import GrammarCompiler
from kvblocks.server import service as service_module
from kvblocks.server.access import compiling
from kvblocks.server.access.compiling import Compilers
from kvblocks.server.body.fields import Fields
from kvblocks.server.body.response_format import MAX_CHOICES, MAX_FORMED, parse_form
from kvblocks.server.errors import ApiError

CHAT = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, "three"]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
HOT = {"model": MODEL, "temperature": 2.0, "max_tokens": 200}


def by_schema(schema=SCHEMA):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture(scope="module")
def server(model):
    with running_server(model) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def is_answer(text):
    value = json.loads(text)
    assert set(value) == {"ok", "n"}
    assert value["ok"] in {True, False}
    assert value["n"] in {1, 22, "three"}
    return True


def test_a_chat_answers_by_its_schema_streamed_or_not(client, server):
    answer = client.chat.completions.create(messages=CHAT, response_format=by_schema(), n=8, seed=1, **HOT)
    whole = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert len(whole) >= 6
    assert all(is_answer(choice.message.content) for choice in whole)
    texts = dict.fromkeys(range(8), "")
    for chunk in client.chat.completions.create(
        messages=CHAT, response_format=by_schema(), n=8, seed=1, stream=True, **HOT
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in answer.choices]
    server.wait_until_idle()


def test_a_completion_answers_with_an_object_and_with_vllms_fields(client):
    def ask(**fields):
        choices = client.completions.create(prompt="hello", n=6, seed=2, extra_body=fields, **HOT).choices
        found = [choice.text for choice in choices if choice.finish_reason == "stop"]
        assert found
        return found

    assert all(isinstance(json.loads(text), dict) for text in ask(response_format={"type": "json_object"}))
    assert all(is_answer(text) for text in ask(structured_outputs={"json": SCHEMA}))
    assert set(ask(structured_outputs={"choice": ["left", "right"]})) == {"left", "right"}
    many = [f"{number:03} of {MAX_CHOICES}" for number in range(MAX_CHOICES)]
    assert set(ask(structured_outputs={"choice": many})) <= set(many)
    assert all(len(text) == 4 and text.isdigit() for text in ask(structured_outputs={"regex": "[0-9]{4}"}))


def test_text_is_no_form(client):
    options = {"messages": CHAT, "model": MODEL, "temperature": 0, "max_tokens": 5}
    plain = client.chat.completions.create(**options)
    asked = client.chat.completions.create(response_format={"type": "text"}, **options)
    assert asked.choices[0].message.content == plain.choices[0].message.content


WRONG = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{}"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {}, "grammar": "start: a"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_wrong_forms_are_refused_by_name(body, param):
    with pytest.raises(ApiError) as raised:
        parse_form(Fields(body))
    assert (raised.value.status, raised.value.param) == (400, param)
    assert "expected" in raised.value.message


def test_more_answers_of_a_form_than_a_request_may_have_are_refused_by_name(client, server):
    most = {"response_format": {"type": "json_object"}}
    with pytest.raises(openai.BadRequestError, match=r"n: expected at most 32 answers .* response_format, got 33"):
        client.completions.create(prompt=["hello"] * 11, n=3, extra_body=most, **HOT)
    answer = client.completions.create(prompt=["hello"] * 16, n=2, extra_body=most, **{**HOT, "max_tokens": 1})
    assert len(answer.choices) == MAX_FORMED
    server.wait_until_idle()


HOSTILE = {
    "invalid": {"type": "nonsense"},
    "recursive": {"$ref": "#"},
    "deep": json.loads('{"items":' * 200 + "{}" + "}" * 200),
    "huge": {"enum": [f"{index:08}" for index in range(30_000)]},
    "multiple": {"multipleOf": 999_983},
    "pattern": {"type": "string", "pattern": "(" * 3000},
    "unsupported": {"uniqueItems": True},
}


def test_hostile_schemas_are_refused_while_another_chat_goes_on(server, client):
    """While such requests come, another client's stream gets its tokens, and the event loop answers."""
    texts = []

    def chat():
        with server.client() as other:
            options = {"model": MODEL, "temperature": 0, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
            stream = other.chat.completions.create(messages=CHAT, stream=True, **options)
            texts.extend(chunk.choices[0].delta.content for chunk in stream)

    thread = in_background(chat)
    for schema in HOSTILE.values():
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(messages=CHAT, response_format=by_schema(schema), **HOT)
        assert raised.value.param == "response_format"
        assert "expected" in str(raised.value)
        assert len(str(raised.value)) < 1000
    thread.join(60)
    assert len(texts) > 100
    server.wait_until_idle()
    wait_for(lambda: server.service.bodies.num_bytes == 0)


@pytest.fixture
def slow_compiler(monkeypatch):
    """Compiling takes until the event is set."""
    gate, begun, compile_schema = threading.Event(), [], GrammarCompiler.json_schema

    def wait_and_compile(self, schema):
        begun.append(schema)
        assert gate.wait(60)
        return compile_schema(self, schema)

    monkeypatch.setattr(GrammarCompiler, "json_schema", wait_and_compile)
    yield gate, begun
    gate.set()


def test_a_schema_that_takes_longer_than_a_second_is_refused_and_counts_until_its_thread_has_ended(
    server, client, slow_compiler, monkeypatch
):
    monkeypatch.setattr(compiling, "COMPILE_S", 0.5)
    gate, _ = slow_compiler
    with pytest.raises(openai.BadRequestError, match="that compiles within") as raised:
        client.chat.completions.create(messages=CHAT, response_format=by_schema(), **HOT)
    assert raised.value.code == "compile_timeout"
    assert server.service.num_open == 1
    plain = client.chat.completions.create(messages=CHAT, model=MODEL, max_tokens=3)
    assert plain.usage.completion_tokens > 0
    gate.set()
    server.wait_until_idle()


def test_when_no_thread_is_free_a_client_is_told_to_come_back(server, client, slow_compiler, monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE_S", 0.5)
    gate, begun = slow_compiler
    errors, before = [], server.service.metrics.counts()

    def ask():
        with server.client() as other:
            try:
                other.chat.completions.create(messages=CHAT, response_format=by_schema(), **HOT)
            except openai.APIStatusError as error:
                errors.append((error.status_code, error.code))

    threads = [in_background(ask) for _ in range(4)]
    for thread in threads:
        thread.join(60)
    assert sorted(errors) == [(400, "compile_timeout")] * 2 + [(429, "compiling")] * 2
    counted = server.service.metrics.counts()
    assert [counted[name] - before[name] for name in ("rejected", "refused")] == [2, 2]
    assert len(begun) == 2
    gate.set()
    server.wait_until_idle()


def test_a_client_that_goes_away_while_its_schema_is_compiled_leaves_nothing(server, slow_compiler):
    gate, begun = slow_compiler
    before = outcomes(server).copy()

    async def go_away():
        async with server.async_client() as client:
            asking = asyncio.create_task(
                client.chat.completions.create(messages=CHAT, response_format=by_schema(), **HOT)
            )
            await asyncio.to_thread(wait_for, lambda: begun)
            asking.cancel()

    asyncio.run(go_away())
    wait_for(lambda: outcomes(server) != before)
    assert server.service.num_open == 1
    gate.set()
    server.wait_until_idle()


def test_a_form_that_becomes_too_hard_ends_its_own_answer(model, caplog):
    with running_server(model) as server, server.client() as client:
        gate = Gate(server.engine)
        gate.shut()
        plain = []
        thread = in_background(
            lambda: plain.append(client.completions.create(model=MODEL, prompt="the", max_tokens=20, temperature=0))
        )
        gate.wait_for_step()
        gate.open()
        hard = {"structured_outputs": {"regex": "([a-z]{1,1000}){1,1000}"}}
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(prompt="hello", seed=1, n=3, extra_body=hard, **{**HOT, "temperature": 5.0})
        assert raised.value.code == "grammar_too_complex"
        thread.join(60)
        assert plain[0].usage.completion_tokens == 20
        server.wait_until_idle()
    assert not caplog.records  # a client's mistake: it could fill the log


def test_without_the_library_it_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with running_server(model) as server, server.client() as client:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"pip install 'kvblocks\[structured\]'"):
                client.chat.completions.create(messages=CHAT, response_format=by_schema(), **HOT)
        assert client.chat.completions.create(messages=CHAT, model=MODEL, max_tokens=1).usage.completion_tokens == 1
        server.wait_until_idle()


def test_a_server_that_stops_while_its_compiler_is_made_gives_back_what_it_took(model, monkeypatch):
    """The compiling threads have ended by then, and take no more work."""
    made, make = threading.Event(), service_module.GrammarCompiler

    def wait_and_make(*arguments):
        assert made.wait(60)
        return make(*arguments)

    async def take_nothing(*_):
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(service_module, "GrammarCompiler", wait_and_make)
    monkeypatch.setattr(Compilers, "run", take_nothing)
    errors = []

    def ask():
        with server.client() as client:
            try:
                client.chat.completions.create(messages=CHAT, response_format=by_schema(), **HOT)
            except openai.APIStatusError as error:
                errors.append((error.status_code, error.code))

    with running_server(model) as server:
        thread = in_background(ask)
        wait_for(lambda: server.service.num_open == 1)
        server.service.begin_stop(30.0)
        made.set()
        thread.join(60)
        assert errors == [(503, "stopping")]
        assert server.service.num_open == 0


def test_what_a_compiler_raises_comes_out_and_is_given_back_once():
    given = []

    async def run():
        compilers = Compilers()
        try:
            assert await compilers.run(lambda: 5, lambda: given.append("never")) == 5
            with pytest.raises(TimeoutError, match="its own"):  # not the limit's
                await compilers.run(_raise_timeout, lambda: given.append("once"))
        finally:
            compilers.stop()

    asyncio.run(run())
    assert given == ["once"]


def _raise_timeout():
    time.sleep(0)
    raise TimeoutError("its own")
