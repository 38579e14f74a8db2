"""What the ledger wants of one forward pass: which rows go where, and which stamps are cleared before."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """`length` neighbouring rows: cache slots, ring slots and stamps all count up by one.

    A run crosses neither a block of the engine's cache nor one of the ring.
    """

    request_id: str
    engine_slot: int
    ring_slot: int
    stamp: int
    length: int


@dataclass
class StepPlan:
    """What to do around one forward pass.

    Attributes:
        clear_blocks: ring blocks given to a chunk in this step; all their stamps become EMPTY before a row is written.
        clear_rows: (ring slot, length) of rows that have been taken back; likewise.
        runs: the rows to capture.
    """

    clear_blocks: list[int] = field(default_factory=list)
    clear_rows: list[tuple[int, int]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
