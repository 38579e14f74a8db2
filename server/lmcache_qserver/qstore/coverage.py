"""The workers' own accounts, added up: how much of what was computed has been captured, and where the rest went.

A worker's report counts from the worker's start, so the newest replaces the one before. A report that counts fewer
computed tokens than the last one comes from another process under the same id: then the last one is kept for good and
the new one starts beside it, as with any counter that was reset. An account outlives its instance, and an instance that
comes back (a new ring, a new connection) goes on with its own.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmcache_qprotocol.messages import WorkerReport
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.qstore.instance import InstanceId

RECENT_WORKERS = 16
"""Workers, heard of last, of which the summary tells ended requests one by one."""
ACCOUNTS_KEPT = 4096
"""Accounts that are kept apart; older ones are added up and can't be told from a restarted worker's any more."""


@dataclass(slots=True)
class _Sum:
    computed: int = 0
    captured: int = 0
    pending: int = 0
    lost: Counter[LossReason] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def add(self, report: WorkerReport) -> None:
        self.computed += report.computed
        self.captured += report.captured
        self.pending += report.pending
        self.lost.update(report.lost)
        self.requests.update(msgspec.to_builtins(report.requests))

    def copy(self) -> _Sum:
        """A sum of its own."""
        return _Sum(
            self.computed, self.captured, self.pending, self.lost.copy(), self.requests.copy()
        )


class Coverage:
    """Last report of every worker, dead or alive."""

    def __init__(self) -> None:
        self._last: OrderedDict[InstanceId, WorkerReport] = (
            OrderedDict()
        )  # heard of last at the end
        self._settled = _Sum()

    def note(self, instance_id: InstanceId, report: WorkerReport) -> None:
        """A report has come in."""
        last = self._last.pop(instance_id, None)
        if last is not None and report.computed < last.computed:
            self._settled.add(last)
        self._last[instance_id] = report
        if len(self._last) > ACCOUNTS_KEPT:
            self._settled.add(self._last.popitem(last=False)[1])

    def summary(self) -> dict[str, Any]:
        """Tokens and requests of all workers.

        Returns:
            `computed, captured, pending, lost: {reason: tokens}`, every reason there, computed = the sum of the rest;
            `requests: {whole, partial, none}`, ended requests by how much was captured of them;
            `recent_requests: {instance id: [{request_id, computed, captured, lost}]}`, those that ended last.
        """
        total = self._settled.copy()
        for report in self._last.values():
            total.add(report)
        return {
            "computed": total.computed,
            "captured": total.captured,
            "pending": total.pending,
            "lost": {reason.value: total.lost[reason] for reason in LossReason},
            "requests": {name: total.requests[name] for name in ("whole", "partial", "none")},
            "recent_requests": self._recent(),
        }

    def _recent(self) -> dict[str, Any]:
        heard_last = itertools.islice(reversed(self._last.items()), RECENT_WORKERS)
        return {
            str(instance_id): [msgspec.to_builtins(one, str_keys=True) for one in report.recent]
            for instance_id, report in heard_last
            if report.recent
        }
