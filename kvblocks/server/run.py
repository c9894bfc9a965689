"""Runs the server, from the settings to a listening socket, and from a signal to the end."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from rich.console import Console
from rich.progress import Progress

from kvblocks.arguments import counted
from kvblocks.engine.collector import freeze_collector
from kvblocks.engine.engine import Engine
from kvblocks.engine.run.runner import LoadedModel
from kvblocks.errors import InvalidArgumentError, KVBlocksError
from kvblocks.replay.recorder import TraceRecorder
from kvblocks.server.access.access_log import configure_logging
from kvblocks.server.access.connections import (
    ACCEPTED_AT_ONCE,
    MAX_WAITING,
    bounded,
    count_connections,
    log_shortage_seldom,
)
from kvblocks.server.app import make_app
from kvblocks.server.flags import name_of
from kvblocks.server.service import Service
from kvblocks.server.settings import NO_EVENTS, CacheSettings, EventSettings, ServerSettings

if TYPE_CHECKING:
    from kvblocks.wire import EventPublisher

logger = logging.getLogger("kvblocks.server")

_SIGHUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # a terminal has ended; Windows has no such signal


def make_engine(model: LoadedModel, settings: CacheSettings, publisher: "EventPublisher | None" = None) -> Engine:
    """Make the engine that the settings describe. publisher: publishes its events.

    Raises InvalidArgumentError and DiskError.
    """
    return Engine(
        model,
        num_blocks=settings.num_blocks,
        kv_cache_memory=settings.kv_cache_memory,
        num_state_slots=settings.num_state_slots,
        block_size=settings.block_size,
        enable_prefix_caching=settings.prefix_caching,
        deterministic=settings.deterministic,
        attention=settings.attention,
        schedule=settings.schedule,
        kv_cache_dtype=settings.kv_cache_dtype,
        eviction=settings.eviction,
        num_history_blocks=settings.num_history_blocks if settings.prefix_caching else 0,
        remember_next_token=settings.remember_next_token,
        session_gate=settings.session_gate,
        tiers=settings.tiers,
        limits=settings.limits_on(model.device),
        on_events=None if publisher is None else publisher.publish,
    )


def warm_up(engine: Engine) -> str:
    """Warm up the engine, with a progress bar on a terminal. Return a readable line about how long it took."""
    begin_s = time.monotonic()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("warming up", total=None)
        seconds = engine.warm_up(
            lambda name, done, total: progress.update(
                bar, description=f"warming up: {name}", completed=done, total=total
            )
        )
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    kernels = ", ".join(f"{name} {taken:.1f}" for name, taken in slowest)
    return f"warmed up in {time.monotonic() - begin_s:.1f} s" + (
        f"; seconds of compiling: {kernels}" if kernels else ""
    )


def make_publisher(settings: EventSettings) -> "EventPublisher | None":
    """Make the publisher of events, bound to its addresses; None if there is no endpoint.

    Raises InvalidArgumentError.
    """
    if settings.endpoint is None:
        return None
    try:
        from kvblocks.wire import EventPublisher as Made
    except ImportError as error:  # the error says which package is missing, and how to get it
        raise InvalidArgumentError(f"{name_of(settings, 'endpoint')}: {error}") from error
    return Made(settings.endpoint, settings.replay, topic=settings.topic, allow_remote=settings.allow_remote)


@contextlib.contextmanager
def make_recorder(settings: ServerSettings, cache: CacheSettings) -> Iterator[TraceRecorder | None]:
    """Context manager for the recorder of requests, or None.

    Raises InvalidArgumentError if its file can't be written.
    """
    if settings.record is None:
        yield None
        return
    with contextlib.closing(TraceRecorder(settings.record, cache.block_size)) as recorder:
        yield recorder


def model_name(model: str) -> str:
    """Return the name that a model is served under: a known model's own name, else the name of its folder."""
    return Path(model).name or model


