"""The terminal chat: what it sends, what it shows of each turn, and how it ends; in this process and with a server."""

import re
import signal

import pytest
from server.server_harness import Gate, running_server, tiny_loaded

from kvblocks.cli import app as cli
from kvblocks.cli.chat import ChatTurn, EngineAnswerer, ServerAnswerer, chat, describe_engine, describe_server
from kvblocks.cli.client import ServerClient, UnreachableError
from kvblocks.engine import Engine, LoadedModel, ModelError
from kvblocks.server.errors import ApiError

SYSTEM = "the cat is in the hat. " * 8
LINES = ["hello", "and the hen?", "why?"]
OPTIONS = {"max_tokens": 9, "temperature": 0.0, "seed": None}
NOTE = re.compile(
    r"first token after \d+\.\d\d s, \d+\.\d tokens/s, (\d+) of (\d+) prompt tokens from the cache \(\d+%\)"
)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return tiny_loaded(tiny_folder)


@pytest.fixture
def answerer(model, request):
    """Answers from an engine, or from a server: the same, since both are deterministic."""
    if request.param == "engine":
        yield EngineAnswerer(Engine(model, num_blocks=64, deterministic=True), **OPTIONS)
        return
    with running_server(model, cache={"deterministic": True}) as server, ServerClient(server.url) as client:
        yield ServerAnswerer(client, **OPTIONS)
        server.wait_until_idle()


both = pytest.mark.parametrize("answerer", ["engine", "server"], indirect=True)


@both
def test_each_turn_is_answered_and_shows_what_it_cost(model, answerer):
    written, notes = [], []
    turns = chat(answerer, LINES, written.append, system=SYSTEM, note=notes.append)
    assert len(turns) == len(notes) == 3
    reference = Engine(model, num_blocks=64, deterministic=True)
    messages = [{"role": "system", "content": SYSTEM}]
    for line, turn, note in zip(LINES, turns, notes, strict=True):
        messages.append({"role": "user", "content": line})
        prompt = model.tokenizer.apply_chat_template(messages)
        (expected,) = reference.generate([prompt], max_tokens=9)
        assert turn.text == expected.text
        assert (turn.num_prompt_tokens, turn.num_tokens) == (len(prompt), len(expected.token_ids))
        assert turn.num_cached_tokens == expected.num_cached_tokens
        assert 0 < turn.ttft_s <= turn.seconds
        shown = NOTE.fullmatch(note)
        assert shown is not None, note
        assert shown.groups() == (str(turn.num_cached_tokens), str(turn.num_prompt_tokens))
        messages.append({"role": "assistant", "content": turn.text})
    assert "".join(written) == "".join(f"{turn.text}\n" for turn in turns)
    assert turns[0].num_cached_tokens == 0
    assert turns[1].num_cached_tokens >= turns[0].num_prompt_tokens // 16 * 16
    assert turns[2].num_cached_tokens >= turns[1].num_prompt_tokens // 16 * 16


@both
def test_an_empty_line_ends_it(answerer):
    assert len(chat(answerer, ["hello", "  ", "never"], lambda _: None)) == 1
    assert chat(answerer, [], lambda _: None) == []


@both
def test_a_turn_that_fails_is_forgotten_and_the_chat_goes_on(answerer):
    written = []
    turns = chat(answerer, ["hello", "x" * 2000, "hello again"], written.append)
    assert len(turns) == 2
    assert "[no answer: " in "".join(written)
    assert "the model's context" in "".join(written)
    assert turns[1].num_prompt_tokens < 200


@both
@pytest.mark.usefixtures("hears_ctrl_c")
def test_an_interrupt_ends_the_answer_and_the_chat_goes_on_with_what_there_is_of_it(model, answerer):
    written, notes, pressed = [], [], []

    def write(text):
        written.append(text)
        if text.strip() and not pressed:
            pressed.append(text)
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C

    turns = chat(answerer, ["hello", "and the hen?"], write, note=notes.append)
    assert notes[0] == "the answer was ended"
    assert len(turns) == 1
    partial = "".join(written).partition("\n")[0]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": partial}]
    messages.append({"role": "user", "content": "and the hen?"})
    assert turns[0].num_prompt_tokens == len(model.tokenizer.apply_chat_template(messages))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("hears_ctrl_c")
def test_an_interrupt_does_not_break_off_a_step(model):
    """It would leave the manager half changed, and every later answer would fail."""
    engine = Engine(model, num_blocks=64)
    run, interrupted = engine.runner.run, []

    def run_interrupted(chunks):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # by somebody without patience
        interrupted.append(chunks)
        return run(chunks)

    engine.runner.run = run_interrupted
    notes = []
    assert chat(EngineAnswerer(engine, **OPTIONS), ["hello"], lambda _: None, note=notes.append) == []
    assert notes == ["the answer was ended"]
    assert len(interrupted) == 1
    engine.manager.check()
    assert engine.manager.num_free_blocks == 64
    engine.runner.run = run
    assert len(chat(EngineAnswerer(engine, **OPTIONS), ["hello"], lambda _: None)) == 1


