"""The routes, who may use them, and how answers and errors are sent.

A failure before the first token is an HTTP error. A failure later in a stream is the stream's last event. When a client
disconnects, its answer is dropped at once, whatever its state.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvblocks.engine.text.tokenizer import Tokenizer
from kvblocks.errors import KVBlocksError
from kvblocks.server.access.access_log import AccessLog
from kvblocks.server.access.bodies import BodyLoad
from kvblocks.server.access.gate import Gate, caller_of
from kvblocks.server.access.origins import Origins
from kvblocks.server.access.unread import UnreadBodies
from kvblocks.server.answer import Answer
from kvblocks.server.body.fields import meant, show
from kvblocks.server.endpoints.about import About, check_model
from kvblocks.server.endpoints.cache_api import CacheApi
from kvblocks.server.endpoints.openapi import OpenApi
from kvblocks.server.endpoints.tokens import TokensApi
from kvblocks.server.errors import ApiError, as_api_error, late_error
from kvblocks.server.page import show_docs, show_page
from kvblocks.server.protocols.messages_body import parse_count, parse_message
from kvblocks.server.protocols.messages_voice import MessagesVoice
from kvblocks.server.protocols.response_store import ResponseStore
from kvblocks.server.protocols.responses_body import parse_response
from kvblocks.server.protocols.responses_voice import ResponsesVoice
from kvblocks.server.protocols.voice import Voice
from kvblocks.server.requests import AnswerRequest, parse_chat, parse_completion, parse_warm
from kvblocks.server.service import Service, outcome_of
from kvblocks.server.service_metrics import RequestOutcome
from kvblocks.server.wire import (
    error_response,
    json_response,
    send_encoded,
    send_head,
    send_json,
    send_part,
)

STOP_TIMEOUT_S = 30.0

Parse = Callable[[Any], AnswerRequest]
Voiced = Callable[[Answer], Voice]
Prepared = tuple[AnswerRequest, list[list[int]]]
"""A request that is ready for the engine, and its prompts as tokens."""


def make_app(service: Service, model: str) -> Starlette:
    """Return the application that serves `service`. It starts and stops the service.

    model: the served name, unless the settings name others.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        service.start()
        yield
        await service.stop(STOP_TIMEOUT_S)

    names = service.settings.model_names or (model,)
    store = ResponseStore()
    api, cache = Api(service, names, store), CacheApi(service, store.forget)
    about, tokens = About(service, names), TokensApi(service, names)
    routes = [*_routes(api, about, tokens), *_cache_routes(cache, api)]
    described = OpenApi(routes)
    routes += [Route("/openapi.json", described.show), Route("/docs", show_docs)]
    handlers: dict[Any, Callable[[Request, Any], Any]] = {
        KVBlocksError: _show_error,
        HTTPException: partial(_show_http_exception, routes),
        ClientDisconnect: _show_nothing,
        Exception: _show_bug,
    }
    settings = service.settings
    middleware = [
        Middleware(AccessLog),
        Middleware(UnreadBodies),
        Middleware(Gate, callers=settings.callers, hosts=settings.hosts),
    ]
    if settings.allowed_origins:
        middleware.insert(-1, Middleware(Origins, origins=settings.allowed_origins))  # before the gate
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


