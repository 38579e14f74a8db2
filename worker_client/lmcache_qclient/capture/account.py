"""The worker's account: every computed token ends as captured, or lost under one reason.

computed = captured + sum(lost) + pending          at any time; pending = 0 once nothing is open or under way
"""

from __future__ import annotations

from collections import Counter

from lmcache_qprotocol.messages import WorkerReport
from lmcache_qprotocol.reasons import LossReason


class Account:
    """Token counts since the worker started. Written by the engine's thread only."""

    def __init__(self) -> None:
        self.computed = 0
        self.captured = 0
        self.lost: Counter[LossReason] = Counter()

    @property
    def pending(self) -> int:
        """Tokens in open chunks and in stores under way."""
        return self.computed - self.captured - self.lost.total()

    def lose(self, reason: LossReason, tokens: int) -> None:
        """Count `tokens` as not stored."""
        self.lost[reason] += tokens

    def report(
        self, ring_blocks: int = 0, ring_used: int = 0, ring_high_water: int = 0
    ) -> WorkerReport:
        """A snapshot for the server."""
        return WorkerReport(
            computed=self.computed,
            captured=self.captured,
            lost={reason: count for reason, count in self.lost.items() if count},
            pending=self.pending,
            ring_blocks=ring_blocks,
            ring_used=ring_used,
            ring_high_water=ring_high_water,
        )
