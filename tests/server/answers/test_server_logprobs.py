"""Log probabilities and echoes over loopback, by the real `openai` client, against the engine and plain arithmetic."""

import json
import math
import threading

import openai
import pytest
from server.server_harness import MODEL, running_server, tiny_loaded

from kvblocks.engine import Engine
from kvblocks.engine.sampling.drawn import TokenLogprobs
from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.server.answer import Answer
from kvblocks.server.answers.logprobs import ChoiceWriter, Echo
from kvblocks.server.body import sampling
from kvblocks.server.body.sampling import MAX_LOGPROBS

CHAT = [{"role": "user", "content": "the cat is in the hat. " * 4}]
GREEDY = {"model": MODEL, "temperature": 0}
TEXT = "the hen in the den: héllo 😀 12 the end"


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


@pytest.fixture(scope="module")
def engine(model):
    """What the server's answers must be equal to, to the last bit."""
    return Engine(model, num_blocks=64, deterministic=True)


@pytest.fixture(scope="module")
def tokenizer(model):
    return model.tokenizer


def test_a_chats_entries_are_what_the_engine_says(client, engine, tokenizer):
    prompt = tokenizer.apply_chat_template(CHAT)
    (expected,) = engine.generate([prompt], max_tokens=9, logprobs=4, temperature=1, seed=5)
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=9, temperature=1, seed=5, logprobs=True, top_logprobs=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.refusal is None
    assert len(logprobs.content) == len(expected.token_ids)
    for entry, token, one in zip(logprobs.content, expected.token_ids, expected.logprobs, strict=True):
        assert entry.logprob == one.logprob < 0
        assert bytes(entry.bytes) == tokenizer.token_bytes(token)
        assert [top.logprob for top in entry.top_logprobs] == [logprob for _, logprob in one.top]
        assert [bytes(top.bytes) for top in entry.top_logprobs] == [tokenizer.token_bytes(top) for top, _ in one.top]
    shown = b"".join(bytes(entry.bytes) for entry in logprobs.content)
    special = b"".join(
        tokenizer.token_bytes(index) for index in expected.token_ids[-1:] if index in tokenizer.special_token_ids
    )
    assert shown.removesuffix(special).decode(errors="replace") == answer.choices[0].message.content


def test_without_top_logprobs_a_chat_names_the_token_alone_and_without_logprobs_nothing(client):
    options = {"messages": CHAT, "max_tokens": 3, **GREEDY}
    (only, *_) = client.chat.completions.create(logprobs=True, **options).choices[0].logprobs.content
    assert only.top_logprobs == []
    assert client.chat.completions.create(logprobs=False, **options).choices[0].logprobs is None


def test_a_streamed_chat_has_the_same_entries_one_by_one(client):
    options = {
        "messages": CHAT,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "seed": 1,
        "model": MODEL,
    }
    whole = client.chat.completions.create(**options)
    entries = {0: [], 1: []}
    for chunk in client.chat.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        if choice.delta.role == "assistant":
            assert choice.logprobs is None
        else:
            assert len(choice.logprobs.content) == 1
            entries[choice.index] += choice.logprobs.content
    assert [entries[0], entries[1]] == [choice.logprobs.content for choice in whole.choices]


def test_a_completions_lists_have_the_token_and_the_most_likely_ones(client, engine, tokenizer):
    options = {"max_tokens": 10, "temperature": 1.5, "seed": 2}
    (expected,) = engine.generate(["hello"], logprobs=2, **options)
    logprobs = client.completions.create(model=MODEL, prompt="hello", logprobs=2, **options).choices[0].logprobs
    assert logprobs.token_logprobs == [one.logprob for one in expected.logprobs]
    for name, own, top, one in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, expected.logprobs, strict=True
    ):
        assert top[name] == own
        assert sorted(top.values()) == sorted({own, *(logprob for _, logprob in one.top)})
    zero = client.completions.create(model=MODEL, prompt="hello", logprobs=0, **options).choices[0].logprobs
    assert zero.top_logprobs == [{name: own} for name, own in zip(zero.tokens, zero.token_logprobs, strict=True)]
    assert zero.token_logprobs == logprobs.token_logprobs


