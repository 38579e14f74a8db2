"""The workers' own accounts, added up: how much of what was computed has been captured, and where the rest went.

A worker's report counts from the worker's start, so the newest replaces the one before. A report in which any count
has fallen comes from another process under the same id: then the last one is kept for good and the new one starts
beside it, as with any counter that was reset. So no sum but `pending` ever falls, and metrics may call them counters.
An account outlives its instance, and an instance that comes back (a new ring, a new connection) goes on with its own.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from lmcache_qprotocol.messages import RequestCoverage, WorkerReport
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.qstore.instance import InstanceId
from lmcache_qserver.status_report import (
    CoverageReport,
    FeatureReport,
    RecentRequestReport,
    RequestsReport,
)

RECENT_WORKERS = 16
"""Workers, heard of last, of which the summary tells ended requests one by one."""
ACCOUNTS_KEPT = 4096
"""Accounts that are kept apart; older ones are added up and can't be told from a restarted worker's any more."""


@dataclass(slots=True)
class _Sum:
    computed: int = 0
    captured: int = 0
    pending: int = 0
    waited_ms: int = 0
    lost: Counter[LossReason] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def add(self, report: WorkerReport) -> None:
        self.computed += report.computed
        self.captured += report.captured
        self.pending += report.pending
        self.waited_ms += report.waited_ms
        self.lost.update(report.lost)
        self.requests.update(msgspec.to_builtins(report.requests))

    def join(self, other: _Sum) -> None:
        """Add another sum."""
        self.computed += other.computed
        self.captured += other.captured
        self.pending += other.pending
        self.lost.update(other.lost)
        self.requests.update(other.requests)
        self.waited_ms += other.waited_ms

    def lost_by_reason(self) -> dict[str, int]:
        """Every reason, for `summary`."""
        return {reason.value: self.lost[reason] for reason in LossReason}

    def tokens(self) -> FeatureReport:
        """Its tokens, for `summary`."""
        return FeatureReport(
            computed=self.computed,
            captured=self.captured,
            pending=self.pending,
            lost=self.lost_by_reason(),
        )

    def copy(self) -> _Sum:
        """A sum of its own."""
        return replace(self, lost=self.lost.copy(), requests=self.requests.copy())


def _has_fallen(last: WorkerReport, report: WorkerReport) -> bool:
    """Whether any count since the worker's start is lower than before."""
    before, after = last.requests, report.requests
    return (
        report.computed < last.computed
        or report.captured < last.captured
        or report.waited_ms < last.waited_ms
        or any(report.lost.get(reason, 0) < count for reason, count in last.lost.items())
        or (
            after.whole < before.whole or after.partial < before.partial or after.none < before.none
        )
    )


class _Last(NamedTuple):
    """The last report of an instance, and what it stores."""

    feature: str
    report: WorkerReport


class Coverage:
    """Last report of every worker, dead or alive."""

    def __init__(self) -> None:
        self._last: OrderedDict[InstanceId, _Last] = OrderedDict()  # heard of last at the end
        self._settled: dict[str, _Sum] = {}

    def note(self, instance_id: InstanceId, report: WorkerReport, feature: str) -> None:
        """A report has come in.

        Args:
            feature: what the instance stores.
        """
        last = self._last.pop(instance_id, None)
        if last is not None and (last.feature != feature or _has_fallen(last.report, report)):
            self._settle(last)
        self._last[instance_id] = _Last(feature, report)
        if len(self._last) > ACCOUNTS_KEPT:
            self._settle(self._last.popitem(last=False)[1])

    def _settle(self, last: _Last) -> None:
        self._settled.setdefault(last.feature, _Sum()).add(last.report)

    def summary(self) -> CoverageReport:
        """Tokens and requests of all workers; a token counts once for each feature that an engine captures."""
        sums = {feature: settled.copy() for feature, settled in self._settled.items()}
        for last in self._last.values():
            sums.setdefault(last.feature, _Sum()).add(last.report)
        total = _Sum()
        for one in sums.values():
            total.join(one)
        return CoverageReport(
            computed=total.computed,
            captured=total.captured,
            pending=total.pending,
            lost=total.lost_by_reason(),
            features={feature: sums[feature].tokens() for feature in sorted(sums)},
            waited_s=total.waited_ms / 1000,
            requests=RequestsReport(
                whole=total.requests["whole"],
                partial=total.requests["partial"],
                none=total.requests["none"],
            ),
            recent_requests=self._recent(),
        )

    def _recent(self) -> dict[str, list[RecentRequestReport]]:
        heard_last = itertools.islice(reversed(self._last.items()), RECENT_WORKERS)
        return {
            str(instance_id): [_recent_request(one) for one in last.report.recent]
            for instance_id, last in heard_last
            if last.report.recent
        }


def _recent_request(one: RequestCoverage) -> RecentRequestReport:
    lost = {reason.value: tokens for reason, tokens in one.lost.items()}
    return RecentRequestReport(
        request_id=one.request_id, computed=one.computed, captured=one.captured, lost=lost
    )
