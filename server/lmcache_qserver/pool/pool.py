"""L1: the account of the arena. Who has which bytes, what may be done with them, and who has to go.

    States of a slot

                          reserve            (from FREE, as a new Slot)
                             │
                             ▼    abort
                         RESERVED ──────────────────────────────────────▶ FREE
                             │ commit
                             ▼    discard, evicted by a reserve
                         COMMITTED ─────────────────────────────────────▶ FREE
                       lease │ ▲ last release
                             ▼ │  last release of a doomed slot
                          LEASED ───────────────────────────────────────▶ FREE

    More leases, releases of all but the last, touch, and discard (which dooms) leave a slot LEASED.

    Who may free what
      RESERVED    its writer alone: commit or abort, once no thread can write to it any more
      COMMITTED   the index (discard), and the pool itself when it needs room (by its policy)
      LEASED      nobody. The index may doom it; then the last reader to release it frees it
      FREE        is final. The same bytes come back as another Slot with a higher generation

    Invariants (`validate` asserts them)
      - slots that are not FREE and free extents tile the arena; none overlap
      - the eviction policy holds the COMMITTED slots and no others, so nothing else is ever evicted
      - leases > 0 in LEASED and only there; only a LEASED slot is doomed
      - the bytes of all states and the free ones add up to the capacity
      - a refused reserve changes nothing

A reader or writer that runs in a thread is covered by its state alone: the writer's slot is
RESERVED for as long as a copy may run, and whoever reads (an SDK's lease, the write-behind, an
inline reply) holds a lease for as long as it reads. A pin is a lease. The generation is what a late
reader compares to know that the bytes are still its own.

Bytes are counted in spans, the rounded-up size that a slot really takes: padding counts for the
state of its slot, and `padding_bytes` says how much of the total it is.

Everything here is synchronous and is called on the event loop only. There are no locks; the loop is
the lock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmcache_qserver.pool.eviction import POLICIES, PolicyName
from lmcache_qserver.pool.extents import Extents
from lmcache_qserver.pool.memory import PoolMemory
from lmcache_qserver.pool.room import choose_victims
from lmcache_qserver.pool.slot import PoolStateError, Slot, SlotState

_ALLOWED_STATES: dict[str, tuple[SlotState, ...]] = {
    "commit": (SlotState.RESERVED,),
    "abort": (SlotState.RESERVED,),
    "lease": (SlotState.COMMITTED, SlotState.LEASED),
    "peek": (SlotState.COMMITTED, SlotState.LEASED),
    "release": (SlotState.LEASED,),
    "touch": (SlotState.COMMITTED, SlotState.LEASED),
    "discard": (SlotState.COMMITTED, SlotState.LEASED),
    "view": (SlotState.RESERVED, SlotState.LEASED),
}
_REFUSED_WHEN_DOOMED = frozenset({"lease", "touch", "discard"})


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer to `reserve`."""

    slot: Slot | None
    """None: there is no room, and none can be made (`pool_full`)."""
    evicted: tuple[Hashable, ...] = ()
    """Owners whose slots had to go, first victim first; the caller unindexes them at once."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A snapshot. free + reserved + committed + leased = capacity, to the byte."""

    capacity_bytes: int
    free_bytes: int
    reserved_bytes: int
    committed_bytes: int
    """Without a lease: what eviction could free."""
    leased_bytes: int
    padding_bytes: int
    """The part of reserved, committed and leased bytes that rounds slots up to the alignment."""
    slots: int
    """Slots that are not FREE."""
    evictions: int
    """Slots evicted since the start."""
    evicted_bytes: int
    """Their spans."""


