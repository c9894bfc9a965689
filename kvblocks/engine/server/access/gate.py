"""The gate: checks a request's head, and finds its caller."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from kvblocks.engine.server.access.callers import Caller, Callers
from kvblocks.engine.server.access.hosts import HostCheck
from kvblocks.engine.server.errors import ApiError
from kvblocks.engine.server.wire import send_json

_CACHE = "/v1/cache"
_WITH_KEY = (
    "/v1",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
)
# Endpoints that concern only the caller's own prompts. All others below _CACHE are for operators.
_CACHE_FOR_ALL = frozenset({f"{_CACHE}/explain", f"{_CACHE}/warm"})


class Gate:
    """ASGI middleware that passes a request on, with its Caller in its state, or answers an error and closes.

    hosts: the allowed names; None: any. /health, /metrics and /version need no key, since they tell only counts.
    """

    def __init__(self, app: ASGIApp, callers: Callers, hosts: HostCheck | None) -> None:
        self._app = app
        self._callers = callers
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it is allowed."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await send_json(send, error.to_json(), error.status, {**error.headers, "Connection": "close"})
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, path = scope["headers"], scope["path"]
        check_framing(headers)
        if self._hosts is not None:
            self._hosts.check(headers)
        if path.startswith(_WITH_KEY):
            caller = self._callers.find(headers)
            if path.startswith(_CACHE) and path not in _CACHE_FOR_ALL and not caller.is_operator:
                raise ApiError(403, f"{path!a:.80}: expected the operator's key, got another one", code="not_operator")
            scope.setdefault("state", {})["caller"] = caller


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request that the gate has passed on, of an endpoint that may need a key."""
    caller: Caller = scope["state"]["caller"]
    return caller


def check_framing(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ApiError for a body with two lengths: a proxy may see the requests' boundaries elsewhere (smuggling)."""
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        message = "expected Content-Length or Transfer-Encoding, since one decides where a body ends, got both"
        raise ApiError(400, message, code="two_lengths")
