"""A chat in the terminal that shows the cost of each turn: time to first token, speed, and cached tokens.

The chat doesn't know where its answers come from: a server, or an engine in this process.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from kvblocks.arguments import counted
from kvblocks.cli.client import ServerClient
from kvblocks.cli.terminal import HOW_TO_END, deferred_interrupts
from kvblocks.engine.errors import ModelError
from kvblocks.errors import KVBlocksError

if TYPE_CHECKING:
    from kvblocks.engine.completion import Completion
    from kvblocks.engine.engine import Engine  # needs torch, which a chat with a server doesn't need

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One answer and its cost. ttft_s: seconds to the first piece of text. seconds: those to the end."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    ttft_s: float
    seconds: float

    @classmethod
    def of(cls, completions: "list[Completion]", seconds: float) -> "ChatTurn":
        """The cost of all samples of one prompt together; the first of them counts what the prompt cost."""
        first = completions[0]
        return cls(
            first.text,
            first.num_prompt_tokens,
            first.num_cached_tokens,
            sum([len(completion.token_ids) for completion in completions]),
            first.ttft_s,
            seconds,
        )

    def __str__(self) -> str:
        rest = self.seconds - self.ttft_s
        speed = f"{(self.num_tokens - 1) / rest:.1f} tokens/s" if self.num_tokens > 1 and rest > 0 else "1 token"
        share = self.num_cached_tokens / max(1, self.num_prompt_tokens)
        cached = f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens from the cache ({share:.0%})"
        return f"first token after {self.ttft_s:.2f} s, {speed}, {cached}"


class Answerer(Protocol):
    """A source of answers."""

    def answer(self, messages: list[Message]) -> Generator[str | ChatTurn]:
        """Yield the pieces of an answer as they come, and its cost last. Raises KVBlocksError, or KeyboardInterrupt.

        Closing the iterator ends the answer, so that nothing more is computed.
        """


class EngineAnswerer:
    """Answers with an engine in this process. Raises ModelError for a model without a chat template."""

    def __init__(self, engine: "Engine", *, max_tokens: int, temperature: float, seed: int | None) -> None:
        tokenizer = engine.model.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ModelError("expected a model with a chat template, got one without")
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_tokens, self._temperature, self._seed = max_tokens, temperature, seed

    def answer(self, messages: list[Message]) -> Generator[str | ChatTurn]:
        """As `Answerer`. An interrupt waits for the step in progress, since it would leave the cache half changed."""
        start_s, first_s = time.perf_counter(), None
        prompt = self._tokenizer.apply_chat_template(list(messages))
        engine = self._engine
        with deferred_interrupts() as check_interrupt:
            (generation,) = engine.submit(
                prompt, max_tokens=self._max_tokens, temperature=self._temperature, seed=self._seed
            )
            try:
                while generation.finish_reason is None:
                    check_interrupt()
                    engine.step()
                    while generation.pieces:
                        first_s = first_s or time.perf_counter()
                        yield generation.pieces.popleft().text
            finally:
                engine.cancel(generation)
        if generation.error is not None:
            raise generation.error
        completion = generation.completion
        assert completion is not None and first_s is not None, "the last piece has the completion"
        end_s = time.perf_counter()
        yield replace(ChatTurn.of([completion], end_s - start_s), ttft_s=first_s - start_s)


class ServerAnswerer:
    """Answers with a server's model. salt: this chat shares no prefixes with other salts."""

    def __init__(
        self, client: ServerClient, *, max_tokens: int, temperature: float, seed: int | None, salt: str | None = None
    ) -> None:
        self._client = client
        options = {"max_completion_tokens": max_tokens, "temperature": temperature, "seed": seed, "cache_salt": salt}
        self._options = {name: value for name, value in options.items() if value is not None}

    def answer(self, messages: list[Message]) -> Generator[str | ChatTurn]:
        """As `Answerer`."""
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **self._options}
        start_s, first_s = time.perf_counter(), None
        texts: list[str] = []
        usage: dict[str, Any] = {}
        with closing(self._client.stream("/v1/chat/completions", body)) as events:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    if text or choice["finish_reason"]:
                        first_s = first_s or time.perf_counter()
                    texts.append(text)
                    yield text
        end_s = time.perf_counter()
        yield ChatTurn(
            "".join(texts),
            usage.get("prompt_tokens", 0),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            usage.get("completion_tokens", 0),
            (first_s or end_s) - start_s,
            end_s - start_s,
        )


