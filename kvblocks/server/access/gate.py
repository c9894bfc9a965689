"""The gate: checks a request's head, and finds its caller."""

from collections.abc import Sequence
from enum import Enum

from starlette.types import ASGIApp, Receive, Scope, Send

from kvblocks.server.access.callers import Caller, Callers
from kvblocks.server.access.hosts import HostCheck
from kvblocks.server.errors import ApiError
from kvblocks.server.wire import send_json

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
_MONITORING = frozenset({"/health", "/metrics", "/version", "/ping", "/load"})


class Audience(Enum):
    """Whom a path is for. MONITORS: anyone who watches the server; such paths reveal only counts, and need no key.

    ANYONE: pages and descriptions, which need no key, either. CLIENTS: those with a key, if the server has keys.
    OPERATORS: those whose key has operators' rights.
    """

    MONITORS = "monitors"
    ANYONE = "anyone"
    CLIENTS = "clients"
    OPERATORS = "operators"


def audience_of(path: str) -> Audience:
    """Return whom a path is for. path: as routes get it, without a query, and with escapes such as %77 decoded."""
    if path in _MONITORING:
        return Audience.MONITORS
    if path.startswith(_CACHE) and path not in _CACHE_FOR_ALL:
        return Audience.OPERATORS
    return Audience.CLIENTS if path.startswith(_WITH_KEY) else Audience.ANYONE


class Gate:
    """ASGI middleware that passes a request on with its Caller in its state, or answers an error and closes.

    hosts: the allowed Host names; None: any.
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
                await send_json(
                    send, error.to_json_for(scope["path"]), error.status, {**error.headers, "Connection": "close"}
                )
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers, path = scope["headers"], scope["path"]
        audience = audience_of(path)
        check_framing(headers, scope["http_version"])
        if self._hosts is not None:
            self._hosts.check(headers)
        if audience in {Audience.CLIENTS, Audience.OPERATORS}:
            caller = self._callers.find(headers)
            if audience is Audience.OPERATORS and not caller.is_operator:
                raise ApiError(403, f"{path!a:.80}: expected the operator's key, got another one", code="not_operator")
            scope.setdefault("state", {})["caller"] = caller


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request that the gate has passed on, for paths that may need a key."""
    caller: Caller = scope["state"]["caller"]
    return caller


def has_precedence(scope: Scope, callers: Callers) -> bool:
    """Whether a request is served even when all connections are busy: a monitor's, or one with operators' rights."""
    audience = audience_of(scope["path"])
    if audience is not Audience.OPERATORS:
        return audience is Audience.MONITORS
    try:
        return callers.find(scope["headers"]).is_operator
    except ApiError:
        return False


def check_framing(headers: Sequence[tuple[bytes, bytes]], http_version: str) -> None:
    """Raise ApiError for framing that the parser accepts but a proxy may read differently (request smuggling)."""
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names:
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
        if codings != [b"chunked"]:
            raise ApiError(400, f"expected Transfer-Encoding: chunked, got {b', '.join(codings)!a:.80}")
    if http_version == "1.1" and names.count(b"host") != 1:
        raise ApiError(400, f"expected one Host header, got {names.count(b'host') or 'none'}")
