"""Which ring row a row of the forward pass belongs to, by the cache slot that it writes. Pure.

Row r of a step's query writes its KV to cache slot `slot_mapping[r]`; every slot is written at most once a step, so
equal slots are the same token. Rows are never given to tokens by their position in the batch. A row without a match
(another request's, padding, slot -1) gets no ring row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_qclient.capture.step_plan import Run

Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Targets:
    """The rows that a step wants, sorted by cache slot. All arrays are int64 `[n]`.

    Attributes:
        engine_slots: ascending cache slots.
        ring_slots: ring slot of each.
        stamps: stamp of each.
        owners: index into `request_ids` of each.
        request_ids: the step's requests.
    """

    engine_slots: Slots
    ring_slots: Slots
    stamps: Slots
    owners: Slots
    request_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.engine_slots)


def targets_of(runs: Sequence[Run]) -> Targets:
    """Runs spelled out row by row."""
    request_ids = tuple(dict.fromkeys(run.request_id for run in runs))
    number = {request_id: index for index, request_id in enumerate(request_ids)}
    table: Slots = np.array(
        [
            (run.engine_slot, run.ring_slot, run.stamp, number[run.request_id], run.length)
            for run in runs
        ],
        dtype=np.int64,
    ).reshape(-1, 5)
    lengths = table[:, 4]
    rows = int(lengths.sum())
    if rows != len(runs):  # decode brings one row a run: nothing to spell out
        table = np.repeat(table, lengths, axis=0)
        ramp = np.arange(rows) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        table[:, :3] += ramp[:, None]
    by_slot = np.ascontiguousarray(table[table[:, 0].argsort(kind="stable")].T)
    engine_slots, ring_slots, stamps, owners, _ = by_slot
    return Targets(engine_slots, ring_slots, stamps, owners, request_ids)


@dataclass(frozen=True)
class Attribution:
    """Where the rows of one step go.

    Attributes:
        ring_slots: int64 `[rows]`; -1 drops the row.
        stamps: int64 `[rows]`; only meaningful where ring_slots is not -1.
        unmatched: requests of which at least one wanted row is missing, or there more than once.
    """

    ring_slots: Slots
    stamps: Slots
    unmatched: tuple[str, ...]


def attribute(slot_mapping: Slots, targets: Targets) -> Attribution:
    """Match rows to targets.

    Args:
        slot_mapping: int64 `[rows]`, the cache slot of each row; -1 for padding.
        targets: what the step wants.
    """
    if not len(targets):
        nowhere = np.full(len(slot_mapping), -1, dtype=np.int64)
        return Attribution(nowhere, nowhere, ())
    place = np.minimum(np.searchsorted(targets.engine_slots, slot_mapping), len(targets) - 1)
    found = targets.engine_slots[place] == slot_mapping
    # Of a slot that is wanted twice nobody knows whose row is there: both owners are left out.
    hits = np.bincount(place[found], minlength=len(targets))
    again = np.flatnonzero(np.diff(targets.engine_slots) == 0)
    bad = hits != 1
    bad[again] = bad[again + 1] = True
    good, bad_owners = found, targets.owners[bad]
    if len(bad_owners):
        bad_owners = np.unique(bad_owners)
        good = found & ~np.isin(targets.owners[place], bad_owners)
    return Attribution(
        np.where(good, targets.ring_slots[place], -1),
        np.where(good, targets.stamps[place], -1),
        tuple(targets.request_ids[owner] for owner in bad_owners),
    )


class FewRows(NamedTuple):
    """Where the few rows of one step go.

    Attributes:
        kept: (row, ring slot, stamp) of each row that is wanted.
        unmatched: as in `Attribution`.
    """

    kept: list[tuple[int, int, int]]
    unmatched: tuple[str, ...]


def attribute_few(slot_mapping: Sequence[int], runs: Sequence[Run]) -> FewRows:
    """`attribute` for a handful of rows, where every call into NumPy costs more than the rows.

    Args:
        slot_mapping: the cache slot of each row; -1 for padding.
        runs: what the step wants.
    """
    wanted: dict[int, tuple[int, int, str]] = {}
    bad: dict[str, None] = {}
    for run in runs:
        for at in range(run.length):
            slot = run.engine_slot + at
            if slot in wanted:
                bad[wanted[slot][2]] = bad[run.request_id] = None
            wanted[slot] = run.ring_slot + at, run.stamp + at, run.request_id
    found: dict[int, int] = {}
    for row, slot in enumerate(slot_mapping):
        if slot in wanted:
            if slot in found:
                bad[wanted[slot][2]] = None
            found[slot] = row
    if len(found) != len(wanted):
        bad.update((owner, None) for slot, (_, _, owner) in wanted.items() if slot not in found)
    kept = [
        (row, wanted[slot][0], wanted[slot][1])
        for slot, row in found.items()
        if wanted[slot][2] not in bad
    ]
    return FewRows(kept, tuple(bad))
