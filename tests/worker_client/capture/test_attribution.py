"""Rows find their tokens by cache slot, whatever the batch looks like."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qclient.capture.attribution import attribute, attribute_few, targets_of
from lmcache_qclient.capture.step_plan import Run

seeds = st.integers(0, 1 << 32)


def batch(random: Random, requests: int) -> tuple[list[Run], dict[str, dict[int, tuple[int, int]]]]:
    """Runs of some requests, and per request: cache slot -> (ring slot, stamp)."""
    engine = random.sample(range(0, 4000, 4), 4 * requests)
    ring = random.sample(range(0, 4000, 4), 4 * requests)
    runs: list[Run] = []
    wanted: dict[str, dict[int, tuple[int, int]]] = {}
    for number in range(requests):
        name = f"r{number}"
        wanted[name] = {}
        for _ in range(random.randint(1, 4)):
            slot, goal, stamp = engine.pop(), ring.pop(), random.randrange(1 << 40)
            length = random.randint(1, 4)
            runs.append(Run(name, slot, goal, stamp, length))
            wanted[name].update({slot + i: (goal + i, stamp + i) for i in range(length)})
    random.shuffle(runs)
    return runs, wanted


def attributed(
    mapping: list[int], runs: list[Run]
) -> tuple[dict[int, tuple[int, int]], tuple[str, ...]]:
    """Row -> (ring slot, stamp) of the rows that got one, and who is left out; the same by both ways."""
    result = attribute(np.array(mapping, dtype=np.int64), targets_of(runs))
    assert len(result.ring_slots) == len(result.stamps) == len(mapping)
    rows = zip(result.ring_slots.tolist(), result.stamps.tolist(), strict=True)
    got = {row: pair for row, pair in enumerate(rows) if pair[0] != -1}
    few = attribute_few(mapping, runs)
    assert {row: pair for row, *pair in few.kept} == {row: [*pair] for row, pair in got.items()}
    assert len(few.kept) == len(got)
    assert sorted(few.unmatched) == sorted(result.unmatched)
    return got, result.unmatched


@given(seeds, st.integers(1, 5), st.booleans())
def test_any_order_any_padding_any_strangers(seed: int, requests: int, int32: bool) -> None:
    random = Random(seed)
    runs, wanted = batch(random, requests)
    everything = {slot: pair for slots in wanted.values() for slot, pair in slots.items()}
    mapping = [*everything, *[-1] * random.randint(0, 4), *range(5000, 5000 + random.randint(0, 5))]
    random.shuffle(mapping)
    got, unmatched = attributed(mapping, runs)
    assert unmatched == ()
    assert got == {row: everything[slot] for row, slot in enumerate(mapping) if slot in everything}
    if int32:
        slots: Any = np.array(mapping, dtype=np.int32)
        assert attribute(slots, targets_of(runs)).unmatched == ()


@given(seeds, st.integers(1, 5), st.sampled_from(["missing", "twice"]))
def test_a_slot_missing_or_there_twice_leaves_its_request_out_and_no_other(
    seed: int, requests: int, fault: str
) -> None:
    random = Random(seed)
    runs, wanted = batch(random, requests)
    victim = random.choice(list(wanted))
    slot = random.choice(list(wanted[victim]))
    mapping = [slot for slots in wanted.values() for slot in slots]
    if fault == "missing":
        mapping.remove(slot)
    else:
        mapping.append(slot)
    random.shuffle(mapping)
    others = {s: p for name, slots in wanted.items() if name != victim for s, p in slots.items()}
    got, unmatched = attributed(mapping, runs)
    assert unmatched == (victim,)
    assert got == {row: others[s] for row, s in enumerate(mapping) if s in others}


def test_a_slot_that_two_requests_want_is_nobodys() -> None:
    runs = [Run("a", 8, 0, 100, 2), Run("b", 9, 4, 200, 2), Run("c", 20, 8, 300, 1)]
    got, unmatched = attributed([8, 9, 10, 20], runs)
    assert set(unmatched) == {"a", "b"}
    assert got == {3: (8, 300)}


def test_no_rows_leave_everybody_out() -> None:
    got, unmatched = attributed([], [Run("a", 8, 0, 100, 2), Run("b", 0, 4, 200, 2)])
    assert got == {}
    assert set(unmatched) == {"a", "b"}


def test_no_targets_drop_every_row() -> None:
    assert attributed([3, -1, 0], []) == ({}, ())


def test_slot_zero_is_a_slot_and_padding_is_not() -> None:
    assert attributed([-1, 0, -1], [Run("a", 0, 7, 5, 1)]) == ({1: (7, 5)}, ())