def test_one_token_has_no_speed():
    assert "1 token," in str(ChatTurn("a", 10, 5, 1, 0.5, 0.5))
    assert "50%" in str(ChatTurn("a", 10, 5, 1, 0.5, 0.5))
    assert "10.0 tokens/s" in str(ChatTurn("a", 10, 5, 11, 0.5, 1.5))


def test_a_model_without_a_chat_template_cannot_chat(model):
    bare = LoadedModel(model.config, model.weights)
    with pytest.raises(ModelError, match="chat template"):
        EngineAnswerer(Engine(bare, num_blocks=8), **OPTIONS)


def test_salts_keep_chats_apart(model):
    with running_server(model) as server, ServerClient(server.url) as client:
        one, other = (ServerAnswerer(client, **OPTIONS, salt=salt) for salt in ("a", "b"))
        turns = [chat(answerer, ["hello"], lambda _: None, system=SYSTEM)[0] for answerer in (one, other, one)]
    assert [turn.num_cached_tokens > 100 for turn in turns] == [False, False, True]


def test_the_client_tells_errors_of_all_kinds(model):
    with running_server(model) as server, ServerClient(f"{server.url}/v1/") as client:
        assert client.ask("GET", "/v1/models")["object"] == "list"
        with pytest.raises(ApiError, match="a path of this server"):
            client.ask("GET", "/nonsense")
        with pytest.raises(ApiError, match="expected a JSON object"):
            client.ask("GET", "/metrics")
        with pytest.raises(ApiError, match="messages: expected"):
            list(client.stream("/v1/chat/completions", {}))
    with pytest.raises(UnreachableError, match="expected a kvblocks server"):
        list(client_of_nobody().stream("/v1/completions", {}))


def client_of_nobody():
    return ServerClient("http://127.0.0.1:1")


def test_an_error_in_a_stream_is_raised(model):
    with running_server(model, request_timeout_s=1.0) as server, ServerClient(server.url) as client:
        gate = Gate(server.engine)
        body = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        stream = client.stream("/v1/completions", body)
        assert next(stream)["choices"]
        gate.shut()
        with pytest.raises(ApiError, match=r"within 1 s"):
            list(stream)
        gate.open()


CACHE = "64 blocks of 16 tokens, {:.1f} MiB"
HOW_TO_END = "Ctrl-C ends an answer. An empty line or Ctrl-D ends the chat."


def test_a_chat_begins_with_where_answers_come_from_the_cache_and_how_to_end(model):
    engine = Engine(model, num_blocks=64, enable_prefix_caching=False)
    size = CACHE.format(64 * engine.plan.block_bytes / 2**20)
    assert describe_engine(engine) == (
        f"In this process: cpu, float32, attention by TorchAttention. KV cache: {size}; prefix caching off."
        f"\n{HOW_TO_END}"
    )
    with running_server(model, cache={"num_blocks": 64}, api_key="a", admin_key="b") as server:
        name = f"Server {server.url}: tiny."
        with ServerClient(server.url, "b") as operator:
            assert describe_server(operator) == f"{name} KV cache: {size}; prefix caching on.\n{HOW_TO_END}"
        with ServerClient(server.url, "a") as client:
            assert describe_server(client) == f"{name} The server doesn't say how large its KV cache is.\n{HOW_TO_END}"
        with ServerClient(server.url) as stranger, pytest.raises(ApiError, match="Authorization"):
            describe_server(stranger)


def test_the_caches_options_are_for_a_chat_in_this_process(capsys):
    for option in (["--num-blocks", "9"], ["--no-prefix-caching"], ["--eviction", "lru"], ["--remember-next-token"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(["chat", "--url", "http://127.0.0.1:1", *option])
        assert raised.value.code == 2
        assert "without --url only: a server has its own cache" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "hello", "--max-tokens", "1"], ["chat"]])
def test_the_caches_options_reach_the_engine(command, model, tiny_folder, monkeypatch, capsys):
    made = []

    class Watched(Engine):
        def __init__(self, loaded, **options):
            made.append(options)
            super().__init__(loaded, **options)

    monkeypatch.setattr("kvblocks.engine.engine.Engine", Watched)
    monkeypatch.setattr("builtins.input", lambda *_: "")
    with pytest.raises(SystemExit) as raised:
        cli.main(
            [*command, "--model", str(tiny_folder), "--num-blocks", "50", "--no-prefix-caching", "--eviction", "slru"]
        )
    assert not raised.value.code
    expected = {"num_blocks": 50, "enable_prefix_caching": False, "eviction": "slru", "remember_next_token": False}
    assert made == [expected]
    with pytest.raises(SystemExit) as raised:
        cli.main([*command, "--model", str(tiny_folder), "--remember-next-token"])
    assert not raised.value.code
    assert made[1:] == [
        expected | {"num_blocks": None, "enable_prefix_caching": True, "eviction": None, "remember_next_token": True}
    ]
    if command == ["chat"]:
        assert capsys.readouterr().out.startswith("In this process: cpu, float32,")