def _routes(api: "Api", about: About, tokens: TokensApi) -> list[Route]:
    """The routes of answers, of the model, and for monitoring."""
    return [
        Route("/", show_page),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/ping", api.ping),
        Route("/load", api.load),
        Route("/version", about.version),
        Route("/model_info", about.model_info),
        Route("/get_model_info", about.model_info),
        Route("/server_info", about.server_info),
        Route("/get_server_info", about.server_info),
        Route("/tokenizer_info", tokens.tokenizer_info),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", about.models),
        Route("/v1/models/{name:path}", about.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/embeddings", about.embeddings, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/responses/{response_id}", api.response, methods=["GET"]),
        Route("/v1/responses/{response_id}", api.drop_response, methods=["DELETE"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
    ]


def _cache_routes(cache: CacheApi, api: "Api") -> list[Route]:
    """The routes below /v1/cache."""
    return [
        Route("/v1/cache/stats", cache.stats),
        Route("/v1/cache/top", cache.top),
        Route("/v1/cache/pins", cache.list_pins, methods=["GET"]),
        Route("/v1/cache/pins", cache.pin, methods=["POST"]),
        Route("/v1/cache/pins/{pin_id}", cache.unpin, methods=["DELETE"]),
        Route("/v1/cache/unpin", cache.unpin_tokens, methods=["POST"]),
        Route("/v1/cache/dot", cache.dot),
        Route("/v1/cache/hints", cache.hints, methods=["POST"]),
        Route("/v1/cache/snapshot", cache.snapshot),
        Route("/v1/cache/reset", cache.reset, methods=["POST"]),
        Route("/v1/cache/forget", cache.forget, methods=["POST"]),
        Route("/v1/cache/explain", cache.explain, methods=["POST"]),
        Route("/v1/cache/warm", api.warm, methods=["POST"]),
    ]


class Api:
    """The endpoints of OpenAI's API, and those for monitoring."""

    def __init__(self, service: Service, names: Sequence[str], store: ResponseStore) -> None:
        self._service = service
        self._names = names
        self._store = store
        self._tiers = tuple([tier.name for tier in service.engine.manager.tiers])

    async def health(self, request: Request) -> Response:
        """200 while the server takes requests, else 503; the body says whether requests need a key."""
        del request
        is_healthy, has_keys = self._service.is_healthy, self._service.settings.has_keys
        status = "ok" if is_healthy else "stopping"
        return json_response({"status": status, "needs_key": has_keys}, 200 if is_healthy else 503)

    async def ping(self, request: Request) -> Response:
        """200 while the server takes requests, else 503, without a body."""
        del request
        return Response(status_code=200 if self._service.is_healthy else 503)

    async def load(self, request: Request) -> Response:
        """How many answers are unfinished, in vLLM's format."""
        del request
        return json_response({"server_load": self._service.num_open})

    async def metrics(self, request: Request) -> Response:
        """All metrics in Prometheus' text format, as of at most a second ago."""
        del request
        return Response(await self._service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def completions(self, request: Request) -> ASGIApp:
        """Continue prompts."""
        del request  # the response is an ASGI application, which gets the request's parts itself
        return partial(self._respond, parse_completion, Voice)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """Answer a chat."""
        del request
        return partial(self._respond, parse_chat, Voice)

    async def responses(self, request: Request) -> ASGIApp:
        """Answer a chat in the form of OpenAI's Responses."""
        parse = partial(parse_response, store=self._store, caller=caller_of(request.scope))
        return partial(self._respond, parse, partial(ResponsesVoice, self._store))

    async def response(self, request: Request) -> Response:
        """Return a stored response."""
        response_id, caller = request.path_params["response_id"], caller_of(request.scope)
        found = self._store.find(response_id, caller.tenant)
        if found is None:
            raise _no_such_response(response_id)
        return Response(found.body, media_type="application/json")

    async def drop_response(self, request: Request) -> Response:
        """Delete a stored response."""
        response_id, caller = request.path_params["response_id"], caller_of(request.scope)
        if not self._store.drop(response_id, caller.tenant):
            raise _no_such_response(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def messages(self, request: Request) -> ASGIApp:
        """Answer a chat in the form of Anthropic's Messages."""
        del request
        return partial(self._respond, parse_message, MessagesVoice)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the prompt that a Messages request would have."""
        asked, load = await self._read(parse_count, request)
        seconds = self._service.settings.request_timeout_s
        try:
            async with asyncio.timeout(seconds):
                (tokens,) = await self._service.encode(asked.encode, asked.num_chars, asked.slots, load)
        except TimeoutError:
            raise late_error(seconds) from None
        self._service.close(asked.slots)
        return json_response({"input_tokens": len(tokens)})

    async def warm(self, request: Request) -> ASGIApp:
        """Cache prompts, and generate nothing. Limits and cancellation are those of other requests."""
        del request
        return partial(self._respond, parse_warm, Voice)

    async def _respond(self, parse: Parse, voiced: Voiced, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application. Raises ApiError, before anything is sent, if the answer can't be begun."""
        service, seconds = self._service, self._service.settings.request_timeout_s
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                asked, load = await self._read(parse, Request(scope, receive))
                gone = asyncio.create_task(_wait_until_gone(receive))
                asked, prompts = await self._encode(asked, load, gone)
        except TimeoutError:
            service.metrics.count(RequestOutcome.TIMED_OUT)
            raise late_error(seconds) from None
        except Exception as error:
            # Disconnected clients, and requests without room, are counted where they are detected.
            if not isinstance(error, ClientDisconnect) and as_api_error(error).status != 429:
                service.metrics.count(outcome_of(as_api_error(error)))
            raise
        answer = Answer(asked, self._names[0], self._tiers, service.engine.model.tokenizer, start_s=start_s)
        try:
            service.submit(answer, prompts)
            gone.add_done_callback(lambda _: service.drop(answer))
            voice = voiced(answer)
            await (_stream(voice, send) if asked.stream else _send_whole(voice, send))
        finally:
            gone.cancel()
            service.drop(answer)

    async def _encode(self, asked: AnswerRequest, load: BodyLoad, gone: "asyncio.Task[None]") -> Prepared:
        """Return the request and its prompts as tokens, with slots taken for them.

        Raises what `Service.encode` and `compile` raise, and ClientDisconnect. `gone` is cancelled then, and the slots
        and `load` are given back once the encoding has ended.
        """
        service = self._service
        encoding = asyncio.create_task(self._prepare(asked, load))
        try:
            await asyncio.wait({encoding, gone}, return_when=asyncio.FIRST_COMPLETED)
            return _result(encoding)
        except BaseException as error:
            if not encoding.cancel() and encoding.exception() is None:
                service.close(asked.slots)  # the encoding has succeeded, but nobody waits for it any more
            gone.cancel()
            if isinstance(error, ClientDisconnect):
                service.metrics.count(RequestOutcome.CANCELLED)
            raise

    async def _prepare(self, asked: AnswerRequest, load: BodyLoad) -> Prepared:
        """Encode the prompts, then compile the answer's form."""
        found = [asked]

        def encode(tokenizer: Tokenizer | None) -> list[list[int]]:
            prompts = asked.encode(tokenizer)
            if asked.marks:
                found[0] = replace(asked, marked_tokens=asked.find_marks(tokenizer, prompts[0]))
            if self._service.engine.model.config.has_states:
                found[0] = found[0].with_system_end(tokenizer, prompts[0])
            return prompts

        prompts = await self._service.encode(encode, asked.num_chars, asked.slots, load)
        (asked,) = found
        if asked.form is not None:
            asked = asked.constrained(await self._service.compile(asked.form, asked.slots))
        return asked, prompts

    async def _read(self, parse: Parse, request: Request) -> tuple[AnswerRequest, BodyLoad]:
        """Return a body as a request, and its bytes, which count until they are released. Raises ApiError."""

        def check(body: Any) -> AnswerRequest:
            service = self._service
            asked = parse(body).asked_by(caller_of(request.scope))
            asked = asked.speaking(service.tool_format, has_special_marks=service.has_special_marks)
            request.scope["state"]["request_id"] = asked.request_id
            check_model(self._names, asked.model)
            return asked

        try:
            return await self._service.bodies.take(request, check)
        except ClientDisconnect:
            self._service.metrics.count(RequestOutcome.CANCELLED)
            raise
        except ApiError as error:
            if error.status == 429:
                self._service.metrics.count(RequestOutcome.REFUSED)
            raise


def _no_such_response(response_id: str) -> ApiError:
    message = f"response_id: expected the id of an answer that is kept, got {show(response_id)}"
    return ApiError(404, message, param="response_id", code="no_such_response")


def _result(encoding: "asyncio.Task[Prepared]") -> Prepared:
    """Return the encoding's result, or raise its error. If it isn't done, the client has gone: ClientDisconnect."""
    if not encoding.done():
        raise ClientDisconnect
    return encoding.result()


async def _wait_until_gone(receive: Receive) -> None:
    """Wait until the client has gone, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(voice: Voice, send: Send) -> None:
    answer = voice.answer
    try:
        while await answer.take():
            pass
    except ApiError as error:
        await _send_error(send, error, answer)
        return
    if answer.outcome is RequestOutcome.FINISHED:  # else the client has gone
        body = await _make(voice.whole, is_long=answer.asked.is_long)
        await send_encoded(send, body, headers={"x-request-id": answer.answer_id})


async def _make(make: Callable[[], bytes], *, is_long: bool) -> bytes:
    """Return what `make` returns. A long result, of megabytes maybe, is made while other requests are served."""
    return await asyncio.to_thread(make) if is_long else make()


async def _stream(voice: Voice, send: Send) -> None:
    answer, has_begun = voice.answer, False
    try:
        while pieces := await answer.take():
            if not has_begun:
                has_begun = True
                await _begin_stream(answer, send)
                await send_part(send, voice.begin(pieces[0]))
            # The log probabilities of one token are small. An echo comes with the first piece of each choice.
            events = await _make(partial(voice.say, pieces), is_long=answer.asked.echo)
            if events:
                await send_part(send, events)
    except ApiError as error:
        if not has_begun:
            await _send_error(send, error, answer)
            return
        ending = voice.fail(error)
    else:
        if answer.outcome is not RequestOutcome.FINISHED:
            return  # the client has gone
        ending = voice.end()
    await send_part(send, ending, is_last=True)


async def _begin_stream(answer: Answer, send: Send) -> None:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-request-id": answer.answer_id,
    }
    await send_head(send, 200, headers)


async def _send_error(send: Send, error: ApiError, answer: Answer) -> None:
    body = error.to_anthropics() if answer.asked.id_prefix == "msg_" else error.to_json()
    await send_json(send, body, error.status, {**error.headers, "x-request-id": answer.answer_id})


async def _show_error(request: Request, error: KVBlocksError) -> Response:
    return error_response(as_api_error(error), request.url.path)


async def _show_http_exception(routes: Sequence[Route], request: Request, error: HTTPException) -> Response:
    path, headers = request.url.path, dict(error.headers or {})
    what, hint, code = error.detail, "", None
    if error.status_code == 404:
        ours = sorted({route.path.partition("/{")[0] for route in routes})
        what, hint, code = f"a path of this server ({', '.join(ours)})", _nearest(path, ours), "no_such_path"
    elif error.status_code == 405:
        methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
        what = headers["Allow"] = ", ".join(sorted(methods))
    message = f"expected {what}, got {request.method} {show(path)}{hint}"
    return error_response(ApiError(error.status_code, message, code=code, headers=headers), path)


def _nearest(path: str, ours: Sequence[str]) -> str:
    """Return the end of an error: the one of our paths that an unknown one may stand for."""
    end = path.rstrip("/")
    if end:
        for one in ours:
            if one.endswith(end) or one.startswith(f"{end}/"):
                return f": did you mean {one}?"
    return meant(path, ours[1:])  # not the page


async def _show_nothing(request: Request, error: ClientDisconnect) -> Response:
    del request, error
    return Response(status_code=400)  # nobody reads it


async def _show_bug(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error), request.url.path)
