"""Logs one line for each request at level INFO: caller, path, outcome. It contains no prompt and no key."""

import logging
import sys
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("kvblocks.access")

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SHOWN = 100


class AccessLog:
    """ASGI middleware that logs each request when it has ended, if level INFO is enabled.

    Inner layers may set "caller" and "request_id" (the client's own name for the request) in the request's state.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and log it."""
        if scope["type"] != "http" or not logger.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        start_s, head = time.monotonic(), dict[str, str]()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [value for name, value in message.get("headers", ()) if name == b"x-request-id"]
                head["status"] = str(message["status"])
                head["id"] = ids[0].decode("latin-1") if ids else "-"
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            log(scope, head, time.monotonic() - start_s)


def log(scope: Scope, head: dict[str, str], seconds: float) -> None:
    """Log a request that has ended. head: the answer's "status" and "id", empty without an answer."""
    client, state = scope.get("client"), scope.get("state", {})
    tenant = getattr(state.get("caller"), "tenant", None)
    logger.info(
        "%s %s %s %s %.3fs id=%s tenant=%s client_id=%s",
        client[0] if client else "-",
        scope["method"],
        _shown(scope["path"]),
        head.get("status", "gone"),
        seconds,
        head.get("id", "-"),
        tenant or "-",
        _shown(state.get("request_id") or "-"),
    )


def configure_logging(level: str) -> None:
    """Write this package's log to stderr, with times. level: the lowest level to log (`settings.LOG_LEVELS`)."""
    package = logging.getLogger("kvblocks")
    package.setLevel(level.upper())
    if not package.handlers:
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter(_FORMAT))
        package.addHandler(handler)


class _ToStderr(logging.Handler):
    """Writes to the sys.stderr of the moment when something is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, with the traceback if there is an exception."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001  # as all of Python's handlers do
            self.handleError(record)


def _shown(text: str) -> str:
    """A client's text for a line of the log: escaped, and not too long."""
    return ascii(text)[1:-1].replace(" ", "\\x20")[:_SHOWN]
