"""Prometheus metrics: what stores did (from the event bus), and what there is now (read at each scrape).

Names: `lmcache_mp_store_*` for the MP_STORE events, `lmcache_qserver_*` for the rest. Every series is there at 0 from
the start, and every label takes its values from a closed set: no instance, model, client or salt is ever a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver import installed_version
from lmcache_qserver.events import Event, EventBus, StoreEnd, StoreSubmitted
from lmcache_qserver.face.status import ServerState
from lmcache_qserver.wire.counts import WireCounts

SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)


class StoreMetrics:
    """Counts the events of the bus."""

    def __init__(self, bus: EventBus, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._submitted = Counter(
            "lmcache_mp_store_submitted", "Stores that passed their checks.", registry=registry
        )
        self._started = Counter(
            "lmcache_mp_store_started", "Stores whose turn has come.", registry=registry
        )
        self._finished = Counter(
            "lmcache_mp_store_finished",
            "Stores that are over; refused if any chunk was, duplicate if all were there before.",
            ["result"],
            registry=registry,
        )
        self._chunks = Counter(
            "lmcache_mp_store_chunks",
            "Chunks of finished stores, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "lmcache_mp_store_bytes", "Bytes of chunks stored.", registry=registry
        )
        self._seconds = Histogram(
            "lmcache_mp_store_seconds",
            "From submitted to finished.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        for result in ("stored", "duplicate", "refused"):
            self._finished.labels(result)
        for outcome in ("stored", "duplicate", *(reason.value for reason in LossReason)):
            self._chunks.labels(outcome)
        bus.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, StoreSubmitted):
            self._submitted.inc()
        elif isinstance(event, StoreEnd):
            self._note_end(event)
        else:
            self._started.inc()

    def _note_end(self, event: StoreEnd) -> None:
        self._finished.labels(_result(event)).inc()
        self._chunks.labels("stored").inc(event.stored)
        self._chunks.labels("duplicate").inc(event.duplicate)
        for reason, chunks in event.refused.items():
            self._chunks.labels(reason.value).inc(chunks)
        self._bytes.inc(event.nbytes)
        self._seconds.observe(event.seconds)


def _result(event: StoreEnd) -> str:
    if event.refused or not (event.stored or event.duplicate):
        return "refused"
    return "stored" if event.stored else "duplicate"


class ServerMetrics(Collector):
    """What there is now.

    Args:
        lifelines: number of open lifeline connections.
    """

    def __init__(
        self, state: ServerState, counts: WireCounts, lifelines: Callable[[], int]
    ) -> None:
        self._state = state
        self._counts = counts
        self._lifelines = lifelines

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        yield _gauges("build_info", "The release.", "version", {installed_version(): 1})
        yield _gauge(
            "uptime_seconds", "Seconds since the start.", self._state.clock() - self._state.started
        )
        yield from self._of_pool()
        yield from self._of_store()
        yield from self._of_wire()

    def _of_pool(self) -> Iterator[Metric]:
        usage = self._state.pool.usage()
        states = {
            "free": usage.free_bytes,
            "reserved": usage.reserved_bytes,
            "committed": usage.committed_bytes,
            "leased": usage.leased_bytes,
        }
        yield _gauges(
            "pool_bytes", "Bytes of the pool; the states add up to its size.", "state", states
        )
        yield _gauge(
            "pool_padding_bytes", "Bytes of the pool that round slots up.", usage.padding_bytes
        )
        yield _gauge("pool_slots", "Slots that are in use.", usage.slots)
        yield _counter("pool_evictions", "Slots evicted to make room.", usage.evictions)
        yield _counter("pool_evicted_bytes", "Bytes of them.", usage.evicted_bytes)

    def _of_store(self) -> Iterator[Metric]:
        report = self._state.module.report_status()
        coverage, leases, lanes = report["coverage"], report["leases"], report["lanes"]
        tokens = {outcome: coverage[outcome] for outcome in ("computed", "captured", "pending")}
        yield _gauge("instances", "Workers that are registered.", len(report["registered_q_ids"]))
        yield _gauge("leases", "Leases of readers.", leases["count"])
        yield _gauge("leased_bytes", "Bytes under lease, counted once per lease.", leases["bytes"])
        yield _counter(
            "leases_expired", "Leases that ended because their time was over.", leases["expired"]
        )
        yield _gauge(
            "hung_lanes",
            "Copies that hang, of workers that are there or have gone.",
            sum(lanes.values()),
        )
        yield _gauges("worker_tokens", "Tokens as the workers account for them.", "outcome", tokens)
        yield _gauges(
            "worker_tokens_lost", "Tokens computed and not stored.", "reason", coverage["lost"]
        )
        yield _gauges(
            "worker_requests",
            "Requests that have ended, by how much was captured of what they computed.",
            "coverage",
            coverage["requests"],
        )

    def _of_wire(self) -> Iterator[Metric]:
        counts, clients = self._counts, self._state.clients
        yield _gauge("clients", "Clients by routing identity.", len(clients))
        yield _gauge("sessions", "Clients that said hello.", clients.sessions)
        yield _gauge("lifelines", "Open lifeline connections.", self._lifelines())
        requests = CounterMetricFamily(
            "lmcache_qserver_requests",
            "Requests, by operation and ok or error code.",
            labels=["operation", "code"],
        )
        for labels, count in counts.requests.items():
            requests.add_metric(labels, count)
        yield requests
        yield _counter(
            "messages_unanswerable",
            "Messages without the frames of an answer.",
            counts.unanswerable,
        )
        yield _counter(
            "failures_silenced", "Failures that a legacy client can't be told of.", counts.silenced
        )
        yield _counter(
            "answers_undeliverable",
            "Answers whose client had gone or did not read.",
            counts.undeliverable,
        )
        yield _counter(
            "lifeline_refused_peers", "Connections refused.", counts.lifeline_refused_peers
        )
        yield _counter(
            "lifeline_refused_packets", "Packets refused.", counts.lifeline_refused_packets
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lmcache_qserver_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """One gauge per value of a label."""
    family = GaugeMetricFamily(f"lmcache_qserver_{name}", text, labels=[label])
    for label_value, number in values.items():
        family.add_metric([label_value], number)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"lmcache_qserver_{name}", text, value=value)
