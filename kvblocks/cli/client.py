"""A small client of the server, for the command line: JSON requests and answers, and streams of events."""

import json
from collections.abc import Generator
from typing import Any, Self

import httpx2

from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.server.access.hosts import is_loopback
from kvblocks.server.errors import ApiError

Json = dict[str, Any]


class UnreachableError(KVBlocksError):
    """No server answers at the URL: start one, or try again later."""


class ServerClient:
    """Talks to the server at `url`, such as http://127.0.0.1:8000, with or without /v1 at the end.

    Raises InvalidArgumentError for any other URL. Close it, or use it in a with statement.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 600.0) -> None:
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise InvalidArgumentError(f"--url: expected a URL, got {url!r}: {error}") from error
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise InvalidArgumentError(f"--url: expected http://HOST:PORT, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgumentError("--api-key: expected ASCII on one line, got something else")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Without the environment's proxy, which can't reach servers on this machine.
        uses_environment = not is_loopback(parsed.host)
        timeout = httpx2.Timeout(timeout_s, connect=10.0)
        self._http = httpx2.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=uses_environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send a request and return the JSON of the answer.

        Raises ApiError with the server's message, and UnreachableError.
        """
        try:
            response = self._http.request(method, path, **_content(body))
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        return _checked(response)

    def stream(self, path: str, body: Json) -> Generator[Json]:
        """Send a request whose answer is a stream, and yield its events. Raises what `ask` raises.

        Closing the iterator closes the connection, so that the server drops the answer.
        """
        try:
            with self._http.stream("POST", path, **_content(body)) as response:
                if response.status_code != 200:
                    response.read()
                    _checked(response)
                for line in response.iter_lines():
                    text = line.removeprefix("data: ")
                    if text in {line, "[DONE]"}:
                        continue
                    event = _parse_event(text)
                    if "error" in event:
                        raise _error(500, event)
                    yield event
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> UnreachableError:
        return UnreachableError(f"expected a kvblocks server at {self.url}, got {type(error).__name__}: {error}")


def _content(body: Json | None) -> dict[str, Any]:
    """Return a body in ASCII, so that the server can report text from a terminal that is invalid Unicode."""
    if body is None:
        return {}
    try:
        text = json.dumps(body, allow_nan=False)
    except ValueError as error:
        raise InvalidArgumentError(f"expected finite numbers, got others: {error}") from error
    return {"content": text.encode("ascii"), "headers": {"content-type": "application/json"}}


def _checked(response: httpx2.Response) -> Json:
    try:
        value = response.json()
    except ValueError:
        value = None
    if response.status_code >= 400:
        raise _error(response.status_code, value)
    if not isinstance(value, dict):
        raise ApiError(response.status_code, f"expected a JSON object from {response.url}, got something else")
    return value


def _parse_event(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not ("error" in value or isinstance(value.get("choices"), list)):
        raise ApiError(200, "expected events with choices, got something else: is it OpenAI's API?")
    return value


def _error(status: int, value: Any) -> ApiError:
    """Return the error in a server's answer. Other servers may write errors in other ways."""
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return ApiError(status, str(message or f"expected OpenAI's or kvblocks' API, got an answer with status {status}"))
