"""OpenAI's Responses over HTTP, with OpenAI's client: answers, streams, tools, and answers that are kept."""

import json

import openai
import pytest
from server.server_harness import MODEL, Gate, running_server, tiny_loaded

from kvblocks.server.access.callers import ANYONE, Caller, TenantKey, digest_of
from kvblocks.server.errors import ApiError
from kvblocks.server.protocols.response_store import MAX_BYTES, MAX_RESPONSES, ResponseStore, StoredResponse
from kvblocks.server.protocols.responses_body import parse_response

SYSTEM = "the cat is in the hat. " * 10
TOOL = {
    "type": "function",
    "name": "find_kettle",
    "description": "Find a kettle.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["slate", "sand"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder, 4096), cache={"deterministic": True}) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def ask(client, **options):
    values = {"model": MODEL, "input": "Who?", "instructions": SYSTEM, "max_output_tokens": 6, "temperature": 0}
    return client.responses.create(**values | options)


def test_a_response_says_what_a_chat_says(client):
    said = ask(client)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who?"}]
    options = {"messages": chat, "model": MODEL, "temperature": 0}
    other = client.chat.completions.create(max_completion_tokens=6, **options)
    assert said.output_text == other.choices[0].message.content != ""
    assert (said.object, said.status, said.incomplete_details.reason) == ("response", "incomplete", "max_output_tokens")
    assert said.id.startswith("resp_")
    assert (said.instructions, said.model, said.temperature, said.store) == (SYSTEM, MODEL, 0, None or said.store)
    assert said.usage.input_tokens == other.usage.prompt_tokens
    assert said.usage.output_tokens == 6
    assert other.usage.prompt_tokens_details.cached_tokens > 64
    again = ask(client)
    assert again.usage.input_tokens_details.cached_tokens > 64


def test_a_stream_has_its_events_in_order_and_says_the_same(client):
    whole = ask(client)
    told = list(ask(client, stream=True))
    kinds = [event.type for event in told]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert "".join(event.delta for event in told[4:-4]) == told[-4].text == whole.output_text
    assert told[-1].response.output_text == whole.output_text
    assert told[-1].response.usage.output_tokens == 6


def test_a_required_call_is_an_item_whole_and_in_a_stream(client):
    choice = {"type": "function", "name": "find_kettle"}
    options = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 100}
    said = ask(client, **options)
    (item,) = said.output
    assert (said.status, item.type, item.name) == ("completed", "function_call", "find_kettle")
    assert json.loads(item.arguments)["colour"] in {"slate", "sand"}
    told = list(ask(client, stream=True, **options))
    assert [event.type for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert told[3].delta == told[4].arguments == told[5].item.arguments == item.arguments
    with client.responses.stream(model=MODEL, input="Who?", temperature=0, **options) as stream:
        assert stream.get_final_response().output[0].name == "find_kettle"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sold"}
    turn = ask(client, input=[{"role": "user", "content": "Who?"}, item.model_dump(), result], tools=[TOOL])
    assert turn.usage.input_tokens > said.usage.input_tokens
    kept = ask(client, input=[result], previous_response_id=said.id, tools=[TOOL])
    assert kept.usage.input_tokens == turn.usage.input_tokens


def test_an_answer_goes_on_from_one_that_is_kept(client):
    first = ask(client)
    items = [{"role": "user", "content": "Who?"}, *[item.model_dump() for item in first.output]]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "And?"}]})
    kept, sent = ask(client, input="And?", previous_response_id=first.id), ask(client, input=items)
    assert kept.output_text == sent.output_text
    assert kept.usage.input_tokens == sent.usage.input_tokens
    other = ask(client, input="And?", previous_response_id=first.id, instructions=None)
    assert other.usage.input_tokens < kept.usage.input_tokens - 100  # instructions aren't kept
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)
    unkept = ask(client, store=False)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, previous_response_id=unkept.id)
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


