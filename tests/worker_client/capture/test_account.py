"""What is counted for a request is counted for the worker; an ended request is told when nothing of it is pending."""

from __future__ import annotations

from lmcache_qclient.capture.account import Account
from lmcache_qprotocol.limits import MAX_NAME_CHARS, MAX_RECENT_REQUESTS
from lmcache_qprotocol.messages import RequestCounts, RequestCoverage
from lmcache_qprotocol.reasons import LossReason as Loss


def ended(account: Account, name: str, captured: int, lost: int) -> None:
    tally = account.request(name)
    tally.compute(captured + lost)
    tally.capture(captured)
    tally.lose(Loss.RING_FULL, lost)
    tally.end()


def test_a_report_leaves_zeros_out_and_adds_up() -> None:
    account = Account()
    tally = account.request("a")
    tally.compute(10)
    tally.capture(3)
    tally.lose(Loss.RING_FULL, 2)
    tally.lose(Loss.PREEMPTED, 0)
    report = account.report(9, 4, 6)
    assert (report.computed, report.captured) == (10, 3)
    assert (report.lost, report.pending) == ({Loss.RING_FULL: 2}, 5)
    assert (report.ring_blocks, report.ring_used, report.ring_high_water) == (9, 4, 6)
    assert (report.requests, report.recent) == (RequestCounts(), ())


def test_tokens_of_nobody_known_are_computed_and_lost() -> None:
    account = Account()
    account.lose_unknown(Loss.CAPTURE_DISABLED, 7)
    assert (account.computed, account.lost[Loss.CAPTURE_DISABLED], account.pending) == (7, 7, 0)


def test_an_ended_request_is_told_once_when_its_last_store_is_answered() -> None:
    account = Account()
    tally = account.request("a")
    tally.compute(8)
    tally.lose(Loss.REJECTED_DRAFT, 2)
    tally.end()
    assert (tally.pending, list(account.recent)) == (6, [])
    tally.capture(6)
    tally.capture(0)
    assert list(account.recent) == [
        RequestCoverage(request_id="a", computed=8, captured=6, lost={Loss.REJECTED_DRAFT: 2})
    ]
    assert account.report().requests == RequestCounts(partial=1)


def test_an_ended_request_whose_last_store_is_lost_is_told_too() -> None:
    account = Account()
    tally = account.request("a")
    tally.compute(8)
    tally.end()
    tally.lose(Loss.POOL_FULL, 8)
    assert account.report().requests == RequestCounts(none=1)
    assert [one.lost for one in account.recent] == [{Loss.POOL_FULL: 8}]


def test_a_request_that_has_not_ended_or_computed_nothing_is_not_told() -> None:
    account = Account()
    tally = account.request("a")
    tally.compute(4)
    tally.capture(4)
    account.request("b").end()
    assert account.report().requests == RequestCounts()


def test_requests_are_told_apart_by_how_much_was_captured() -> None:
    account = Account()
    ended(account, "whole", 4, 0)
    ended(account, "partial", 3, 1)
    ended(account, "none", 0, 4)
    assert account.report().requests == RequestCounts(whole=1, partial=1, none=1)


def test_the_report_stays_small() -> None:
    account = Account()
    for number in range(MAX_RECENT_REQUESTS + 5):
        ended(account, f"{number} " + "x" * 2 * MAX_NAME_CHARS, 1, 0)
    recent = account.report().recent
    assert [int(one.request_id.split()[0]) for one in recent] == list(
        range(5, MAX_RECENT_REQUESTS + 5)
    )
    assert {len(one.request_id) for one in recent} == {MAX_NAME_CHARS}
