"""Prometheus metrics: what stores did (from the event bus), and what there is now (read at each scrape).

Names: `lmcache_mp_store_*` for the MP_STORE events, `lmcache_qserver_*` for the rest, in base units. Every series is
there at 0 from the start, and every label takes its values from a closed set: no instance, model, client or salt is
ever a label. docs/metrics.md is made from this file: after a change, `python docs/generate_metrics.py`.

Workers count from their own start and tell the newest number, so their sums are counters here: a worker that starts
again goes on from where the one before has ended (qstore/coverage.py). A server that starts again hears the full
numbers of workers that went on, which looks like one step up; ratios of two such counters are right at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from lmcache_qprotocol.errors import ErrorCode
from lmcache_qserver import installed_version
from lmcache_qserver.events import Event, EventBus, StoreEnd, StoreSubmitted
from lmcache_qserver.face.families import counter, counters, gauge, gauges
from lmcache_qserver.face.status import ServerState
from lmcache_qserver.face.tier_metrics import tier_metrics
from lmcache_qserver.qstore.totals import SERVER_REASONS
from lmcache_qserver.status_report import (
    ChecksumsReport,
    CoverageReport,
    ReadsReport,
    StoreReport,
)
from lmcache_qserver.wire.counts import WireCounts

STORE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
RESULTS = ("stored", "duplicate", "refused")


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
        self._refused = Counter(
            "lmcache_mp_store_refused_chunks",
            "Chunks of finished stores that were refused, by reason.",
            ["reason"],
            registry=registry,
        )
        self._bytes = Counter(
            "lmcache_mp_store_bytes", "Bytes of chunks stored.", registry=registry
        )
        self._seconds = Histogram(
            "lmcache_mp_store_seconds",
            "From submitted to finished.",
            buckets=STORE_BUCKETS_S,
            registry=registry,
        )
        for result in RESULTS:
            self._finished.labels(result)
            self._chunks.labels(result)
        for reason in SERVER_REASONS:
            self._refused.labels(reason.value)
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
        self._chunks.labels("refused").inc(sum(event.refused.values()))
        for reason, chunks in event.refused.items():
            self._refused.labels(reason.value).inc(chunks)
        self._bytes.inc(event.nbytes)
        self._seconds.observe(event.seconds)


def _result(event: StoreEnd) -> str:
    if event.refused or not (event.stored or event.duplicate):
        return "refused"
    return "stored" if event.stored else "duplicate"


def loop_lag_histogram(registry: CollectorRegistry) -> Histogram:
    """What `LoopLag` observes."""
    return Histogram(
        "lmcache_qserver_loop_lag_seconds",
        "How late the event loop woke a timer, looked at twice a second.",
        buckets=LAG_BUCKETS_S,
        registry=registry,
    )


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
        report = self._state.module.report()
        yield gauges("build_info", "The release.", "version", {installed_version(): 1})
        yield gauge("ready", "1 when /readyz says so.", not self._state.why_not_ready())
        yield from _of_pool(report)
        yield from _of_stores(report)
        yield from _of_checksums(report.checksums)
        yield from _of_reads(report.reads)
        yield from _of_leases(report)
        yield from _of_instances(report)
        yield from _of_workers(report.coverage)
        yield from tier_metrics(report.l2)
        yield from self._of_wire()

    def _of_wire(self) -> Iterator[Metric]:
        counts, clients = self._counts, self._state.clients
        yield gauge("clients", "Clients by routing identity.", len(clients))
        yield gauge("sessions", "Clients that said hello.", clients.sessions)
        yield gauge("lifelines", "Open lifeline connections.", self._lifelines())
        requests = CounterMetricFamily(
            "lmcache_qserver_requests",
            "Requests, by operation and ok or error code.",
            labels=["operation", "code"],
        )
        for labels, count in counts.requests.items():
            requests.add_metric(labels, count)
        yield requests
        yield counter(
            "messages_unanswerable",
            "Messages without the frames of an answer.",
            counts.unanswerable,
        )
        yield counter(
            "failures_silenced", "Failures that a legacy client can't be told of.", counts.silenced
        )
        yield counter(
            "answers_undeliverable",
            "Answers whose client had gone or did not read.",
            counts.undeliverable,
        )
        yield counter(
            "lifeline_refused_peers",
            "Connections to the lifeline refused.",
            counts.lifeline_refused_peers,
        )
        yield counter(
            "lifeline_refused_packets",
            "Packets on the lifeline refused.",
            counts.lifeline_refused_packets,
        )


def server_registry(
    bus: EventBus, state: ServerState, counts: WireCounts, lifelines: Callable[[], int]
) -> tuple[CollectorRegistry, Histogram]:
    """All that /metrics shows, and the histogram of the loop's lag, which its probe fills."""
    registry = CollectorRegistry()
    StoreMetrics(bus, registry)
    lag = loop_lag_histogram(registry)
    registry.register(ServerMetrics(state, counts, lifelines))
    ProcessCollector(registry=registry)  # process_start_time_seconds, process_resident_memory_bytes
    return registry, lag


