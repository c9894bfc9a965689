"""JSON in and out: request bodies of bounded size, read within bounded time; responses, errors and events."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from kvblocks.engine.server.errors import ApiError

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
BODY_TIMEOUT_S = 30.0
# A client that is still sending doesn't see an early answer, so some of what is too large is read and thrown away.
_DRAIN = 4


async def read_json(request: Request, max_bytes: int) -> Any:
    """Return the parsed body.

    Raises ApiError: 415 for another content type (browsers send JSON to other sites only when these agree, so a web
    page can't use a server on its reader's machine), 413, 408, 400.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"content-type: expected application/json, got {content_type or 'none'!r:.80}")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, max_bytes)
    except TimeoutError:
        headers = {"Connection": "close"}
        raise ApiError(408, f"expected the body within {BODY_TIMEOUT_S:g} s, got less of it", headers=headers) from None
    try:
        return json.loads(body)
    except RecursionError:
        raise ApiError(400, "expected a JSON body, got one that is nested too deep") from None
    except ValueError as error:  # of UTF-8 as well
        raise ApiError(400, f"expected a JSON body, got an error: {ascii(str(error))[1:-1]:.200}") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    num_bytes = int(declared) if declared.isdecimal() else 0
    chunks: list[bytes] = []
    num_read = 0
    if num_bytes <= _DRAIN * max_bytes:
        async for chunk in request.stream():
            num_read += len(chunk)
            if num_read > max_bytes:
                chunks.clear()
            else:
                chunks.append(chunk)
            if num_read > _DRAIN * max_bytes:
                break
    if max(num_bytes, num_read) > max_bytes:
        got = num_bytes or f"more than {max_bytes}"
        message = f"expected a body of at most {max_bytes} bytes, got {got}"
        raise ApiError(413, message, code="too_large", headers={"Connection": "close"})
    return b"".join(chunks)


def encode_json(value: Any) -> bytes:
    """Return a value as JSON. ASCII only: what clients sent, lone surrogates too, may come back in messages."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def encode_event(value: Any) -> bytes:
    """Return a value as one server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(encode_json(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """Return an error as a response."""
    return json_response(error.to_json(), error.status, error.headers)


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send a status and headers, as ASGI has them."""
    fields = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})


async def send_part(send: Send, part: bytes, *, is_last: bool = False) -> None:
    """Send a part of a body."""
    await send({"type": "http.response.body", "body": part, "more_body": not is_last})


async def send_json(send: Send, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole JSON body, or nothing to a client that has gone."""
    body = encode_json(value)
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    with contextlib.suppress(OSError):
        await send_head(send, status, fields)
        await send_part(send, body, is_last=True)
