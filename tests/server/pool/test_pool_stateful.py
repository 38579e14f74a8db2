"""The pool against a plain model, by random operations.

The model is naive on purpose: a dict of live slots with their expected bytes, a list in order of
use, and a row of units searched from end to end. It judges for every reservation who had to go.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from lmcache_qserver.pool import Pool, PoolMemory, Slot, SlotState

UNIT = 4096
POOL_UNITS = 16


def pattern(generation: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that no other generation has, at no place."""
    return np.random.default_rng(generation).integers(0, 256, nbytes, np.uint8)


@dataclass
class Expected:
    """What the model knows of a live slot."""

    slot: Slot
    owner: int
    units: range
    leases: int = 0
    doomed: bool = False


class PoolAgainstDict(RuleBasedStateMachine):
    """Random operations. Eviction takes slots away, so rules draw from the model what is there."""

    writing = Bundle("writing")
    readers = Bundle("readers")  # one entry per lease

    @initialize(policy=st.sampled_from(["lru", "lru", "none"]))
    def start(self, policy: str) -> None:
        self.memory = PoolMemory(POOL_UNITS * UNIT)
        self.pool = Pool(self.memory, "none" if policy == "none" else "lru")
        self.live: dict[int, Expected] = {}
        # Generations of committed slots without a lease, used last at the end.
        self.used: list[int] = []
        self.owners = 0
        self.evictions = 0
        self.evicted_units = 0
        self.last_generation = 0

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()

    def largest_hole(self, gone: set[int]) -> int:
        row = [" "] * POOL_UNITS
        for generation, expected in self.live.items():
            if generation not in gone:
                for unit in expected.units:
                    row[unit] = "#"
        return max(len(hole) for hole in "".join(row).split("#"))

    @rule(target=writing, nbytes=st.integers(1, 6 * UNIT) | st.just(POOL_UNITS * UNIT))
    def reserve(self, nbytes: int) -> object:
        units = -(-nbytes // UNIT)
        self.owners += 1
        reservation = self.pool.reserve(nbytes, self.owners)
        candidates = self.used if self.pool.policy == "lru" else []
        by_owner = {self.live[generation].owner: generation for generation in candidates}
        assert set(reservation.evicted) <= set(by_owner), "evicted what may not be evicted"
        gone = [by_owner[owner] for owner in reservation.evicted]  # type: ignore[index]

        slot = reservation.slot
        if slot is None:
            assert not gone
            assert self.largest_hole(set(candidates)) < units
            return multiple()
        assert self.largest_hole(set(gone)) >= units
        if gone:
            assert gone == sorted(gone, key=candidates.index)
            for victim in gone:
                assert self.largest_hole(set(gone) - {victim}) < units, "evicted more than needed"
            earlier = candidates[: candidates.index(gone[-1])]
            assert self.largest_hole(set(earlier)) < units, "evicted a more recently used one"
        for generation in gone:
            assert self.live[generation].slot.state is SlotState.FREE
            self.evictions += 1
            self.evicted_units += len(self.live[generation].units)
            self.forget(generation)
        self.add(slot, nbytes)
        return slot

    def add(self, slot: Slot, nbytes: int) -> None:
        assert slot.generation > self.last_generation
        self.last_generation = slot.generation
        assert slot.offset % UNIT == 0
        first = slot.offset // UNIT
        units = range(first, first + -(-nbytes // UNIT))
        for other in self.live.values():
            assert not set(units) & set(other.units), "two slots overlap"
        self.live[slot.generation] = Expected(slot, self.owners, units)
        view = self.pool.view(slot)
        assert view.shape == (nbytes,)
        view[:] = pattern(slot.generation, nbytes)

    def forget(self, generation: int) -> None:
        del self.live[generation]
        if generation in self.used:
            self.used.remove(generation)

    @rule(slot=consumes(writing))
    def commit(self, slot: Slot) -> None:
        self.pool.commit(slot)
        self.used.append(slot.generation)

    @rule(slot=consumes(writing))
    def abort(self, slot: Slot) -> None:
        self.pool.abort(slot)
        self.forget(slot.generation)

    def pick(self, data: st.DataObject, generations: list[int]) -> Slot | None:
        return self.live[data.draw(st.sampled_from(generations))].slot if generations else None

    def readable(self) -> list[int]:
        return [g for g, e in self.live.items() if (g in self.used or e.leases) and not e.doomed]

    @rule(target=readers, data=st.data())
    def lease(self, data: st.DataObject) -> object:
        slot = self.pick(data, self.readable())
        if slot is None:
            return multiple()
        self.pool.lease(slot)
        if slot.generation in self.used:
            self.used.remove(slot.generation)
        self.live[slot.generation].leases += 1
        return slot

    @rule(slot=consumes(readers))
    def release(self, slot: Slot) -> None:
        expected = self.live[slot.generation]
        assert np.array_equal(self.pool.view(slot), pattern(slot.generation, slot.nbytes))
        self.pool.release(slot)
        expected.leases -= 1
        if expected.leases == 0:
            if expected.doomed:
                self.forget(slot.generation)
            else:
                self.used.append(slot.generation)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        slot = self.pick(data, self.readable())
        if slot is None:
            return
        self.pool.touch(slot)
        if slot.generation in self.used:
            self.used.remove(slot.generation)
            self.used.append(slot.generation)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slot = self.pick(data, self.readable())
        if slot is None:
            return
        self.pool.discard(slot)
        if self.live[slot.generation].leases:
            self.live[slot.generation].doomed = True
        else:
            self.forget(slot.generation)

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.validate()
        usage = self.pool.usage()
        by_state = dict.fromkeys(SlotState, 0)
        for generation, expected in self.live.items():
            slot = expected.slot
            committed = generation in self.used
            wanted = SlotState.COMMITTED if committed else SlotState.RESERVED
            wanted = SlotState.LEASED if expected.leases else wanted
            assert (slot.state, slot.leases, slot.doomed) == (
                wanted,
                expected.leases,
                expected.doomed,
            )
            by_state[wanted] += len(expected.units) * UNIT
        assert usage.capacity_bytes == POOL_UNITS * UNIT
        assert usage.free_bytes == usage.capacity_bytes - sum(by_state.values())
        assert usage.reserved_bytes == by_state[SlotState.RESERVED]
        assert usage.committed_bytes == by_state[SlotState.COMMITTED]
        assert usage.leased_bytes == by_state[SlotState.LEASED]
        assert (usage.slots, usage.evictions) == (len(self.live), self.evictions)
        assert usage.evicted_bytes == self.evicted_units * UNIT

    @invariant()
    def content_is_what_its_generation_wrote(self) -> None:
        if not hasattr(self, "pool"):
            return
        for generation, expected in self.live.items():
            slot = expected.slot
            content = self.memory.array[slot.offset : slot.offset + slot.nbytes]
            assert np.array_equal(content, pattern(generation, slot.nbytes))


TestPoolAgainstDict = PoolAgainstDict.TestCase
TestPoolAgainstDict.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
