"""Counts of what became of all stores since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_qprotocol.errors import ErrorCode
from lmcache_qprotocol.messages import StoreOutcome
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.status_report import TotalsReport

SERVER_REASONS = (LossReason.POOL_FULL, LossReason.COPY_FAILED, LossReason.STAMP_MISMATCH)
"""The reasons that the server gives; a worker gives the others."""


@dataclass(slots=True)
class StoreTotals:
    """Chunks, but where a name says otherwise."""

    submitted_stores: int = 0
    finished_stores: int = 0
    stored: int = 0
    duplicate: int = 0
    refused: Counter[LossReason] = field(default_factory=Counter)
    stored_bytes: int = 0
    nonfinite_objects: int = 0
    nonfinite_rows: int = 0
    """Stored objects with NaN or Inf, and their rows (of one token in one layer) that hold some."""
    rejected_stores: Counter[ErrorCode] = field(default_factory=Counter)
    """Stores that did not pass the checks, by error code."""
    copied_bytes: int = 0
    copy_s: float = 0.0
    """Seconds that copies took, of those whose bytes are counted."""

    def add(self, outcome: StoreOutcome, nbytes: int, nonfinite: Sequence[int] = ()) -> None:
        """A store is over.

        Args:
            nbytes: bytes of the chunks stored.
            nonfinite: of each that holds NaN or Inf, the rows that do.
        """
        self.nonfinite_objects += len(nonfinite)
        self.nonfinite_rows += sum(nonfinite)
        self.finished_stores += 1
        self.stored += outcome.stored
        self.duplicate += outcome.duplicate
        self.refused.update(outcome.refused)
        self.stored_bytes += nbytes

    def summary(self) -> TotalsReport:
        """For `/status`; every reason of the server is there from the start."""
        return TotalsReport(
            submitted_stores=self.submitted_stores,
            finished_stores=self.finished_stores,
            stored=self.stored,
            duplicate=self.duplicate,
            refused={reason.value: self.refused[reason] for reason in SERVER_REASONS},
            stored_bytes=self.stored_bytes,
            nonfinite_objects=self.nonfinite_objects,
            nonfinite_rows=self.nonfinite_rows,
            rejected_stores={
                code.value: count for code, count in sorted(self.rejected_stores.items())
            },
            copied_bytes=self.copied_bytes,
            copy_s=self.copy_s,
        )
