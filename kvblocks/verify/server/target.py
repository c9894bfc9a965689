"""A server with OpenAI's API, and what it answers."""

import json
import math
import time
from dataclasses import dataclass, replace
from typing import Any, Self

import httpx2

from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.verify.server.exchange import MAX_ANSWER_BYTES, Exchange, TooLargeError
from kvblocks.verify.server.prompts import Words, picture

NUM_LOGPROBS = 5
Json = dict[str, Any]

_MOST_TOKENS = 1 << 53
_MOST_SHOWN = 300
_MOST_NAMES = 20


class TargetError(KVBlocksError):
    """The server can't be used: it can't be reached, refuses the requests, or answers in another form."""


class AnswerError(TargetError):
    """The server has answered, but not in OpenAI's form, or with more than is read."""


class TimeUpError(KVBlocksError):
    """The time for asking is over."""


@dataclass(frozen=True)
class Reply:
    """One greedy answer.

    tokens: the texts of its tokens, empty if the server gives no log probabilities. logprobs: those of these tokens.
    runners_up: the log probability of the second most likely token at each place, or None. num_cached_tokens: None if
    the server doesn't say. seconds: how long the answer took.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    runners_up: tuple[float | None, ...]
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    seconds: float

    def behind(self, num_tokens: int) -> Self:
        """Return the rest of the answer after its first `num_tokens` tokens."""
        return replace(
            self,
            text="".join(self.tokens[num_tokens:]),
            tokens=self.tokens[num_tokens:],
            logprobs=self.logprobs[num_tokens:],
            runners_up=self.runners_up[num_tokens:],
        )


class Target:
    """The server at `url` with one of its models; None: the first one that it lists. Thread-safe.

    Whatever the server does, an answer is complete after `timeout_s` seconds, or TargetError is raised; it has at most
    16 MiB, or AnswerError is; and after the time `end_s` of time.monotonic() every call that asks raises TimeUpError.

    reset_path: the path that `reset` posts to. adapters: the LoRA adapters that the server lists as children of the
    model. Other models are never used, since some servers would load them. Raises InvalidArgumentError for a wrong URL.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        end_s: float = math.inf,
        reset_path: str | None = None,
    ) -> None:
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise InvalidArgumentError(f"url: expected http://HOST:PORT, got {url!r}: {error}") from error
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise InvalidArgumentError(f"url: expected http://HOST:PORT, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.end_s = end_s
        self._timeout_s = timeout_s
        self._reset_path = reset_path
        self.num_requests = 0
        self._http = Exchange(self.url, {} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        try:
            listed = self._list_models()
        except BaseException:
            self.close()
            raise
        names = [entry["id"] for entry in listed]
        self.model = names[0] if model is None else model
        if self.model not in names:
            self.close()
            raise InvalidArgumentError(f"model: expected one of {_shown(names[:_MOST_NAMES])}, got {self.model!r}")
        self.adapters = [entry["id"] for entry in listed if entry.get("parent") == self.model]
        self.has_completions = True
        self.has_logprobs = True

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def can_reset(self) -> bool:
        """Whether the operator named a path that resets the prefix cache."""
        return self._reset_path is not None

    def reset(self) -> None:
        """Reset the server's prefix cache. Raises TargetError."""
        assert self._reset_path is not None
        self._post(self._reset_path, {})

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a path on the server, as vLLM and SGLang allow at runtime. Raises TargetError."""
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        """Unload it. Raises TargetError."""
        self._post("/v1/unload_lora_adapter", {"lora_name": name})

    def ask(
        self,
        prompt: str,
        max_tokens: int = 8,
        *,
        salt: str | None = None,
        model: str | None = None,
        image: str | None = None,
    ) -> Reply:
        """Return the greedy continuation of a prompt. image: the URL of an image to show before it. Raises TargetError.

        Uses /v1/completions, but /v1/chat/completions with an image or if the server has nothing else.
        """
        path, body = self._request(prompt, max_tokens, salt, model, image)
        start_s = time.perf_counter()
        answer = self._post(path, body)
        return _read(answer, time.perf_counter() - start_s)

    def knows_salts(self) -> bool:
        """Whether the server knows the field `cache_salt`, which shows when it refuses a number there."""
        path, body = self._request("one two three", 1, 7, None)
        try:
            self._post(path, body)
        except TargetError:
            return True
        return False

    def takes_images(self) -> bool:
        """Whether the server answers a chat with an image."""
        try:
            self.ask("one two three", 1, image=picture(Words("image")))
        except TargetError:
            return False
        return True

    def begin_and_leave(self, prompt: str, after_s: float, *, salt: str | None = None) -> None:
        """Request a streamed answer, and close the connection when it begins, or after `after_s`.

        Raises TimeUpError.
        """
        path, body = self._request(prompt, 8, salt, None)
        body["stream"] = True
        self.num_requests += 1
        self._http.begin(path, body, min(after_s, self._left_s()))

    def find_out(self) -> None:
        """Find out which endpoint there is, and whether it gives log probabilities. Raises TargetError."""
        problems = []
        for self.has_completions, self.has_logprobs in ((True, True), (False, True), (True, False), (False, False)):
            try:
                reply = self.ask("one two three one two", 2)
            except TargetError as error:
                problems.append(str(error))
                continue
            if reply.tokens or not self.has_logprobs:
                return
        raise TargetError(f"{self.url}: expected completions or chat completions, got {problems[0]}")

    def _request(
        self, prompt: str, max_tokens: int, salt: object, model: str | None, image: str | None = None
    ) -> tuple[str, Json]:
        """A path, and what to post there."""
        body: Json = {"model": model or self.model, "max_tokens": max_tokens, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        if self.has_completions and image is None:
            logprobs: Json = {"logprobs": NUM_LOGPROBS}
            path, body["prompt"] = "/v1/completions", prompt
        else:
            logprobs = {"logprobs": True, "top_logprobs": NUM_LOGPROBS}
            shown = {"type": "image_url", "image_url": {"url": image}}
            content = prompt if image is None else [shown, {"type": "text", "text": prompt}]
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": content}]
        return path, body | (logprobs if self.has_logprobs else {})

    def _list_models(self) -> list[Json]:
        data = self._send("GET", "/v1/models", None).get("data")
        entries = data if isinstance(data, list) else []
        listed = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        if not listed:
            raise AnswerError(f"{self.url}/v1/models: expected a list of models, got {_shown(data)}")
        return listed

    def _left_s(self) -> float:
        left = self.end_s - time.monotonic()
        if left <= 0:
            raise TimeUpError(f"{self.url}: expected an answer in the time given, which is over")
        return left

    def _post(self, path: str, body: Json) -> Json:
        return self._send("POST", path, body)

    def _send(self, method: str, path: str, body: Json | None) -> Json:
        left_s = self._left_s()
        self.num_requests += 1
        where, expected = f"{self.url}{path}", "expected an answer"
        try:
            status, kind, content = self._http.ask(method, path, body, min(self._timeout_s, left_s))
        except TimeoutError as error:
            self._left_s()
            raise TargetError(f"{where}: {expected} within {self._timeout_s:g} s, got none that is complete") from error
        except TooLargeError as error:
            raise AnswerError(
                f"{where}: {expected} of at most {MAX_ANSWER_BYTES >> 20} MiB, got a larger one"
            ) from error
        except httpx2.HTTPError as error:
            told = printable(f"{type(error).__name__}: {error}"[:_MOST_SHOWN])
            raise TargetError(f"{where}: {expected}, got {told}") from error
        text = content.decode(errors="replace")
        if status >= 400:
            said = printable(" ".join(text[:_MOST_SHOWN].split()))  # some servers answer with pages of HTML
            raise TargetError(f"{where}: {expected}, got status {status}: {said}")
        if not kind.startswith("application/json"):
            return {"": text}
        try:
            found = json.loads(content) if content else {}
        except RecursionError as error:
            raise AnswerError(f"{where}: expected JSON, got some that is nested too deeply: {text[:50]!r} …") from error
        except ValueError as error:
            raise AnswerError(f"{where}: expected JSON, got {text[:100]!r}") from error
        return found if isinstance(found, dict) else {"": found}


def printable(text: str) -> str:
    """Return a server's text without control characters of a terminal."""
    return "".join([letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text])


def _read(answer: Json, seconds: float) -> Reply:
    try:
        (choice, *_) = answer["choices"]
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        logprobs = choice.get("logprobs") or {}
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        tokens, values, tops = _logprobs(logprobs)
        return Reply(
            text=_text(text or ""),
            tokens=tokens,
            logprobs=values,
            runners_up=tuple(_runner_up(value, top) for _, value, top in zip(tokens, values, tops, strict=True)),
            num_prompt_tokens=_count(usage.get("prompt_tokens")),
            num_cached_tokens=_count(details.get("cached_tokens")),
            seconds=seconds,
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise AnswerError(f"expected an answer in OpenAI's form, got {_shown(answer)}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _count(value: object) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= _MOST_TOKENS):
        raise TypeError
    return value


def _logprob(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError
    return found


def _shown(answer: object) -> str:
    try:
        return str(answer)[:_MOST_SHOWN]
    except RecursionError:
        return "JSON that is nested deeply"


def _logprobs(told: Json) -> tuple[tuple[str, ...], tuple[float, ...], list[list[float]]]:
    """Tokens, log probabilities, and those of the most likely tokens, in the form of either endpoint."""
    if told.get("content"):
        entries = [_most_likely(entry) for entry in told["content"]]
        tops = [[_logprob(top["logprob"]) for top in entry.get("top_logprobs") or []] for entry in entries]
        return tuple(_text(e["token"]) for e in entries), tuple(_logprob(e["logprob"]) for e in entries), tops
    if told.get("tokens") and told.get("token_logprobs"):
        shown = told.get("top_logprobs") or [{}] * len(told["tokens"])
        tops = [list(map(_logprob, (top or {}).values())) for top in shown]
        return tuple(map(_text, told["tokens"])), tuple(map(_logprob, told["token_logprobs"])), tops
    return (), (), []


def _most_likely(entry: Json) -> Json:
    """The entry of the token that a greedy answer takes, whatever the server says that was taken.

    mlx-lm 0.32.2 names the first of its most likely tokens, which it doesn't sort.
    """
    tops: list[Json] = entry.get("top_logprobs") or []
    return {**max([entry, *tops], key=lambda one: _logprob(one["logprob"])), "top_logprobs": tops}


def _runner_up(value: float, top: list[float]) -> float | None:
    """The most likely token beside the one that was taken; greedy answers take the most likely one."""
    others = sorted(top, reverse=True)[1:]
    return min(value, others[0]) if others else None