def test_another_tenants_answers_are_not_gone_on_from(tiny_folder):
    keys = {name: f"sk-{name}-0123456789" for name in ("one", "two")}
    tenants = tuple(TenantKey(Caller(tenant=name), digest_of(key)) for name, key in keys.items())
    with running_server(tiny_loaded(tiny_folder), keys=tenants, admin_key="the-operators-own-key") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["one"], max_retries=0) as client:
            first = ask(client)
            salted = ask(client, extra_body={"cache_salt": "x"})
            with pytest.raises(openai.BadRequestError):
                ask(client, previous_response_id=salted.id)  # another salt
            assert ask(client, previous_response_id=salted.id, extra_body={"cache_salt": "x"}).output
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["two"], max_retries=0) as client:
            for call in (client.responses.retrieve, client.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    call(first.id)
            with pytest.raises(openai.BadRequestError):
                ask(client, previous_response_id=first.id)
            found = ask(client, extra_body={"prompt_cache_options": {"comparison_response_id": first.id}})
            assert found.prompt_cache_diagnostics.type == "comparison_response_not_found"
        with server.http() as http:
            body = {"cache_salt": "kvblocks/tenant/one"}
            headers = {"authorization": "Bearer the-operators-own-key"}
            assert http.post("/v1/cache/forget", json=body, headers=headers).status_code == 200
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["one"], max_retries=0) as client,
            pytest.raises(openai.NotFoundError),
        ):
            client.responses.retrieve(first.id)


def test_diagnostics_and_retention(client):
    first = ask(client, extra_body={"prompt_cache_retention": "24h"})
    assert first.cache_marks[0]["outcome"] == "pinned"
    options = {"prompt_cache_options": {"comparison_response_id": first.id}}
    assert ask(client, extra_body=options).prompt_cache_diagnostics.type == "cache_hit"
    missed = ask(client, tools=[TOOL], extra_body=options).prompt_cache_diagnostics
    assert (missed.type, missed.reason) == ("cache_miss", "tools_changed")
    assert missed.cache_missed_tokens > 0


def test_json_by_a_schema_and_fields_that_are_told(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    said = ask(client, text=form, max_output_tokens=60)
    assert json.loads(said.output_text)["a"] in {1, 2}
    told = ask(client, reasoning={"effort": "high"}, truncation="auto", text={"verbosity": "low"})
    assert sorted(warning.partition(":")[0] for warning in told.warnings) == ["reasoning", "truncation", "verbosity"]


def test_max_output_tokens_beyond_the_context_end_there(client):
    assert ask(client, max_output_tokens=10**6, extra_body={}).status in {"completed", "incomplete"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format.type"),
        ({"colour": 1}, "colour"),
    ],
)
def test_what_is_wrong_is_told_by_name(options, param):
    with pytest.raises(ApiError) as raised:
        parse_response({"input": "a", **options}, ResponseStore(), ANYONE)
    assert raised.value.param == param
    assert "expected" in raised.value.message


def test_a_failure_in_a_stream_is_its_last_event(server, client):
    gate = Gate(server.engine)
    stream = iter(ask(client, stream=True, max_output_tokens=50))
    next(stream)
    gate.failure = RuntimeError("a fault of a test")
    error, failed = list(stream)[-2:]
    assert (error.type, error.code, failed.type) == ("error", "step_failed", "response.failed")
    assert failed.response.error.code == "step_failed"
    server.engine.runner.run = gate._run  # noqa: SLF001
    assert ask(client).output_text


def test_kept_answers_are_bounded():
    store = ResponseStore()
    for number in range(MAX_RESPONSES + 3):
        store.keep(StoredResponse(None, None, f"resp_{number}", b"{}", b"[]"))
    assert len(store) == MAX_RESPONSES
    assert store.find("resp_2", None) is None
    assert store.find("resp_3", "other") is None
    assert store.find("resp_3", None) is not None
    store.keep(StoredResponse(None, None, "large", b"{}", b"x" * (MAX_BYTES - 1000)))
    assert store.find("large", None) is not None and len(store) < 10
    store.keep(StoredResponse(None, None, "too large", b"{}", b"x" * MAX_BYTES))
    assert store.find("too large", None) is None and store.find("large", None) is not None
    store.forget(None)
    assert len(store) == 0
