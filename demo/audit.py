"""What a run must prove: every token accounted for, every row and every attention weight that of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FEATURES = ("transfer_query", "transfer_key")
"""What the demo captures."""

FINE = 1e-5
"""Absolute, of an attention weight between 0 and 1: all but a few weights of two fp32 passes agree to this."""
ROW_TOLERANCE = 5e-5
"""Relative to the row's size; both sides compute in fp32, in different orders."""
ATTENTION_TOLERANCE = 2e-5
"""Absolute, of any weight: what the engine's and eager attention's own rounding add up to (docs/figures.md)."""
BEYOND_TOLERANCE = 1e-6
"""Share of weights that may be off by more than `FINE`, 1e-5."""
TOLERANCES = {
    "query row error": ROW_TOLERANCE,
    "key row error": ROW_TOLERANCE,
    "attention error": ATTENTION_TOLERANCE,
    "beyond 1e-5": BEYOND_TOLERANCE,
    "sink error": FINE,
}
"""Most that a prompt may be off, by the columns of the demo's table."""


def audit(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the run, a sentence each; empty when it proves what it should.

    `report` holds `tokens_computed`, `tokens_expected`, and `features`: of each its `captured` tokens and what was
    `lost`, by reason. `rows` has one per prompt: `prompt`, `retrieved`, `expected`, and a number for each of
    `TOLERANCES`.
    """
    faults = [fault for feature in FEATURES for fault in _audit_counts(feature, report)]
    for row in rows:
        if row["retrieved"] != row["expected"]:
            faults.append(
                f"{row['prompt']}: {row['retrieved']} tokens retrieved, {row['expected']} expected"
            )
        faults += [
            f"{row['prompt']}: {column} is {row[column]:.2e}, allowed are {allowed:.0e}"
            for column, allowed in TOLERANCES.items()
            if not row[column] <= allowed  # a NaN is no agreement
        ]
    return faults


def _audit_counts(feature: str, report: Mapping[str, Any]) -> list[str]:
    captured = report["features"][feature]["captured"]
    accounted = captured + sum(report["features"][feature]["lost"].values())
    computed, expected = report["tokens_computed"], report["tokens_expected"]
    faults = []
    if accounted != computed:
        faults.append(
            f"{feature}: captured + counted = {accounted}, but the scheduler computed {computed}"
        )
    if captured != expected:
        faults.append(f"{feature}: captured {captured}, the lengths say {expected}")
    return faults
