from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from lmcache_qprotocol.errors import ErrorCode
from lmcache_qprotocol.operations import OPERATIONS
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.events import EventBus, StoreEnd, StoreStart, StoreSubmitted
from lmcache_qserver.face.metrics import StoreMetrics
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline, register_small_ring
from lmcache_qserver.testing.daemon import running_daemon

WHO: dict[str, Any] = {"session": "s", "instance_id": 1, "model_name": "m##query"}
PER_STATE = {
    "lmcache_qserver_pool_bytes",
    "lmcache_qserver_build_info",
    "lmcache_qserver_uptime_seconds",
}
"""Not 0 at the start."""


def test_every_series_is_there_at_zero_from_the_start() -> None:
    with running_daemon() as daemon:
        metrics = daemon.metrics()
        expected = {
            "lmcache_mp_store_submitted_total",
            "lmcache_mp_store_started_total",
            "lmcache_mp_store_bytes_total",
            "lmcache_mp_store_seconds_count",
            "lmcache_mp_store_seconds_sum",
            *(
                f'lmcache_mp_store_finished_total{{result="{result}"}}'
                for result in ("stored", "duplicate", "refused")
            ),
            *(
                f'lmcache_mp_store_chunks_total{{outcome="{outcome}"}}'
                for outcome in ("stored", "duplicate", *(one.value for one in LossReason))
            ),
            *(
                f'lmcache_qserver_requests_total{{code="{code}",operation="{operation.name}"}}'
                for operation in OPERATIONS
                for code in ("ok", *(one.value for one in ErrorCode))
            ),
            *(f'lmcache_qserver_worker_tokens_lost{{reason="{one.value}"}}' for one in LossReason),
            *(
                f'lmcache_qserver_worker_tokens{{outcome="{outcome}"}}'
                for outcome in ("computed", "captured", "pending")
            ),
            *(
                f"lmcache_qserver_{name}"
                for name in (
                    "instances",
                    "leases",
                    "leased_bytes",
                    "clients",
                    "sessions",
                    "lifelines",
                    "hung_lanes",
                    "pool_slots",
                    "pool_evictions_total",
                    "messages_unanswerable_total",
                    "failures_silenced_total",
                    "answers_undeliverable_total",
                    "lifeline_refused_peers_total",
                    "lifeline_refused_packets_total",
                )
            ),
        }
        assert expected - set(metrics) == set()
        not_zero = {name.partition("{")[0] for name, value in metrics.items() if value}
        assert not_zero <= PER_STATE
        assert metrics['lmcache_qserver_pool_bytes{state="free"}'] == 64 << 20
        with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
            lifeline.attach(client.hello().session)
            register_small_ring(client, lifeline, 1, 256)
            after = daemon.metrics()
        assert set(after) == set(metrics), "work adds no series"
        assert after["lmcache_qserver_instances"] == 1
        assert after["lmcache_qserver_lifelines"] == 1
        assert after['lmcache_qserver_requests_total{code="ok",operation="register_q_cache"}'] == 1


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

    assert value("submitted_total") == 1
    assert value("started_total") == 1
    assert [value("finished_total", result=one) for one in ("stored", "duplicate", "refused")] == [
        1,
        1,
        1,
    ]
    assert value("chunks_total", outcome="stored") == 3
    assert value("chunks_total", outcome="duplicate") == 4
    assert value("chunks_total", outcome="pool_full") == 4
    assert value("bytes_total") == 150
    assert value("seconds_count") == 3
    assert value("seconds_sum") == 0.25
