"""Who has to go when room is needed.

A policy holds exactly the slots that may be evicted, which are the committed ones without a lease.
The pool tells it about every slot that enters and leaves that state, and asks for an order only
when room is needed: nothing is ever polled. All calls are O(1), iteration apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from lmcache_qserver.pool.slot import Slot

PolicyName = Literal["lru", "none"]


class EvictionPolicy(Protocol):
    """The order of victims."""

    def add(self, slot: Slot) -> None:
        """The slot may be evicted from now on; it has just been used."""

    def touch(self, slot: Slot) -> None:
        """The slot, added before, has just been used."""

    def remove(self, slot: Slot) -> None:
        """The slot, added before, may not be evicted any more."""

    def __iter__(self) -> Iterator[Slot]:
        """The slots that may be evicted, first victim first; stale after any other call."""


class LeastRecentlyUsed:
    """Evict what has not been used for the longest time."""

    def __init__(self) -> None:
        self._slots: OrderedDict[int, Slot] = OrderedDict()  # by generation, used last at the end

    def add(self, slot: Slot) -> None:
        self._slots[slot.generation] = slot

    def touch(self, slot: Slot) -> None:
        self._slots.move_to_end(slot.generation)

    def remove(self, slot: Slot) -> None:
        del self._slots[slot.generation]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())


class NoEviction:
    """Evict nothing: a full pool refuses."""

    def add(self, slot: Slot) -> None:
        pass

    def touch(self, slot: Slot) -> None:
        pass

    def remove(self, slot: Slot) -> None:
        pass

    def __iter__(self) -> Iterator[Slot]:
        return iter(())


POLICIES: dict[PolicyName, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "none": NoEviction,
}
