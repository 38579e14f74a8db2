"""How full rings are, as their workers say."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_qprotocol.messages import WorkerReport
from lmcache_qserver.status_report import RingUseReport


def ring_use(reports: Iterable[WorkerReport | None]) -> RingUseReport:
    """The last reports of some workers, added up; None from one that has not reported yet."""
    said = [report for report in reports if report is not None]
    return RingUseReport(
        blocks=sum(report.ring_blocks for report in said),
        used=sum(report.ring_used for report in said),
        high_water=sum(report.ring_high_water for report in said),
        highest_ratio=max(map(_ratio, said), default=0.0),
    )


def _ratio(report: WorkerReport) -> float:
    """A worker may say what it likes; a ratio is one nevertheless."""
    if not report.ring_blocks:
        return 0.0
    return min(1.0, report.ring_high_water / report.ring_blocks)