def _of_pool(report: StoreReport) -> Iterator[Metric]:
    pool = report.pool
    states = {
        "free": pool.free_bytes,
        "reserved": pool.reserved_bytes,
        "committed": pool.committed_bytes,
        "leased": pool.leased_bytes,
    }
    yield gauges("pool_bytes", "Bytes of the pool; the states add up to its size.", "state", states)
    yield gauge("pool_padding_bytes", "Bytes of the pool that round slots up.", pool.padding_bytes)
    yield gauge("pool_slots", "Slots that are in use.", pool.slots)
    yield counter("pool_evictions", "Slots evicted to make room.", pool.evictions)
    yield counter("pool_evicted_bytes", "Bytes of evicted slots.", pool.evicted_bytes)


def _of_stores(report: StoreReport) -> Iterator[Metric]:
    totals, lanes = report.totals, report.lanes
    rejected = {code.value: totals.rejected_stores.get(code.value, 0) for code in ErrorCode}
    yield counters(
        "stores_rejected",
        "Stores that failed their checks: they never count as submitted.",
        "code",
        rejected,
    )
    yield counter(
        "copy_bytes",
        "Bytes that finished copies out of rings moved, proven or not.",
        totals.copied_bytes,
    )
    yield counter(
        "copy_seconds",
        "Seconds that copies out of rings took, added up over workers that copy side by side.",
        totals.copy_s,
    )
    yield counter(
        "nonfinite_objects", "Stored objects that hold NaN or Inf.", totals.nonfinite_objects
    )
    yield counter(
        "nonfinite_rows",
        "Rows (of one token in one layer) of them that do.",
        totals.nonfinite_rows,
    )
    yield gauge(
        "hung_lanes",
        "Copies that hang, of workers that are there or have gone.",
        lanes.hung + lanes.stuck_after_release,
    )


def _of_checksums(checksums: ChecksumsReport) -> Iterator[Metric]:
    yield counter("checksums_made", "Checksums of objects that were made.", checksums.made)
    yield counter(
        "checksums_verified", "Times that an object's bytes agreed with it.", checksums.verified
    )
    yield counter(
        "objects_corrupt", "Objects dropped because their bytes had changed.", checksums.corrupt
    )
    yield counter(
        "objects_unexamined",
        "Objects that could not be looked at behind their store.",
        checksums.failed,
    )
    yield gauge("checksums_waiting", "Objects that wait for their checksum.", checksums.waiting)


def _of_reads(reads: ReadsReport) -> Iterator[Metric]:
    yield counters("hits", "Objects that readers asked for and found.", "operation", reads.hits)
    misses = CounterMetricFamily(
        "lmcache_qserver_misses",
        "Chunks that readers asked for in vain, and gaps within a chunk, by reason.",
        labels=["operation", "reason"],
    )
    for operation, reasons in reads.misses.items():
        for reason, count in reasons.items():
            misses.add_metric([operation, reason], count)
    yield misses
    yield counter("retrieved_chunks", "Objects leased to readers.", reads.retrieved_chunks)
    yield counter("retrieved_bytes", "Bytes of objects leased to readers.", reads.retrieved_bytes)
    yield counter(
        "retrieves_capped",
        "Retrieves that were cut off, because the reader held as much as it may.",
        reads.capped,
    )


def _of_leases(report: StoreReport) -> Iterator[Metric]:
    leases = report.leases
    yield gauge("leases", "Leases of readers.", leases.count)
    yield gauge("leased_bytes", "Bytes under lease, counted once per lease.", leases.bytes)
    yield counter(
        "leases_expired", "Leases that ended because their time was over.", leases.expired
    )


def _of_instances(report: StoreReport) -> Iterator[Metric]:
    rings = report.rings
    yield gauge("instances", "Workers that are registered.", len(report.registered_q_ids))
    yield counter(
        "instances_registered",
        "Registrations of workers; those that only refresh do not count.",
        report.instances.registered,
    )
    yield counters(
        "instances_released",
        "Workers released, by cause; reaped: it was silent for too long.",
        "cause",
        report.instances.released,
    )
    yield gauge("ring_blocks", "Ring blocks of all registered workers.", rings.blocks)
    yield gauge(
        "ring_used_blocks", "Ring blocks in use, as registered workers last reported.", rings.used
    )
    yield gauge(
        "ring_high_water_blocks",
        "Most ring blocks ever in use, added up over registered workers.",
        rings.high_water,
    )
    yield gauge(
        "ring_high_water_ratio",
        "The largest part of its ring that any registered worker has ever used, 0 to 1.",
        rings.highest_ratio,
    )


def _of_workers(coverage: CoverageReport) -> Iterator[Metric]:
    requests = coverage.requests
    yield counter("worker_tokens_computed", "Tokens that workers computed.", coverage.computed)
    yield counter(
        "worker_tokens_captured",
        "Tokens that workers computed and that are stored.",
        coverage.captured,
    )
    yield counters(
        "worker_tokens_lost",
        "Tokens that workers computed and that are not stored, by reason.",
        "reason",
        coverage.lost,
    )
    yield gauge(
        "worker_tokens_pending",
        "Tokens that workers computed, in open chunks and stores under way.",
        coverage.pending,
    )
    yield counters(
        "worker_requests",
        "Requests that have ended, by how much was captured of what they computed.",
        "coverage",
        {"whole": requests.whole, "partial": requests.partial, "none": requests.none},
    )
    yield counter(
        "worker_ring_wait_seconds",
        "Seconds that engines waited for ring blocks; see lmcache.q.on_full.",
        coverage.waited_s,
    )