class Pool:
    """Slots in an arena.

    Args:
        memory: the arena; the pool is its only user, and the caller closes it after the pool's last
            use.
        policy: "lru" evicts least recently used slots when room is needed; "none" refuses instead.

    Raises:
        ValueError: policy is unknown.
    """

    def __init__(self, memory: PoolMemory, policy: PolicyName = "lru") -> None:
        if policy not in POLICIES:
            raise ValueError(
                f"unknown eviction policy {policy!r}: use one of {', '.join(POLICIES)}"
            )
        self.memory = memory
        self.policy: PolicyName = policy
        self._extents = Extents(memory.nbytes)
        self._evictable = POLICIES[policy]()
        self._slots: dict[int, Slot] = {}  # by generation
        self._bytes = {SlotState.RESERVED: 0, SlotState.COMMITTED: 0, SlotState.LEASED: 0}
        self._padding_bytes = 0
        # No run of free and evictable bytes is this long; known until a slot is unpinned. So a store
        # of many chunks that meets a fragmented pool pays for one search, not for one per chunk.
        self._refused_span: int | None = None
        self._generation = 0
        self._evictions = 0
        self._evicted_bytes = 0

    def reserve(self, nbytes: int, owner: Hashable) -> Reservation:
        """Room for nbytes, to be written through `view` and then committed or aborted.

        Evicts what it must and no more: no eviction of the answer could have been spared, and if
        everything evictable would not make room, nothing is evicted.

        Raises:
            ValueError: nbytes is not positive.
        """
        evicted: tuple[Hashable, ...] = ()
        offset = self._extents.allocate(nbytes)
        if offset is None:
            victims = self._victims_for(nbytes)
            if victims is None:
                return Reservation(None)
            evicted = tuple(slot.owner for slot in victims)
            for victim in victims:
                self._evictions += 1
                self._evicted_bytes += victim.span
                self._free(victim)
            offset = self._extents.allocate(nbytes)
            assert offset is not None, "the victims make a hole that is large enough"
        self._generation += 1
        slot = Slot(offset, nbytes, self._extents.span(nbytes), owner, self._generation)
        self._slots[slot.generation] = slot
        self._bytes[SlotState.RESERVED] += slot.span
        self._padding_bytes += slot.span - slot.nbytes
        return Reservation(slot, evicted)

    def commit(self, slot: Slot) -> None:
        """RESERVED → COMMITTED: the bytes are complete.

        The writer has dropped its writable view before; numpy can't take it back.

        Raises:
            PoolStateError: the slot is not RESERVED.
        """
        self._require("commit", slot)
        self._move(slot, SlotState.COMMITTED)
        self._evictable.add(slot)

    def abort(self, slot: Slot) -> None:
        """RESERVED → FREE, at once: call it only when no thread can write to the slot any more.

        Raises:
            PoolStateError: the slot is not RESERVED.
        """
        self._require("abort", slot)
        self._free(slot)

    def lease(self, slot: Slot) -> None:
        """COMMITTED or LEASED → LEASED: the bytes stay as they are until the matching `release`.

        Raises:
            PoolStateError: the slot is in another state, or doomed.
        """
        self._require("lease", slot)
        if slot.state is SlotState.COMMITTED:
            self._evictable.remove(slot)
            self._move(slot, SlotState.LEASED)
        slot.leases += 1

    def release(self, slot: Slot) -> None:
        """Undo one `lease`; the last one makes the slot COMMITTED and most recently used.

        A doomed slot becomes FREE instead.

        Raises:
            PoolStateError: the slot is not LEASED.
        """
        self._require("release", slot)
        slot.leases -= 1
        if slot.leases:
            return
        if slot.doomed:
            self._free(slot)
        else:
            self._move(slot, SlotState.COMMITTED)
            self._evictable.add(slot)

    def touch(self, slot: Slot) -> None:
        """The slot was used: it is the last to be evicted now.

        A LEASED one can't be evicted and becomes the last at its release: nothing changes.

        Raises:
            PoolStateError: the slot is neither COMMITTED nor LEASED, or doomed.
        """
        self._require("touch", slot)
        if slot.state is SlotState.COMMITTED:
            self._evictable.touch(slot)

    def discard(self, slot: Slot) -> None:
        """The index has dropped the slot: COMMITTED → FREE; LEASED → FREE at the last release.

        Raises:
            PoolStateError: the slot is neither COMMITTED nor LEASED, or doomed already.
        """
        self._require("discard", slot)
        if slot.state is SlotState.LEASED:
            slot.doomed = True
        else:
            self._free(slot)

    def view(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """The slot's bytes, uint8 `[slot.nbytes]`: writable while RESERVED, read-only while LEASED.

        The view does not keep the slot: whoever holds it sees another owner's bytes after the slot
        is FREE.

        Raises:
            PoolStateError: the slot is FREE, or COMMITTED: lease it first, else it may be evicted
                under the view.
        """
        self._require("view", slot)
        view = self.memory.array[slot.offset : slot.offset + slot.nbytes]
        view.flags.writeable = slot.state is SlotState.RESERVED
        return view

    def peek(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """The slot's bytes, uint8 `[slot.nbytes]`, read-only, of a slot that may be evicted under the view.

        What is seen counts only if the slot is COMMITTED or LEASED afterwards, too: these states are never
        entered twice.

        Raises:
            PoolStateError: the slot is neither.
        """
        self._require("peek", slot)
        view = self.memory.array[slot.offset : slot.offset + slot.nbytes]
        view.flags.writeable = False
        return view

    def usage(self) -> PoolUsage:
        """The account as it is now. O(1)."""
        return PoolUsage(
            capacity_bytes=self._extents.nbytes,
            free_bytes=self._extents.free_bytes,
            reserved_bytes=self._bytes[SlotState.RESERVED],
            committed_bytes=self._bytes[SlotState.COMMITTED],
            leased_bytes=self._bytes[SlotState.LEASED],
            padding_bytes=self._padding_bytes,
            slots=len(self._slots),
            evictions=self._evictions,
            evicted_bytes=self._evicted_bytes,
        )

    def validate(self) -> None:
        """Assert the invariants of this file's head. O(n log n); for tests."""
        self._extents.validate()
        live = list(self._slots.values())
        assert all(slot.generation == key for key, slot in self._slots.items())
        assert all(slot.generation <= self._generation for slot in live)
        assert all(slot.span == self._extents.span(slot.nbytes) for slot in live)
        assert {slot.offset: slot.span for slot in live} == self._extents.allocated()
        for slot in live:
            assert slot.state is not SlotState.FREE, f"a free slot is kept: {slot}"
            assert (slot.leases > 0) == (slot.state is SlotState.LEASED), (
                f"leases and state differ: {slot}"
            )
            assert slot.state is SlotState.LEASED or not slot.doomed, (
                f"doomed without a lease: {slot}"
            )
        for state, nbytes in self._bytes.items():
            assert nbytes == sum(slot.span for slot in live if slot.state is state), state
        assert self._padding_bytes == sum(slot.span - slot.nbytes for slot in live)
        assert self._extents.free_bytes + sum(self._bytes.values()) == self._extents.nbytes
        evictable = list(self._evictable)
        assert all(slot.state is SlotState.COMMITTED for slot in evictable)
        if self.policy != "none":
            committed = {slot for slot in live if slot.state is SlotState.COMMITTED}
            assert len(evictable) == len(committed)
            assert set(evictable) == committed

    def _victims_for(self, nbytes: int) -> list[Slot] | None:
        span = self._extents.span(nbytes)
        if span > self._extents.free_bytes + self._bytes[SlotState.COMMITTED]:
            return None  # a full pool refuses without a search
        if self._refused_span is not None and span >= self._refused_span:
            return None
        victims = choose_victims(self._extents, self._evictable, span)
        if victims is None:
            self._refused_span = span
        return victims

    def _require(self, operation: str, slot: Slot) -> None:
        if slot.state not in _ALLOWED_STATES[operation]:
            raise PoolStateError(f"{operation} on a slot that is {slot.state.name}: {slot}")
        if slot.doomed and operation in _REFUSED_WHEN_DOOMED:
            raise PoolStateError(
                f"{operation} on a slot that is {slot.state.name} and doomed: {slot}"
            )
        if self._slots.get(slot.generation) is not slot:
            raise PoolStateError(f"{operation} on a slot of another pool: {slot}")

    def _move(self, slot: Slot, state: SlotState) -> None:
        self._bytes[slot.state] -= slot.span
        self._bytes[state] += slot.span
        slot.state = state
        if state is SlotState.COMMITTED:
            self._refused_span = None

    def _free(self, slot: Slot) -> None:
        if slot.state is SlotState.COMMITTED:
            self._evictable.remove(slot)
        else:
            self._refused_span = None
        self._bytes[slot.state] -= slot.span
        self._padding_bytes -= slot.span - slot.nbytes
        slot.state = SlotState.FREE
        del self._slots[slot.generation]
        self._extents.free(slot.offset, slot.nbytes)
