"""The endpoints of the cache: statistics, pins, resets, why a prompt missed. `kvblocks cache` uses them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from kvblocks import Sequence
from kvblocks.engine.errors import ForgetError
from kvblocks.engine.tiers.forgetting import FORGET_S, Forgetting
from kvblocks.errors import KVBlocksError
from kvblocks.server.access.callers import AnswerSlots, Caller
from kvblocks.server.access.gate import caller_of
from kvblocks.server.arrivals import Arrival
from kvblocks.server.body.fields import Fields, show
from kvblocks.server.endpoints.arrival_json import arrival_json
from kvblocks.server.errors import ApiError, as_api_error, late_error
from kvblocks.server.requests import PrefixBody, parse_prefix
from kvblocks.server.service import Service
from kvblocks.server.wire import Json, json_response

if TYPE_CHECKING:
    from kvblocks.wire import EventPublisher

MAX_DESCRIPTION = 256
"""The most characters of a pin's description, which is kept until the pin ends."""


class CacheApi:
    """The endpoints below /v1/cache. forget_answers: drops the stored answers of a salt."""

    def __init__(self, service: Service, forget_answers: Callable[[str], None]) -> None:
        self._service = service
        self._forget_answers = forget_answers
        self._engine = service.engine

    async def stats(self, request: Request) -> Response:
        """Statistics of the cache. Doesn't wait for a step."""
        del request
        return json_response(self.stats_json())

    def stats_json(self) -> Json:
        """Return the statistics of the cache. Any thread may call this."""
        engine = self._engine
        values = engine.metrics.snapshot().as_dict()
        stats = values["stats"]
        block_bytes = engine.plan.block_bytes
        num_lookups, seconds = self._service.thread.arrivals.num_lookups_and_seconds
        used = stats["num_blocks"] - stats["num_free_blocks"]
        return {
            "prefix_caching": engine.manager.enable_caching,
            "block_size": engine.manager.block_size,
            "num_entries": stats["num_cached_blocks"],
            **{name: stats[name] for name in ("num_blocks", "num_free_blocks", "num_evicted_blocks")},
            **{name: stats[name] for name in ("num_queries", "num_hits", "num_queried_tokens", "num_hit_tokens")},
            "hit_rate": stats["hit_rate"],
            "request_hit_rate": stats["request_hit_rate"],
            "recent": values["window"],
            "memory": {
                "pool_bytes": stats["num_blocks"] * block_bytes,
                "used_bytes": used * block_bytes,
                "cached_bytes": stats["num_cached_blocks"] * block_bytes,
            },
            "lookups": {"num_lookups": num_lookups, "mean_s": seconds / num_lookups if num_lookups else None},
            "pins": values["pins"],
            "hints": asdict(self._service.thread.hint_stats),
            "tiers": self._tiers_json(values["tiers"]),
            "remembered": self._remembered_json(),
            "session_gate": self._gate_json(),
            "requests": self._service.metrics.counts(),
        }

    async def top(self, request: Request) -> Response:
        """For each tenant, the tokens that it asked for, hit, holds and lost; for each tier, what it has."""
        del request
        tenants = await self._call(self._service.thread.usage.read)
        values = self.stats_json()
        device = {name: values[name] for name in ("num_blocks", "num_entries", "num_evicted_blocks")}
        device["num_pinned_blocks"] = values["pins"]["num_pinned_blocks"]
        return json_response({"time": time.time(), "tenants": tenants, "device": device, "tiers": values["tiers"]})

    def _remembered_json(self) -> Json | None:
        """Statistics of remembered prompts; None if the engine remembers none."""
        of = self._engine.scheduler.remembered
        if of is None:
            return None
        return {"num_prompts": len(of), "num_blocks": of.num_blocks, "num_answers": of.num_answers}

    def _gate_json(self) -> Json | None:
        """The session gate: its numbers, its members, and who waits why; None if the engine has no gate."""
        view = self._engine.scheduler.entrance.view
        if view is None:
            return None
        members = [
            {"session": str(name), "num_tokens": tokens, "paused_s": None if since is None else view.now - since}
            for (_, name), tokens, since in view.members
        ]
        waiting = [
            {
                "session": str(one.session[1]),
                "reason": one.reason,
                "num_missing_tokens": one.num_missing_tokens,
                "num_ahead": one.num_ahead,
                "waited_s": view.now - one.asked_at,
            }
            for one in view.waiting
        ]
        return {**asdict(view.stats), "members": members, "waiting": waiting}

    def _tiers_json(self, tiers: list[Json]) -> list[Json]:
        """The manager's statistics of each tier, with bytes and seconds by direction, and its place's own."""
        offload = self._engine.offload
        traffic = {} if offload is None else {moved.tier: asdict(moved) for moved in offload.traffic()}
        return [
            {**tier, **{name: traffic[tier["name"]][name] for name in ("num_bytes", "seconds", "place")}}
            for tier in tiers
        ]

    async def pin(self, request: Request) -> Response:
        """Pin a prefix."""
        fields, prefix = await self._service.bodies.read(request, partial(_parse_prefix, purpose="pin"))
        caller = caller_of(request.scope)
        salt, description = (
            caller.salt_for(fields.kept_text("cache_salt")),
            fields.text("description", MAX_DESCRIPTION) or "",
        )
        ttl_s, priority = fields.number("ttl_s", 0.0), fields.count("priority", 0, 100)
        if ttl_s == 0:
            raise fields.error("ttl_s", "seconds, more than 0")
        fields.refuse_unknown()
        book, chosen = self._service.thread.pins, 50 if priority is None else priority
        async with self._encoded(prefix, caller) as tokens:
            entry = await self._call(
                lambda: book.add(tokens, salt=salt, description=description, ttl_s=ttl_s, priority=chosen)
            )
        return json_response(entry.to_json(time.monotonic()))

    async def list_pins(self, request: Request) -> Response:
        """The pins that haven't ended, the oldest first."""
        del request
        entries = await self._call(self._service.thread.pins.entries)
        now = time.monotonic()
        return json_response({"pins": [entry.to_json(now) for entry in entries]})

    async def unpin(self, request: Request) -> Response:
        """End a pin."""
        pin_id = request.path_params["pin_id"]
        entry = await self._call(lambda: self._service.thread.pins.remove(pin_id))
        if entry is None:
            raise ApiError(404, f"expected the id of an existing pin, got {pin_id!a:.80}", code="no_such_pin")
        return json_response(entry.to_json(time.monotonic()))

    async def unpin_tokens(self, request: Request) -> Response:
        """End all pins of a prefix. The body's prefix has the same forms as that of `pin`."""
        fields, prefix = await self._service.bodies.read(request, partial(_parse_prefix, purpose="unpin"))
        caller = caller_of(request.scope)
        salt = caller.salt_for(fields.kept_text("cache_salt"))
        fields.refuse_unknown()
        book = self._service.thread.pins
        async with self._encoded(prefix, caller) as tokens:
            entries = await self._call(lambda: book.remove_tokens(tokens, salt=salt))
        if not entries:
            raise ApiError(404, "expected a prefix that is pinned, got one that isn't", code="no_such_pin")
        now = time.monotonic()
        return json_response({"pins": [entry.to_json(now) for entry in entries]})

    async def dot(self, request: Request) -> Response:
        """Draw the cache as a Graphviz document, which shows the first tokens and the salts of everybody's prompts."""
        given = request.query_params.get("max_nodes", "200")
        if not (given.isascii() and given.isdigit() and len(given) <= 6 and int(given) > 0):
            raise ApiError(400, f"max_nodes: expected a number from 1 to 999999, got {given!a:.80}", param="max_nodes")
        document = await self._call(lambda: self._engine.manager.inspect.to_dot(max_nodes=int(given)))
        return json_response({"dot": document})

    async def hints(self, request: Request) -> Response:
        """Carry out an envelope of hints for the body's salt. If an action is deferred, the client asks again."""
        body, fields = await self._service.bodies.read(request, lambda body: (body, Fields(body)))
        salt = caller_of(request.scope).salt_for(fields.kept_text("cache_salt"))
        executor = self._service.thread.hints
        answers = await self._call(lambda: executor.carry_out(body, salt, time.monotonic()))
        return json_response(answers.to_dict())

    async def snapshot(self, request: Request) -> Response:
        """All that is cached after one batch of events, as the publisher knows it. Doesn't wait for a step."""
        del request
        publisher = self._service.publisher
        if publisher is None:
            raise ApiError(
                404, "expected a server that publishes events (--kv-events), got one without", code="no_events"
            )
        return json_response(await run_in_threadpool(_snapshot_json, publisher))

    async def reset(self, request: Request) -> Response:
        """Reset the cache. Pins stay, and hold their prefixes again once these have been computed again."""
        fields = await self._service.bodies.read(request, Fields)
        fields.refuse_unknown()
        manager = self._engine.manager

        def reset() -> int:
            num_cached = manager.stats.num_cached_blocks
            manager.reset_prefix_cache()
            return num_cached

        return json_response({"num_removed_entries": await self._call(reset)})

    async def forget(self, request: Request) -> Response:
        """Delete what is cached for a salt, in all tiers, and end its hints.

        Only this request waits for the tiers; the engine's steps go on.
        """
        fields = await self._service.bodies.read(request, Fields)
        salt = caller_of(request.scope).salt_for(fields.kept_text("cache_salt"))
        fields.refuse_unknown()
        if salt is None:
            raise fields.error("cache_salt", "the salt whose prompts are to be forgotten")

        def forget() -> Forgetting:
            self._service.thread.hints.forget(salt)
            self._service.thread.arrivals.forget(salt)
            self._service.thread.marks.forget(salt)
            return self._engine.begin_forgetting(salt)

        self._forget_answers(salt)
        forgetting: Forgetting = await self._call(forget)
        parts = [asyncio.wrap_future(part) for part in forgetting.parts.values()]
        if parts:
            await asyncio.wait(parts, timeout=FORGET_S)
        try:
            forgetting.check()
        except ForgetError as error:
            raise as_api_error(error) from error
        return json_response({"num_removed_entries": forgetting.num_blocks})

    async def explain(self, request: Request) -> Response:
        """Why a prompt would miss now, or what a request hit and missed when it arrived.

        Name a request by its id or its `prompt_cache_key`, or ask for the last one.
        """
        fields, prefix = await self._service.bodies.read(request, _parse_explained)
        caller = caller_of(request.scope)
        if prefix is None:
            return json_response(await self._explain_request(fields, caller))
        salt = caller.salt_for(fields.kept_text("cache_salt"))
        fields.refuse_unknown()
        manager, arrivals = self._engine.manager, self._service.thread.arrivals

        def explain(tokens: list[int]) -> Json:
            sequence = Sequence("explained", tokens, salt=salt)
            hit, explanation = manager.get_computed_blocks(sequence), manager.inspect.explain(sequence)
            around = arrivals.look_around(explanation, salt, caller.tenant, hit.pending_tokens)
            arrival = Arrival(salt, len(tokens), hit.num_tokens, explanation, around)
            return arrival_json(arrival, None, manager.block_size, caller)

        async with self._encoded(prefix, caller) as tokens:
            return json_response({"prompts": [await self._call(lambda: explain(tokens))]})

    async def _explain_request(self, fields: Fields, caller: Caller) -> Json:
        request_id, session = fields.text("request_id"), fields.kept_text("prompt_cache_key")
        fields.flag("last")
        salt = None if request_id is not None else caller.salt_for(fields.kept_text("cache_salt"))
        fields.refuse_unknown()
        of, block_size = self._service.thread.arrivals, self._engine.manager.block_size
        # Clients that share a key, and no salt, must not be told of each other's prompts: they name them by ids.
        is_alone = caller.tenant is not None or caller.is_operator
        if request_id is None and not is_alone:
            raise fields.error("request_id", "the id of an answer, since this key may be others', too")

        def explain() -> Json | None:
            key = request_id or of.find_last(caller, salt, session)
            arrivals = None if key is None else of.find(key, caller)
            if arrivals is None:
                return None
            told = [
                arrival_json(arrival, of.compare(arrival) if is_alone else None, block_size, caller)
                for arrival in arrivals
            ]
            return {"request_id": key, "prompts": told}

        found: Json | None = await self._call(explain)
        if found is None:
            got = show(request_id or session or "last")
            message = f"request_id: expected that of one of the last requests, got {got}"
            raise ApiError(404, message, param="request_id", code="no_such_request")
        return found

    @asynccontextmanager
    async def _encoded(self, prefix: PrefixBody, caller: Caller) -> AsyncIterator[list[int]]:
        """Give the tokens of a prefix. Within this context it takes a slot, as an answer does."""
        service, slots = self._service, AnswerSlots(caller, 1)
        seconds, nothing = service.settings.request_timeout_s, service.bodies.nothing()
        try:
            async with asyncio.timeout(seconds):
                (tokens,) = await service.encode(
                    lambda tokenizer: [prefix.encode(tokenizer)], [prefix.num_chars], slots, nothing
                )
        except TimeoutError:
            raise late_error(seconds) from None
        try:
            yield tokens
        finally:
            service.close(slots)

    async def _call(self, function: Any) -> Any:
        try:
            return await self._service.call(function)
        except KVBlocksError as error:
            raise as_api_error(error) from error


