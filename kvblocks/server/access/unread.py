"""Bodies that nobody reads, such as that of a GET, or of a request that is refused because of its head."""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_UNREAD_BYTES = 64 * 2**10
READ_OFF_S = 0.5


class UnreadBodies:
    """ASGI middleware that reads the rest of a small body before an answer begins, so that the connection can go on.

    A connection is closed after the answer if the body is larger or doesn't arrive within READ_OFF_S, since parsing
    what nobody wants would take the event loop's time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and _may_have_body(scope):
            body = _Body(scope, receive)
            await self._app(scope, body.receive, body.before(send))
        else:
            await self._app(scope, receive, send)


class _Body:
    """The body of one request, and whether all of it has been received."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._headers = dict(scope["headers"])
        self._receive = receive
        self._is_whole = False

    async def receive(self) -> Message:
        """Receive a message for the application."""
        message = await self._receive()
        self._is_whole = self._is_whole or not message.get("more_body", False)
        return message

    def before(self, send: Send) -> Send:
        """Return `send`, before whose first message the body is read off, or the connection marked to be closed."""

        async def send_after(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._is_whole:
                headers = list(message.get("headers", ()))
                if not any(name == b"connection" for name, _ in headers):
                    await self._read_off()
                    if not self._is_whole:
                        message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        return send_after

    async def _read_off(self) -> None:
        length = self._headers.get(b"content-length", b"0")
        if b"expect" in self._headers or int(length if length.isdigit() else b"0") > MAX_UNREAD_BYTES:
            return  # a client that expects 100 has not sent its body
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_OFF_S):
                while not self._is_whole and num_bytes <= MAX_UNREAD_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))


def _may_have_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )
