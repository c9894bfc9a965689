"""The gate: what a request's head must say to be let in."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from kvblocks.engine.server.errors import ApiError
from kvblocks.engine.server.wire import send_json


class Gate:
    """ASGI middleware that passes a request on, or answers with an error and closes its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it may."""
        if scope["type"] == "http":
            try:
                check_framing(scope["headers"])
            except ApiError as error:
                await send_json(send, error.to_json(), error.status, {**error.headers, "Connection": "close"})
                return
        await self._app(scope, receive, send)


def check_framing(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ApiError for a body with two lengths: who else reads it, such as a proxy, may see other requests in it."""
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        message = "expected Content-Length or Transfer-Encoding, since one decides where a body ends, got both"
        raise ApiError(400, message, code="two_lengths")