def _parse_prefix(body: Any, purpose: str) -> tuple[Fields, PrefixBody]:
    """Read a body's prefix, and return its fields, of which others are to be read. Raises ApiError."""
    fields = Fields(body)
    return fields, parse_prefix(fields, purpose)


def _parse_explained(body: Any) -> tuple[Fields, PrefixBody | None]:
    """`_parse_prefix` of what is to be explained; no prefix if that is a request."""
    fields = Fields(body)
    names_request = any(name in fields for name in ("request_id", "prompt_cache_key")) or fields.flag("last")
    return fields, None if names_request else parse_prefix(fields, "explain")


def _snapshot_json(publisher: "EventPublisher") -> Json:
    """A snapshot as plain values. Numbers are written as texts, since many JSON readers keep only 53 bits."""
    number, stored = publisher.snapshot()
    return {
        "epoch": str(publisher.epoch),
        "number": str(number),
        "num_blocks": sum(len(event.block_hashes) for event in stored),
        "stored": [
            {
                "block_hashes": [digest.hex() for digest in event.block_hashes],
                "parent_block_hash": None if event.parent_block_hash is None else event.parent_block_hash.hex(),
                "block_size": event.block_size,
                "medium": event.medium,
                "group_idx": event.group_idx,
                "kind": event.kind,
                "window": event.window,
                "lora": event.lora,
                "cache_salt": event.salt,
            }
            for event in stored
        ],
    }
