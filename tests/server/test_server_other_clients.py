"""What clients of vLLM and SGLang ask for beyond OpenAI's API, over HTTP with a tiny model."""

import json

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from server.server_harness import MODEL, running_server, tiny_loaded

CHAT = [{"role": "user", "content": "hello"}]
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_folder):
    with running_server(tiny_loaded(tiny_folder), cache={"deterministic": True}) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


WITH_USAGE = {"include_usage": True, "continuous_usage_stats": True}


def test_each_chunk_says_what_was_used_so_far(client):
    prompts = [list(range(10, 40)), list(range(10, 25))]
    chunks = list(
        client.completions.create(
            prompt=prompts,
            n=2,
            max_tokens=5,
            stream=True,
            stream_options=WITH_USAGE,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **GREEDY,
        )
    )
    *said, last = chunks
    counted = [0] * 4
    for chunk in said:
        (choice,) = chunk.choices
        counted[choice.index] += len(choice.token_ids)
        expected = (len(prompts[choice.index // 2]), counted[choice.index])
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == expected
        assert chunk.usage.total_tokens == sum(expected)
    assert counted == [5] * 4
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (45, 20)


def test_a_chats_chunks_count_hidden_tokens_too(client):
    """The first chunk, of the role alone, has none; what has no text yet counts with what is said next."""
    chunks = list(
        client.chat.completions.create(
            messages=CHAT,
            max_tokens=20,
            stream=True,
            stream_options=WITH_USAGE,
            extra_body={"ignore_eos": True},
            **GREEDY,
        )
    )
    numbers = [chunk.usage.completion_tokens for chunk in chunks]
    assert (numbers[0], numbers[-2], numbers[-1]) == (0, 20, 20)
    assert numbers == sorted(numbers)
    assert chunks[0].usage.prompt_tokens == chunks[-1].usage.prompt_tokens > 0


def test_special_tokens_in_a_completions_text_are_read_as_such(client, server):
    """As in vLLM, where the client writes the whole prompt; in a chat they are text, whatever a user writes."""
    tokenizer = server.engine.model.tokenizer
    text = tokenizer.id_to_token(min(tokenizer.special_token_ids))
    num_spelt = len(tokenizer.encode(text * 3))
    num_read = len(tokenizer.encode(text * 3, parse_special=True))
    assert num_spelt > num_read

    def used(**options):
        return client.completions.create(max_tokens=1, **GREEDY, **options).usage.prompt_tokens

    assert used(prompt=text * 3) == num_read
    plain = used(prompt="hello", extra_body={"add_special_tokens": False})
    assert used(prompt="hello") - plain == len(tokenizer.encode("a")) - len(
        tokenizer.encode("a", add_special_tokens=False)
    )
    asked = client.chat.completions.create(messages=[{"role": "user", "content": text * 3}], max_tokens=1, **GREEDY)
    empty = client.chat.completions.create(messages=[{"role": "user", "content": "a"}], max_tokens=1, **GREEDY)
    assert asked.usage.prompt_tokens - empty.usage.prompt_tokens > num_read


def test_tokens_of_ones_own_end_an_answer_and_not_too_early(client):
    options = {"prompt": "hello", "max_tokens": 20, **GREEDY}
    extra = {"ignore_eos": True, "return_token_ids": True}
    free = client.completions.create(**options, extra_body=extra).choices[0]
    stop = {"stop_token_ids": [free.token_ids[4]]}
    stopped = client.completions.create(**options, extra_body={**extra, **stop}).choices[0]
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", free.token_ids.index(free.token_ids[4]) + 1)
    late = client.completions.create(**options, extra_body={**extra, **stop, "min_tokens": 10}).choices[0]
    assert len(late.token_ids) >= 10
    with pytest.raises(openai.BadRequestError, match="stop_token_ids: expected token ids below 266"):
        client.completions.create(**options, extra_body={"stop_token_ids": [9999]})
    shown = client.completions.create(**options, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert len(shown.choices[0].text) >= len(free.text)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("chat", {"messages": [{"role": "user", "content": "the cat " * 2000}]}),
        ("chat", {"messages": CHAT, "max_tokens": 5000}),
        ("text", {"prompt": [5] * 2000}),
        ("text", {"prompt": "the cat " * 100_000}),
        ("text", {"prompt": [5] * 10, "max_tokens": 5000}),
    ],
)
def test_too_long_a_context_has_openais_code(client, path, options):
    create = client.chat.completions.create if path == "chat" else client.completions.create
    with pytest.raises(openai.BadRequestError) as raised:
        create(**options, **GREEDY)
    assert (raised.value.code, raised.value.type) == ("context_length_exceeded", "invalid_request_error")


CALLS = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def test_a_chat_in_which_tools_were_called_is_answered(client):
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "a cat", "tool_call_id": "c"},
    ]
    answer = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=3, **GREEDY)
    assert answer.choices[0].finish_reason in {"length", "stop"}


def test_hostile_values_for_templates_are_bad_requests(server):
    with server.http() as http:
        for value in ("[" * 50_000 + "]" * 50_000, '{"a": ' * 900 + "1" + "}" * 900, '{"a": "\\ud800"}'):
            body = f'{{"messages": {json.dumps(CHAT)}, "max_tokens": 1, "chat_template_kwargs": {value}}}'
            response = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert response.status_code in {200, 400}, response.text


def test_a_suffix_that_asks_for_nothing_passes_and_any_other_is_refused(client):
    """Clients send null by default. An answer that ignores a real one would not fit the text behind it."""
    options = {"prompt": "The kettle", "max_tokens": 4, **GREEDY}
    plain = client.completions.create(**options).choices
    for suffix in (None, ""):
        assert client.completions.create(suffix=suffix, **options).choices == plain
        assert client.chat.completions.create(messages=CHAT, max_tokens=2, extra_body={"suffix": suffix}, **GREEDY)
    with pytest.raises(openai.BadRequestError, match=r"suffix: .*doesn't fill in the middle") as raised:
        client.completions.create(suffix=" holds 1.2 litres", **options)
    assert raised.value.param == "suffix"


PARAMETERS = {
    "/v1/completions": (CompletionCreateParamsNonStreaming, {"prompt": "The kettle", "max_tokens": 2}),
    "/v1/chat/completions": (ChatParams, {"messages": CHAT, "max_tokens": 2}),
    "/v1/responses": (ResponseCreateParamsNonStreaming, {"input": "hello", "max_output_tokens": 2}),
}


@pytest.mark.parametrize("path", PARAMETERS)
def test_null_is_accepted_for_whatever_openais_client_may_send(server, path):
    """Some clients send all fields that OpenAI's types have, most of them null."""
    kind, body = PARAMETERS[path]
    nulls = dict.fromkeys(kind.__annotations__)
    assert {"stream", "metadata" if path == "/v1/responses" else "seed"} <= set(nulls)
    with server.http() as http:
        response = http.post(path, json={**nulls, **body, "model": MODEL})
    assert response.status_code == 200, response.text
