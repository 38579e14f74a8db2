"""What came of reading the persistent tier, since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MISSES = ("corrupt", "expired", "pool_full", "unavailable")
"""Why an object that is, or may be, there is not brought."""


@dataclass(slots=True)
class ReadCounts:
    """Objects, but where a name says otherwise.

    Attributes:
        brought, brought_bytes: came into the pool, and their bytes.
        absent: were asked for and are not there.
        missed: by `MISSES`; `unavailable` counts questions.
        quarantined: were put aside.
    """

    brought: int = 0
    brought_bytes: int = 0
    absent: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    quarantined: int = 0
