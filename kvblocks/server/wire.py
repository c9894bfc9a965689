"""Writes JSON: responses, errors and events."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Send

from kvblocks.server.errors import ApiError

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def encode_json(value: Any) -> bytes:
    """Return a value as JSON in ASCII, since messages may repeat what clients sent, including lone surrogates."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def encode_event(value: Any) -> bytes:
    """Return a value as one server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(encode_json(value), status, headers, "application/json")


def error_response(error: ApiError, path: str) -> Response:
    """Return an error as a response to a request for this path."""
    return json_response(error.to_json_for(path), error.status, error.headers)


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send a status and headers."""
    fields = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})


async def send_part(send: Send, part: bytes, *, is_last: bool = False) -> None:
    """Send a part of a body."""
    await send({"type": "http.response.body", "body": part, "more_body": not is_last})


def encode_in_parts(value: Json, name: str) -> bytes:
    """Return an object as JSON. The items of its list `name` are encoded one by one, so that other threads can run."""
    items = b",".join([encode_json(item) for item in value[name]])
    rest = {key: item for key, item in value.items() if key != name}
    return b"{" + encode_json(name) + b":[" + items + b"]," + encode_json(rest)[1:]


async def send_json(send: Send, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send a value as a complete JSON body, or nothing if the client has disconnected."""
    await send_encoded(send, encode_json(value), status, headers)


async def send_encoded(send: Send, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send a complete body of encoded JSON, or nothing if the client has disconnected."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    with contextlib.suppress(OSError):
        await send_head(send, status, fields)
        await send_part(send, body, is_last=True)
