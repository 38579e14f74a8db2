"""Every series is there from the start, none is ever added, and each counts what it says."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RequestCounts, StoreOutcome, StoreProof, WorkerReport
from lmcache_qprotocol.operations import OPERATIONS
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qserver.events import EventBus, StoreEnd, StoreStart, StoreSubmitted
from lmcache_qserver.face.metrics import StoreMetrics
from lmcache_qserver.qstore.release_cause import ReleaseCause
from lmcache_qserver.testing.bare_client import BareClient
from lmcache_qserver.testing.daemon import running_daemon, wait_until
from tests.server.face.wire_session import OBJECT_BYTES, TOKENS, wire_session

WHO: dict[str, Any] = {"session": "s", "instance_id": 1, "model_name": "m##query"}
PER_STATE = {
    "lmcache_qserver_pool_bytes",
    "lmcache_qserver_build_info",
    "lmcache_qserver_ready",
    "lmcache_qserver_loop_lag_seconds_bucket",
    "lmcache_qserver_loop_lag_seconds_count",
    "lmcache_qserver_loop_lag_seconds_sum",
}
"""Not 0 at the start."""
QSERVER = "lmcache_qserver_"
CODES = [code.value for code in ErrorCode]
CHUNK = range(TOKENS)


def series(name: str, label: str, values: list[str]) -> set[str]:
    return {f'{name}{{{label}="{value}"}}' for value in values}


def expected() -> set[str]:
    results = ["stored", "duplicate", "refused"]
    plain = [
        "instances",
        "leases",
        "leased_bytes",
        "clients",
        "sessions",
        "lifelines",
        "hung_lanes",
        "pool_slots",
        "pool_padding_bytes",
        "ready",
        "pool_evictions_total",
        "pool_evicted_bytes_total",
        "leases_expired_total",
        "instances_registered_total",
        "ring_blocks",
        "ring_used_blocks",
        "ring_high_water_blocks",
        "ring_high_water_ratio",
        "worker_tokens_computed_total",
        "worker_tokens_captured_total",
        "worker_tokens_pending",
        "worker_ring_wait_seconds_total",
        "copy_bytes_total",
        "copy_seconds_total",
        "retrieved_chunks_total",
        "retrieved_bytes_total",
        "retrieves_capped_total",
        "loop_lag_seconds_count",
        "messages_unanswerable_total",
        "failures_silenced_total",
        "answers_undeliverable_total",
        "lifeline_refused_peers_total",
        "lifeline_refused_packets_total",
    ]
    return {
        "lmcache_mp_store_submitted_total",
        "lmcache_mp_store_started_total",
        "lmcache_mp_store_bytes_total",
        "lmcache_mp_store_seconds_count",
        "lmcache_mp_store_seconds_sum",
        *series("lmcache_mp_store_finished_total", "result", results),
        *series("lmcache_mp_store_chunks_total", "outcome", results),
        *series(
            "lmcache_mp_store_refused_chunks_total",
            "reason",
            ["pool_full", "copy_failed", "stamp_mismatch"],
        ),
        *(
            f'lmcache_qserver_requests_total{{code="{code}",operation="{operation.name}"}}'
            for operation in OPERATIONS
            for code in ("ok", *CODES)
        ),
        *series(f"{QSERVER}stores_rejected_total", "code", CODES),
        *series(f"{QSERVER}worker_tokens_lost_total", "reason", [one.value for one in LossReason]),
        *series(f"{QSERVER}worker_requests_total", "coverage", ["whole", "partial", "none"]),
        *series(f"{QSERVER}instances_released_total", "cause", [one.value for one in ReleaseCause]),
        *series(f"{QSERVER}hits_total", "operation", ["lookup_q", "retrieve_q"]),
        *(
            f'{QSERVER}misses_total{{operation="{operation}",reason="{reason.value}"}}'
            for operation in ("lookup_q", "retrieve_q")
            for reason in MissReason
        ),
        *series(f"{QSERVER}pool_bytes", "state", ["free", "reserved", "committed", "leased"]),
        *(f"{QSERVER}{name}" for name in plain),
    }


def test_every_series_is_there_at_zero_from_the_start() -> None:
    with running_daemon() as daemon:
        metrics = daemon.metrics()
    assert expected() - set(metrics) == set()
    ours = {name: value for name, value in metrics.items() if name.startswith("lmcache_")}
    assert {name.partition("{")[0] for name, value in ours.items() if value} <= PER_STATE
    assert metrics['lmcache_qserver_pool_bytes{state="free"}'] == 64 << 20
    assert metrics["lmcache_qserver_ready"] == 1
    assert metrics["process_resident_memory_bytes"] > 64 << 20


def test_events_are_counted() -> None:
    bus, registry = EventBus(), CollectorRegistry()
    StoreMetrics(bus, registry)
    bus.publish(StoreSubmitted(**WHO))
    bus.publish(StoreStart(**WHO))
    bus.publish(StoreEnd(**WHO, stored=2, duplicate=1, nbytes=100, seconds=0.25))
    bus.publish(StoreEnd(**WHO, duplicate=3))
    bus.publish(StoreEnd(**WHO, stored=1, refused={LossReason.POOL_FULL: 4}, nbytes=50))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"lmcache_mp_store_{name}", labels)

    results = ("stored", "duplicate", "refused")
    assert value("submitted_total") == 1
    assert value("started_total") == 1
    assert [value("finished_total", result=one) for one in results] == [1, 1, 1]
    assert [value("chunks_total", outcome=one) for one in results] == [3, 4, 4]
    assert value("refused_chunks_total", reason="pool_full") == 4
    assert value("bytes_total") == 150
    assert value("seconds_count") == 3
    assert value("seconds_sum") == 0.25


def test_a_session_is_counted_and_equal_to_status() -> None:
    with running_daemon(chunk_size=TOKENS) as daemon:
        with wire_session(daemon) as session:
            assert session.store(CHUNK) == StoreOutcome(stored=1)
            assert session.store(CHUNK) == StoreOutcome(duplicate=1)
            assert session.store(range(50, 50 + TOKENS), spoil=True).refused == {
                LossReason.STAMP_MISMATCH: 1
            }
            proof = StoreProof(nonces=(1,))
            with pytest.raises(RequestError):
                session.client.ask("store_q", session.key(CHUNK), "nobody", ((0,),), b"", proof)
            session.client.ask("lookup_q", session.query(range(70, 70 + TOKENS)))
            session.client.ask("lookup_q", session.query(CHUNK))
            lease = session.retrieve(CHUNK)
            assert session.retrieve(range(50, 50 + TOKENS)).lease_id == 0
            report = WorkerReport(
                computed=100,
                captured=60,
                lost={LossReason.RING_FULL: 30},
                pending=10,
                ring_blocks=8,
                ring_used=3,
                ring_high_water=6,
                requests=RequestCounts(whole=1, partial=2, none=3),
                waited_ms=1250,
            )
            session.report(report)
            wait_until(lambda: daemon.status()["totals"]["finished_stores"] == 3, "all are told")
            metrics, status = daemon.metrics(), daemon.status()
            session.client.ask("release_q", (lease.lease_id,))

        def ours(name: str) -> float:
            return metrics[QSERVER + name]

        assert metrics["lmcache_mp_store_submitted_total"] == 3
        assert metrics["lmcache_mp_store_seconds_count"] == 3
        assert metrics["lmcache_mp_store_bytes_total"] == OBJECT_BYTES
        assert metrics['lmcache_mp_store_refused_chunks_total{reason="stamp_mismatch"}'] == 1
        assert ours('stores_rejected_total{code="unknown_instance"}') == 1
        assert ours('requests_total{code="unknown_instance",operation="store_q"}') == 1
        assert ours("copy_bytes_total") == 2 * OBJECT_BYTES, "the duplicate was not copied"
        assert 0 < ours("copy_seconds_total") < 10
        assert ours('hits_total{operation="lookup_q"}') == 1
        assert ours('misses_total{operation="lookup_q",reason="not_stored"}') == 1
        assert ours('hits_total{operation="retrieve_q"}') == 1
        assert ours('misses_total{operation="retrieve_q",reason="stamp_mismatch"}') == 1
        assert (ours("retrieved_chunks_total"), ours("retrieved_bytes_total")) == (1, OBJECT_BYTES)
        assert (ours("leases"), ours("instances"), ours("lifelines")) == (1, 1, 1)
        assert (ours("ring_blocks"), ours("ring_used_blocks")) == (8, 3)
        assert (ours("ring_high_water_blocks"), ours("ring_high_water_ratio")) == (6, 0.75)
        assert ours("worker_tokens_computed_total") == 100
        assert ours("worker_tokens_captured_total") == 60
        assert ours("worker_tokens_pending") == 10
        assert ours('worker_tokens_lost_total{reason="ring_full"}') == 30
        assert ours('worker_requests_total{coverage="none"}') == 3
        assert ours("worker_ring_wait_seconds_total") == 1.25
        assert status["coverage"]["waited_s"] == 1.25
        assert status["q_context_meta"]["worker"]["ring"]["used"] == 3
        assert status["totals"]["copied_bytes"] == 2 * OBJECT_BYTES
        assert status["reads"]["hits"] == {"lookup_q": 1, "retrieve_q": 1}
        released = f'{QSERVER}instances_released_total{{cause="client_gone"}}'
        wait_until(lambda: daemon.metrics()[released] == 1, "the worker is released")
        metrics = daemon.metrics()
        assert ours("ring_blocks") == 0, "the ring of a worker that has gone is no ring any more"
        assert ours("worker_tokens_computed_total") == 100, "its tokens stay"


def test_hostile_names_add_no_series() -> None:
    """A label is never what a peer has sent."""
    names = ('evil"} 1\nlmcache_evil 1', "x" * 500, "ß🙂\u2028", "}{,=#", "\\", "..")
    with running_daemon(chunk_size=TOKENS) as daemon:
        before = daemon.get("/metrics").count("\n"), set(daemon.metrics())
        for place, name in enumerate(names):
            with wire_session(daemon, name[:256], name, name) as session:
                tokens = range(place * TOKENS, (place + 1) * TOKENS)
                assert session.store(tokens, request_id=name).stored == 1
                assert session.retrieve(tokens).chunks
                session.client.ask("lookup_q", session.query(range(1000, 1000 + TOKENS)))
                session.report(WorkerReport(computed=1, captured=0, lost={}, pending=1))
                text = daemon.get("/metrics")
                assert text.count("\n") == before[0], "while it is there"
                assert "evil" not in text
                assert "xxxx" not in text
        with BareClient(daemon.url) as client:
            client.send([b"\x01", b"\xa4evil"])
            client.send([b"\x01", b"\xcd\xff\xff"])
            undecoded = f'{QSERVER}requests_total{{code="unknown_operation",operation="undecoded"}}'
            wait_until(lambda: daemon.metrics()[undecoded] == 2, "both are counted")
        text = daemon.get("/metrics")
        assert (text.count("\n"), set(daemon.metrics())) == before
        assert "evil" not in text
        assert "xxxx" not in text


def test_openmetrics_for_who_asks_for_it() -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    with running_daemon() as daemon:
        asked = urllib.request.Request(f"{daemon.http_url}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=10) as reply:
            text = reply.read().decode()
            assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
        with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=")
    assert text.endswith("# EOF\n")
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # it has no types
    names = {family.name for family in families}
    assert {"lmcache_mp_store_submitted", "lmcache_qserver_loop_lag_seconds"} <= names
