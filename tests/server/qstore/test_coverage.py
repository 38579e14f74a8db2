"""The workers' accounts add up, across pings, new rings and restarts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmcache_qprotocol.messages import RequestCounts, RequestCoverage, WorkerReport
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.qstore import coverage
from lmcache_qserver.qstore.coverage import Coverage
from tests.server.qstore.world import World

QUERY, KEY = "transfer_query", "transfer_key"


def report(captured: int, ring_full: int = 0, pending: int = 0) -> WorkerReport:
    return WorkerReport(
        computed=captured + ring_full + pending,
        captured=captured,
        lost={LossReason.RING_FULL: ring_full} if ring_full else {},
        pending=pending,
    )


def told(accounts: Coverage) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(accounts.summary())
    return plain


def check(summary: dict[str, Any], captured: int, ring_full: int, pending: int) -> None:
    assert summary["captured"] == captured
    assert summary["pending"] == pending
    lost = summary["lost"]
    assert lost["ring_full"] == ring_full
    assert set(lost) == {reason.value for reason in LossReason}
    assert summary["computed"] == captured + pending + sum(lost.values())


async def test_the_newest_report_of_each_worker_counts(world: World) -> None:
    await world.worker(1)
    await world.worker(2, client="c2")
    world.module.ping("c1", 1, report(10, 2, 5), world.now)
    world.module.ping("c1", 1, report(20, 3), world.now)
    world.module.ping("c2", 2, report(7, 0, 1), world.now)
    world.module.ping("stranger", 2, report(10**6), world.now)
    check(world.module.report_status()["coverage"], 27, 3, 1)


async def test_the_last_report_of_a_worker_that_left_stays(world: World) -> None:
    worker = await world.worker()
    world.module.ping("c1", 1, report(10), world.now)
    await world.module.unregister_q_cache("c1", 1, report(30, 4), world.now)
    check(world.module.report_status()["coverage"], 30, 4, 0)
    await world.register(worker)
    world.module.ping("c1", 1, report(31, 4), world.now)
    check(world.module.report_status()["coverage"], 31, 4, 0)


def test_a_restarted_worker_starts_beside_its_old_account() -> None:
    accounts = Coverage()
    accounts.note(1, report(100, 5), QUERY)
    accounts.note(1, report(3), QUERY)
    check(told(accounts), 103, 5, 0)
    accounts.note(1, report(4), QUERY)
    check(told(accounts), 104, 5, 0)


def test_old_accounts_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "ACCOUNTS_KEPT", 3)
    accounts = Coverage()
    for number in range(10):
        accounts.note(number, report(1, 1, 1), QUERY)
    check(told(accounts), 10, 10, 10)
    assert len(accounts._last) == 3


def test_ended_requests_add_up_and_the_last_are_told_one_by_one() -> None:
    accounts = Coverage()
    one = RequestCoverage(request_id="r", computed=4, captured=3, lost={LossReason.RING_FULL: 1})
    counts = RequestCounts(whole=5, partial=1)
    accounts.note("w", msgspec.structs.replace(report(9, 1), requests=counts, recent=(one,)), QUERY)
    accounts.note(2, msgspec.structs.replace(report(9), requests=RequestCounts(none=2)), QUERY)
    summary = told(accounts)
    assert summary["requests"] == {"whole": 5, "partial": 1, "none": 2}
    shown = {"request_id": "r", "computed": 4, "captured": 3, "lost": {"ring_full": 1}}
    assert summary["recent_requests"] == {"w": [shown]}


def test_the_requests_of_a_few_workers_only_are_told_one_by_one() -> None:
    accounts = Coverage()
    one = RequestCoverage(request_id="r", computed=1, captured=1, lost={})
    for number in range(coverage.RECENT_WORKERS + 3):
        accounts.note(number, msgspec.structs.replace(report(1), recent=(one,)), QUERY)
    shown = told(accounts)["recent_requests"]
    assert set(shown) == {str(number) for number in range(3, coverage.RECENT_WORKERS + 3)}


@pytest.mark.parametrize(
    "fallen",
    [
        {"captured": 5, "pending": 15},
        {"lost": {LossReason.RING_FULL: 1, LossReason.PREEMPTED: 9}},
        {"lost": {LossReason.PREEMPTED: 10}},
        {"waited_ms": 499},
        {"requests": RequestCounts(whole=1, partial=9)},
        {"requests": RequestCounts(whole=9)},
    ],
)
def test_no_sum_ever_falls_when_a_worker_starts_again(fallen: dict[str, Any]) -> None:
    """Even if the new process has computed more, by its first report, than the old one had by its last."""
    accounts = Coverage()
    last = msgspec.structs.replace(
        report(10, 2), waited_ms=500, requests=RequestCounts(whole=2, partial=1)
    )
    accounts.note(1, last, QUERY)
    before = accounts.summary()
    grown = {"computed": 20, "captured": 18, "waited_ms": 600}
    accounts.note(1, msgspec.structs.replace(last, **{**grown, **fallen}), QUERY)
    after = accounts.summary()
    assert after.computed == before.computed + 20, "beside the old account, not in its place"
    assert after.captured >= before.captured
    assert after.waited_s >= before.waited_s
    assert all(after.lost[reason] >= count for reason, count in before.lost.items())
    assert after.requests.whole >= before.requests.whole
    assert after.requests.partial >= before.requests.partial


def test_what_engines_waited_adds_up() -> None:
    accounts = Coverage()
    accounts.note(1, msgspec.structs.replace(report(1), waited_ms=1500), QUERY)
    accounts.note(2, msgspec.structs.replace(report(1), waited_ms=250), QUERY)
    assert accounts.summary().waited_s == 1.75


def test_every_feature_has_an_account_of_its_own() -> None:
    accounts = Coverage()
    accounts.note("w", report(10, 1), QUERY)
    accounts.note("w##key", report(7, 4), KEY)
    accounts.note("x", report(5, 0, 2), QUERY)
    summary = told(accounts)
    check(summary, 22, 5, 2)
    assert set(summary["features"]) == {QUERY, KEY}
    check(summary["features"][QUERY], 15, 1, 2)
    check(summary["features"][KEY], 7, 4, 0)


def test_an_id_that_stores_another_feature_begins_another_account() -> None:
    accounts = Coverage()
    accounts.note("w", report(10, 1), QUERY)
    accounts.note("w", report(20), KEY)
    check(told(accounts)["features"][QUERY], 10, 1, 0)
    check(told(accounts), 30, 1, 0)
