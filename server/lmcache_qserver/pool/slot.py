"""A slot: one reservation of the pool, from `reserve` until its bytes are free again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum


class SlotState(Enum):
    """Where a slot is in its life; the diagram is in `pool.py`."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    LEASED = "leased"
    FREE = "free"
    """The end: the bytes belong to somebody else by now, and the handle is good for nothing."""


class PoolStateError(RuntimeError):
    """The slot's state does not allow the operation: a bug of this server, never a peer's doing."""


@dataclass(slots=True, eq=False)
class Slot:
    """A handle, compared by identity. Read it freely; only the pool changes it."""

    offset: int
    """Bytes from the start of the arena, a multiple of the pool's alignment."""
    nbytes: int
    """Bytes that were asked for."""
    span: int
    """Bytes that it takes: nbytes rounded up to whole alignment units."""
    owner: Hashable = field(repr=False)
    """Whose bytes these are (an object key), as given to `reserve`; unlogged, keys hold salts."""
    generation: int
    """Counted up by every reservation of the pool: equal generations mean the same bytes."""
    state: SlotState = SlotState.RESERVED
    leases: int = 0
    """Readers that hold it; positive in state LEASED and only there."""
    doomed: bool = False
    """Discarded while leased: the last release frees it."""