def chat(
    answerer: Answerer,
    lines: Iterable[str],
    write: Callable[[str], None],
    *,
    system: str | None = None,
    note: Callable[[str], None] | None = None,
    while_answering: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[ChatTurn]:
    """Chat until a line is empty or there are no more, and return the turns.

    lines: what the user says, one per turn. write: gets the text of answers as it comes. note: gets a line about each
    turn; default: `write`. while_answering: a context manager that is entered while an answer and its note are written.
    If a turn fails, that is reported, the turn is forgotten, and the chat goes on. Ctrl-C ends an answer; the chat goes
    on with what there is of it.
    """
    remark = note or (lambda text: write(f"[{text}]\n"))
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    turns = []
    for line in lines:
        question = line.strip()
        if not question:
            break
        asked = [*messages, {"role": "user", "content": question}]
        told: list[str] = []
        with while_answering():
            try:
                turn = _show(answerer.answer(asked), write, told)
            except KVBlocksError as error:
                write("\n")
                remark(f"no answer: {error}")
                continue
            except KeyboardInterrupt:
                write("\n")
                remark("the answer was ended")
                if not any(told):
                    continue
            else:
                write("\n")
                remark(str(turn))
                turns.append(turn)
        messages = [*asked, {"role": "assistant", "content": "".join(told)}]
    return turns


def _show(pieces: Generator[str | ChatTurn], write: Callable[[str], None], told: list[str]) -> ChatTurn:
    """Write an answer's pieces, add them to `told`, and return the answer's cost."""
    with closing(pieces):
        for piece in pieces:
            if isinstance(piece, ChatTurn):
                return piece
            told.append(piece)
            write(piece)
    raise AssertionError("the last piece says what the turn cost")


def describe_engine(engine: "Engine") -> str:
    """Return the first lines of a chat with an engine in this process: the engine, its cache, how to end the chat."""
    model, plan = engine.model, engine.plan
    caching = "on" if engine.manager.enable_caching else "off"
    tokens = " and ".join(sorted({str(group.block_size) for group in plan.groups}))
    size = (
        f"{counted(plan.num_blocks, 'block')} of {tokens} tokens, {plan.num_blocks * plan.block_bytes / 2**20:.1f} MiB"
    )
    return (
        f"In this process: {model.device}, {str(model.dtype).removeprefix('torch.')}, attention by"
        f" {type(engine.runner.model.attention).__name__}. KV cache: {size}; prefix caching {caching}.\n{HOW_TO_END}"
    )


def describe_server(client: ServerClient) -> str:
    """Return the first lines of a chat with a server. Raises KVBlocksError if there is none, or the key is wrong.

    The cache isn't described if the server isn't kvblocks or shows its cache only to the operator.
    """
    models = client.ask("GET", "/v1/models")
    names = ", ".join(str(entry.get("id")) for entry in models.get("data", []))
    try:
        stats = client.ask("GET", "/v1/cache/stats")
        size = f"{counted(stats['num_blocks'], 'block')} of {stats['block_size']} tokens,"
        size += f" {stats['memory']['pool_bytes'] / 2**20:.1f} MiB"
        cache = f"KV cache: {size}; prefix caching {'on' if stats['prefix_caching'] else 'off'}."
    except (KVBlocksError, KeyError, TypeError):
        cache = "The server doesn't say how large its KV cache is."
    return f"Server {client.url}: {names}. {cache}\n{HOW_TO_END}"
