"""The response to one request: runs it, watches whether the client is still there, and writes what comes.

A failure before the first token is an HTTP error; after it, in a stream, it comes as the last event. When the client
goes away the request is dropped at once, whatever it was waiting for.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from kvblocks.engine.server.errors import ApiError
from kvblocks.engine.server.replies import DONE, Reply, encode_event, encode_json
from kvblocks.engine.server.requests import AnswerRequest
from kvblocks.engine.server.service import Job, Service


class Answer:
    """An ASGI application for one request whose prompts are encoded."""

    def __init__(self, service: Service, request: AnswerRequest, prompts: list[list[int]], reply: Reply) -> None:
        self._service = service
        self._request = request
        self._prompts = prompts
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError, before anything is sent, when there is no place for the request."""
        del scope
        request = self._request
        job = self._service.submit(self._reply.answer_id, self._prompts, request.sampling, request.salt)
        watcher = asyncio.create_task(self._watch(job, receive))
        try:
            await (self._stream(job, send) if request.stream else self._send_whole(job, send))
        finally:
            watcher.cancel()
            self._service.drop(job)

    async def _watch(self, job: Job, receive: Receive) -> None:
        """Drop the request when the client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.drop(job)

    async def _send_whole(self, job: Job, send: Send) -> None:
        try:
            while not self._reply.is_whole:
                deltas = await job.take()
                if not deltas:
                    return  # the client has gone
                for delta in deltas:
                    self._reply.add(delta)
        except ApiError as error:
            await send_error(send, error, self._reply.answer_id)
            return
        await send_body(send, 200, encode_json(self._reply.body()), {"x-request-id": self._reply.answer_id})

    async def _stream(self, job: Job, send: Send) -> None:
        has_begun = False
        try:
            while not self._reply.is_whole:
                deltas = await job.take()
                if not deltas:
                    return
                if not has_begun:
                    has_begun = True
                    await self._begin(send)
                events = [encode_event(chunk) for delta in deltas for chunk in self._reply.chunks(delta)]
                if events:
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        except ApiError as error:
            if not has_begun:
                await send_error(send, error, self._reply.answer_id)
                return
            ending = encode_event(error.to_json())
        else:
            ending = encode_event(self._reply.usage_chunk()) if self._request.include_usage else b""
            ending += DONE
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _begin(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-request-id": self._reply.answer_id,
        }
        await send({"type": "http.response.start", "status": 200, "headers": encode_headers(headers)})


async def send_error(send: Send, error: ApiError, answer_id: str | None = None) -> None:
    """Send an error as a whole response."""
    headers = error.headers if answer_id is None else {**error.headers, "x-request-id": answer_id}
    await send_body(send, error.status, encode_json(error.to_json()), headers)


async def send_body(send: Send, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    """Send a JSON body as a whole response."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    with contextlib.suppress(OSError):  # the client may have gone
        await send({"type": "http.response.start", "status": status, "headers": encode_headers(fields)})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
