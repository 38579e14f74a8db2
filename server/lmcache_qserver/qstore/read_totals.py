"""Counts of what readers found and missed since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lmcache_qprotocol.messages import Missing
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.status_report import ReadsReport

LOOKUP, RETRIEVE = "lookup_q", "retrieve_q"
READS = (LOOKUP, RETRIEVE)


def _no_misses() -> dict[str, Counter[MissReason]]:
    return {operation: Counter() for operation in READS}


@dataclass(slots=True)
class ReadTotals:
    """Objects, but where a name says otherwise."""

    hits: Counter[str] = field(default_factory=Counter)
    misses: dict[str, Counter[MissReason]] = field(default_factory=_no_misses)
    retrieved: int = 0
    retrieved_bytes: int = 0
    capped: int = 0
    """Retrieves."""

    def found(self, operation: str, hits: int, missing: Iterable[Missing]) -> None:
        """A query has been answered.

        Args:
            operation: one of `READS`.
        """
        self.hits[operation] += hits
        self.misses[operation].update(miss.reason for miss in missing)

    def leased(self, objects: int, nbytes: int, *, capped: bool) -> None:
        """A retrieve has leased objects.

        Args:
            nbytes: of the objects.
            capped: there would have been more.
        """
        self.retrieved += objects
        self.retrieved_bytes += nbytes
        self.capped += capped

    def summary(self) -> ReadsReport:
        """For `/status`."""
        return ReadsReport(
            hits={operation: self.hits[operation] for operation in READS},
            misses={
                operation: {reason.value: counts[reason] for reason in MissReason}
                for operation, counts in self.misses.items()
            },
            retrieved_chunks=self.retrieved,
            retrieved_bytes=self.retrieved_bytes,
            capped=self.capped,
        )