class KVBlocksServer(uvicorn.Server):
    """uvicorn's server. After SIGTERM, Ctrl-C or the end of its terminal, running requests have the grace period to
    finish, and then fail.

    The tiers get the rest of the grace period to store blocks. A second signal fails requests at once, and drops stores
    that haven't begun. on_ready: called with the URL when the server listens.
    """

    def __init__(self, service: Service, model: str, on_ready: Callable[[str], None] = lambda _: None) -> None:
        self._service = service
        self._on_ready = on_ready
        self.has_died = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        settings = service.settings
        config = uvicorn.Config(
            make_app(service, model),
            log_level=settings.log_level,
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            http=bounded(count_connections(settings.max_connections), settings.callers),
            backlog=ACCEPTED_AT_ONCE,
            # The service fails unfinished requests after the grace period. This limit is for those that still hang.
            timeout_graceful_shutdown=int(settings.grace_s) + 5,
        )
        super().__init__(config)
        service.thread.on_death = self._die

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._event_loop = asyncio.get_running_loop()
        log_shortage_seldom(self._event_loop)
        try:
            await super().startup(sockets)
        except OSError as error:  # the address was free when it was bound, but somebody has begun to listen there since
            await self.lifespan.shutdown()
            raise KVBlocksError(f"expected an address that nobody listens at, got an error: {error}") from error
        for listener in sockets or []:
            listener.listen(MAX_WAITING)  # asyncio takes `backlog` for both; that of the socket can be set again
            host, port = listener.getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which knows nothing of SIGHUP. One that is ignored, as nohup has it, stays so."""
        with super().capture_signals():
            is_main = threading.current_thread() is threading.main_thread()
            if _SIGHUP is None or not is_main or signal.getsignal(_SIGHUP) is not signal.SIG_DFL:
                yield
                return
            signal.signal(_SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(_SIGHUP, signal.SIG_DFL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second call stops without a grace period, but not if the terminal's end is told twice.

        Called in the main thread, between two instructions.
        """
        del frame
        if not self.should_exit:
            self.stop(self._service.settings.grace_s)
        elif sig != _SIGHUP:
            self.stop(0.0)

    def stop(self, grace_s: float) -> None:
        """Take no more requests, and fail those that are unfinished after `grace_s` seconds.

        Any thread may call this.
        """
        self._service.begin_stop(grace_s)
        self.should_exit = True
        if self._event_loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no request is left to fail
                self._event_loop.call_soon_threadsafe(self._event_loop.call_later, grace_s, self._service.fail_all)

    def _die(self) -> None:
        """Stop because the engine's thread has died; the exit status says so."""
        self.has_died = True
        self.stop(grace_s=0.0)


def bind(settings: ServerSettings) -> socket.socket:
    """Return a socket bound to the address of the settings.

    Raises InvalidArgumentError if that is no address of this machine, and KVBlocksError if it is in use.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        if listener is not None:
            listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE  # so it may be free later
        raise (KVBlocksError if in_use else InvalidArgumentError)(
            f"expected a free address of this machine, got {settings.host} port {settings.port}: {error}"
        ) from error
    return listener


def serve(
    load: Callable[[], LoadedModel],
    model: str,
    cache: CacheSettings,
    settings: ServerSettings,
    say: Callable[[str], None],
    events: EventSettings = NO_EVENTS,
) -> None:
    """Serve a model until SIGTERM, Ctrl-C or the end of its terminal.

    load: returns the model; called once the addresses are known to be free. say: called with readable lines about the
    progress. Raises what loading and the engine raise, InvalidArgumentError if this process may open too few files, and
    KVBlocksError if the engine's thread died.
    """
    # Else all texts would share one pool of threads, one a core, and short texts would wait for long ones.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logging(settings.log_level)
    most_connections = count_connections(settings.max_connections)
    with (
        bind(settings) as listener,
        make_publisher(events) or contextlib.nullcontext() as publisher,
        make_recorder(settings, cache) as recorder,
    ):
        engine = make_engine(load(), cache, publisher)
        manager = engine.manager
        say(
            f"KV cache: {counted(manager.num_blocks, 'block')} of {counted(manager.block_size, 'token')}; prompt and"
            f" answer of a request may have {counted(engine.scheduler.max_request_tokens, 'token')} together"
        )
        for line in [] if engine.offload is None else engine.offload.describe():
            say(line)
        if most_connections < settings.max_connections:
            most = counted(most_connections, "connection")
            say(f"at most {most}, since this process may open so few files: see ulimit -n")
        if publisher is not None:
            where = (
                "" if publisher.replay_endpoint is None else f", replays and snapshots at {publisher.replay_endpoint}"
            )
            say(f"events at {publisher.endpoint}{where}")
        if cache.warms_up_on(engine.model.device):
            say(warm_up(engine))
        if recorder is not None:
            say(f"requests are recorded in {settings.record}, without their texts")
        keep_reasons = cache.num_history_blocks > 0
        service = Service(engine, settings, keep_reasons=keep_reasons, publisher=publisher, recorder=recorder)
        name = settings.model_names[0] if settings.model_names else model_name(model)
        service.prepare_forms()
        freeze_collector()
        server = KVBlocksServer(service, name, lambda url: say(f"serving {name} at {url}/v1"))
        try:
            server.run(sockets=[listener])
        finally:
            if not service.thread.is_alive:  # the thread closes the engine when it ends, but it may never have begun
                engine.close(0.0)
    if server.has_died:
        raise KVBlocksError("the engine's thread has died: see the log above")