@pytest.mark.parametrize("prompt", [TEXT, [260, 1, 5, 261, 72, 2, 80]], ids=["text", "tokens"])
def test_an_echo_has_its_prompts_log_probabilities_and_offsets_into_the_text(client, engine, tokenizer, prompt):
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    (expected,) = engine.generate([tokens], max_tokens=4, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    for _ in range(2):  # the second time all of it is cached
        answer = client.completions.create(
            prompt=prompt, max_tokens=4, logprobs=3, echo=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        (choice,) = answer.choices
        logprobs = choice.logprobs
        text = prompt if isinstance(prompt, str) else tokenizer.decode(tokens, skip_special_tokens=False)
        assert choice.text == text + expected.text
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        scores = [*expected.prompt_logprobs[1:], *expected.logprobs]
        assert logprobs.token_logprobs[1:] == [one.logprob for one in scores]
        assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == [one.top[0][1] for one in scores]
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert logprobs.text_offset == sorted(logprobs.text_offset)
        for name, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[: len(tokens)]:
            assert name.startswith("bytes:") or choice.text[offset : offset + len(name)] == name
        assert logprobs.text_offset[len(tokens)] == len(text)


def test_an_echo_alone_generates_nothing(client, server, engine):
    (expected,) = engine.generate([TEXT], max_tokens=0, prompt_logprobs=1)
    options = {"prompt": [TEXT, "the"], "max_tokens": 0, "logprobs": 1, "echo": True, **GREEDY}
    answer = client.completions.create(**options)
    assert [choice.text for choice in answer.choices] == [TEXT, "the"]
    first = answer.choices[0]
    assert first.finish_reason == "length"
    assert first.logprobs.token_logprobs[1:] == [one.logprob for one in expected.prompt_logprobs[1:]]
    assert answer.usage.completion_tokens == 0
    chunks = list(client.completions.create(stream=True, **options))
    streamed = {chunk.choices[0].index: chunk.choices[0] for chunk in chunks}
    assert len(chunks) == 2
    assert [streamed[index].logprobs for index in range(2)] == [choice.logprobs for choice in answer.choices]
    assert [streamed[index].text for index in range(2)] == [TEXT, "the"]
    server.wait_until_idle()


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_streamed_echo_is_the_same_in_pieces(client, logprobs):
    options = {
        "prompt": [TEXT, "in the"],
        "max_tokens": 6,
        "echo": True,
        "logprobs": logprobs,
        "n": 2,
        "seed": 4,
        "model": MODEL,
    }
    whole = client.completions.create(**options)
    texts, lists = [""] * 4, [{} for _ in range(4)]
    for chunk in client.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            for name, values in choice.logprobs.model_dump().items():
                lists[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith(TEXT)
    assert lists == [choice.logprobs.model_dump() if logprobs else {} for choice in whole.choices]


def test_an_echo_without_log_probabilities_takes_its_prompt_from_the_cache(client):
    options = {"prompt": "the hen is in the den, and the cat " * 3, "max_tokens": 2, "echo": True, **GREEDY}
    client.completions.create(**options)
    answer = client.completions.create(**options)
    assert answer.usage.prompt_tokens_details.cached_tokens > 32
    assert answer.choices[0].logprobs is None


TOO_LARGE = {
    "prompts": ("echo", {"prompt": [[5] * 1000] * 13, "max_tokens": 0, "logprobs": 20, "echo": True}),
    "prompts and answers": ("echo", {"prompt": [[5] * 1000] * 12, "max_tokens": 41, "logprobs": 20, "echo": True}),
    "answers": ("logprobs", {"prompt": "hello", "n": 128, "max_tokens": 98, "logprobs": 20}),
    "echoes": ("echo", {"prompt": [5] * 2049, "n": 128, "max_tokens": 1, "echo": True}),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_an_answer_larger_than_one_may_be_is_refused_by_name_and_nothing_is_left(client, server, name):
    param, asked = TOO_LARGE[name]
    extra = {key: asked[key] for key in ("prompt", "n", "max_tokens", "logprobs", "echo") if key in asked}
    with pytest.raises(
        openai.BadRequestError, match=f"{param}: expected at most {MAX_LOGPROBS} .*, got up to"
    ) as raised:
        client.completions.create(**extra, **GREEDY)
    assert raised.value.param == param
    chat = {"messages": CHAT, "n": 128, "max_tokens": 98, "logprobs": True, "top_logprobs": 20}
    with pytest.raises(openai.BadRequestError, match="logprobs: expected at most"):
        client.chat.completions.create(**chat, **GREEDY)
    server.wait_until_idle()


def test_a_chat_without_max_tokens_ends_with_the_log_probabilities_that_an_answer_may_have(client, monkeypatch):
    asked = {"messages": CHAT, "logprobs": True, "top_logprobs": 3, "n": 2, "extra_body": {"ignore_eos": True}}
    monkeypatch.setattr(sampling, "MAX_LOGPROBS", 2 * 4 * 7)
    for choice in client.chat.completions.create(**asked, **GREEDY).choices:
        assert (choice.finish_reason, len(choice.logprobs.content)) == ("length", 7)
    monkeypatch.setattr(sampling, "MAX_LOGPROBS", 2**30)  # what the context has room for is less
    asked["messages"] = [{"role": "user", "content": "hello " * 190}]
    answer = client.chat.completions.create(**asked, **GREEDY)
    num_prompt_tokens = answer.usage.prompt_tokens
    assert num_prompt_tokens > 960
    assert [len(choice.logprobs.content) for choice in answer.choices] == [1024 - num_prompt_tokens] * 2


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"echo": True}, {"echo": True, "logprobs": 1}])
def test_answers_that_may_be_megabytes_are_written_beside_the_event_loop(client, monkeypatch, asked):
    writers = []

    def body(answer, make=Answer.body):
        writers.append(threading.current_thread().name)
        return make(answer)

    monkeypatch.setattr(Answer, "body", body)
    client.completions.create(prompt=TEXT, max_tokens=2, n=2, **GREEDY, extra_body=asked)
    client.completions.create(prompt=TEXT, max_tokens=2, **GREEDY)
    assert [name == "uvicorn" for name in writers] == [False, True]


def test_penalties_and_min_p_change_what_is_drawn(client, engine):
    def ask(**options):
        extra = {name: options.pop(name) for name in ("min_p", "repetition_penalty") if name in options}
        own = {"max_tokens": 24, "temperature": 1.2, "seed": 3}
        (expected,) = engine.generate(["hello"], ignore_eos=True, **own, **options, **extra)
        answer = client.completions.create(
            model=MODEL, prompt="hello", extra_body={"ignore_eos": True, **extra}, **own, **options
        )
        assert answer.choices[0].text == expected.text
        return expected.text

    asked = [{}, {"min_p": 0.9}, {"presence_penalty": 2.0}, {"frequency_penalty": -2.0}, {"repetition_penalty": 3.0}]
    assert len({ask(**options) for options in asked}) == len(asked)


def test_bodies_are_json_as_openais(server):
    """The names of the lists, and nothing beside them: what clients that read the JSON itself find."""
    body = {**GREEDY, "prompt": "hello", "max_tokens": 2, "logprobs": 1}
    with server.http() as http:
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
        assert set(choice["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        chat = {**GREEDY, "messages": CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
        (choice,) = http.post("/v1/chat/completions", json=chat).json()["choices"]
        assert set(choice["logprobs"]) == {"content", "refusal"}
        assert set(choice["logprobs"]["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
        assert set(choice["logprobs"]["content"][0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


def test_tokens_that_are_no_whole_characters_are_shown_by_their_bytes(tokenizer):
    tokens = tokenizer.encode("😀")
    assert len(tokens) > 1
    scores = [TokenLogprobs(-1.0, ((tokens[0], -0.5),))] * len(tokens)
    text, shown = ChoiceWriter("completion", tokenizer, has_logprobs=True).write("😀", tokens, scores, None)
    assert text == "😀"
    assert shown["tokens"][0] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(tokens[0]))
    assert shown["text_offset"] == [0] * len(tokens)
    _, shown = ChoiceWriter("chat", tokenizer, has_logprobs=True).write("😀", tokens, scores, None)
    assert b"".join(bytes(entry["bytes"]) for entry in shown["content"]).decode() == "😀"
    assert not shown["content"][0]["token"].startswith("bytes:")


def test_what_json_has_no_number_for_is_shown_as_minus_9999_and_no_tokenizer_by_ids():
    scores = [TokenLogprobs(-3.4e38, ((4, -0.1), (5, -3.4e38)))]
    _, shown = ChoiceWriter("completion", None, has_logprobs=True).write("", [3], scores, None)
    assert shown["tokens"] == ["token_id:3"]
    assert shown["token_logprobs"] == [-9999.0]
    assert shown["top_logprobs"] == [{"token_id:3": -9999.0, "token_id:4": -0.1, "token_id:5": -9999.0}]
    assert all(math.isfinite(value) for value in json.loads(json.dumps(shown["token_logprobs"])))
    writer = ChoiceWriter("completion", None, has_logprobs=True, echo=Echo.of([1, 2], [1, 2], None))
    text, shown = writer.write("", [3], scores, [None, scores[0]])
    assert (text, shown["tokens"], shown["text_offset"]) == ("", ["token_id:1", "token_id:2", "token_id:3"], [0, 0, 0])


@pytest.mark.model
def test_a_bos_that_the_tokenizer_adds_has_no_place_in_the_text(smollm2_folder):
    tokenizer = Tokenizer.from_folder(smollm2_folder)
    tokens = [1, *tokenizer.encode("The cat sat")]
    scores = [None, *[TokenLogprobs(-1.0)] * (len(tokens) - 1)]
    writer = ChoiceWriter("completion", tokenizer, has_logprobs=True, echo=Echo.of("The cat sat", tokens, tokenizer))
    _, shown = writer.write("", [], [], scores)
    assert shown["tokens"] == ["<|im_start|>", "The", " cat", " sat"]
    assert shown["text_offset"] == [0, 0, 3, 7]
