"""The server's own metrics for Prometheus, in addition to the cache's: outcomes, tokens, and times to first token."""

import asyncio
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvblocks.engine.engine import Engine
from kvblocks.engine.prometheus import (
    GateCollector,
    KVBlocksCollector,
    OffloadCollector,
    RememberedCollector,
    StateCollector,
)
from kvblocks.replay.recorder import TraceRecorder
from kvblocks.server.tenant_usage import TenantUsage

if TYPE_CHECKING:
    from kvblocks.wire import EventPublisher

PAGE_S = 1.0
"""For how many seconds a page of metrics is shown to all who ask, before a new one is made."""

_PREFIX = "kvblocks_server"
_TTFT_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class RequestOutcome(Enum):
    """How a request ended. CANCELLED: the client disconnected. REFUSED: there was no room for it.

    REJECTED: the request was wrong. FAILED: the request was correct, but got no answer.
    """

    FINISHED = "finished"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    REFUSED = "refused"
    REJECTED = "rejected"


class ServiceMetrics:
    """The metrics of one server, in a registry of its own. Owned by the event loop.

    No series names a tenant, unless `show_tenants` was called.
    """

    def __init__(
        self,
        engine: Engine,
        num_open: Callable[[], int],
        publisher: "EventPublisher | None" = None,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self._page: asyncio.Task[bytes] | None = None
        self._page_s = 0.0  # when it was begun
        registry = self._registry = CollectorRegistry()
        if publisher is not None:
            registry.register(_Events(publisher))
        if recorder is not None:
            registry.register(_Recorded(recorder))
        KVBlocksCollector(engine.metrics, registry=registry)
        if engine.offload is not None:
            OffloadCollector(engine.offload, registry=registry)
        if engine.scheduler.remembered is not None:
            RememberedCollector(engine.scheduler.remembered, registry=registry)
        if engine.scheduler.entrance.gate is not None:
            GateCollector(engine.scheduler.entrance, registry=registry)
        if engine.model.config.has_states:
            StateCollector(engine.manager, registry=registry)
        self._outcomes = Counter(f"{_PREFIX}_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        for outcome in RequestOutcome:
            self._outcomes.labels(outcome.value)
        self._tokens = Counter(f"{_PREFIX}_generated_tokens", "Tokens generated for open requests.", registry=registry)
        about = "From a request's arrival to its first token."
        self._ttft = Histogram(f"{_PREFIX}_ttft_seconds", about, buckets=_TTFT_BOUNDS, registry=registry)
        scheduler = engine.scheduler
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "open_answers": ("Answers that are unfinished, running or waiting.", num_open),
            "running": ("Sequences that hold blocks.", lambda: len(scheduler.running)),
            "waiting": ("Requests that wait for blocks.", lambda: len(scheduler.waiting)),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"{_PREFIX}_{name}", text, registry=registry).set_function(read)

    def show_tenants(self, usage: TenantUsage) -> None:
        """From now on, also have series by tenant."""
        self._registry.register(_Tenants(usage))

    def count(self, outcome: RequestOutcome) -> None:
        """Count a request that has ended."""
        self._outcomes.labels(outcome.value).inc()

    def count_token(self) -> None:
        """Count a generated token."""
        self._tokens.inc()

    def note_first_token(self, seconds: float) -> None:
        """Note how long a request waited for its first token."""
        self._ttft.observe(seconds)

    def counts(self) -> dict[str, int]:
        """Return how many requests had each outcome."""
        samples = next(iter(self._outcomes.collect())).samples
        return {s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total")}

    async def page(self) -> bytes:
        """Return all metrics in Prometheus' text format, as of at most PAGE_S seconds ago.

        A page is made on a thread, and shared by all who ask until it is that old.
        """
        now = time.monotonic()
        if self._page is None or (self._page.done() and now - self._page_s >= PAGE_S):
            self._page_s = now
            self._page = asyncio.create_task(asyncio.to_thread(generate_latest, self._registry))
        return await asyncio.shield(self._page)


class _Tenants(Collector):
    """Metrics by tenant: those of the keys, and one for all others."""

    def __init__(self, usage: TenantUsage) -> None:
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families as of about a second ago."""
        latest = self._usage.latest
        families: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
            (CounterMetricFamily, "requests", "num_requests", "Prompts that were computed."),
            (CounterMetricFamily, "prompt_tokens", "num_prompt_tokens", "Their tokens."),
            (CounterMetricFamily, "cached_tokens", "num_cached_tokens", "Tokens that needed no computing."),
            (CounterMetricFamily, "evicted_blocks", "num_evicted_blocks", "Blocks that were evicted."),
            (GaugeMetricFamily, "held_blocks", "num_held_blocks", "Blocks that are cached."),
            (GaugeMetricFamily, "pinned_blocks", "num_pinned_blocks", "Blocks that pins hold."),
        )
        for family, name, field, text in families:
            about = f"{text} By tenant; empty: all clients without one."
            metric = family(f"kvblocks_tenant_{name}", about, labels=["tenant"])
            for tenant, values in latest.items():
                metric.add_metric([tenant], values[field])
            yield metric


class _Recorded(Collector):
    """Metrics of the recorder: requests recorded, and lost."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of now."""
        of = self._recorder
        yield CounterMetricFamily("kvblocks_recorded_requests", "Requests written to the record.", of.num_recorded)
        text = "Requests that could not be written to the record, since the disk was full for example."
        yield CounterMetricFamily("kvblocks_unrecorded_requests", text, of.num_lost)


class _Events(Collector):
    """Metrics of the publisher: batches of events sent, dropped and queued, and replays."""

    def __init__(self, publisher: "EventPublisher") -> None:
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of now."""
        of = self._publisher
        yield CounterMetricFamily("kvblocks_event_batches_sent", "Batches of events that were sent.", of.num_sent)
        text = "Batches of events that were not sent, since too much waited; consumers see a gap."
        yield CounterMetricFamily("kvblocks_event_batches_dropped", text, of.num_dropped)
        yield GaugeMetricFamily(
            "kvblocks_event_batches_queued", "Batches of events that wait to be sent.", of.num_queued
        )
        text = "Replays and snapshots that consumers asked for."
        yield CounterMetricFamily("kvblocks_event_requests", text, of.num_requests)
