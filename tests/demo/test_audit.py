"""The audit finds nothing in a run that proves what it should, and names what is wrong with any other."""

import copy
import math
from typing import Any

import pytest

from demo.audit import ATTENTION_TOLERANCE, FEATURES, ROW_TOLERANCE, TOLERANCES, audit

COUNTS = {"captured": 90, "lost": {"ring_full": 10}, "pending": 0}
REPORT: dict[str, Any] = {
    "tokens_computed": 100,
    "tokens_expected": 90,
    "features": dict.fromkeys(FEATURES, COUNTS),
}
ROW: dict[str, Any] = {
    "prompt": "story",
    "retrieved": 50,
    "expected": 50,
    "query row error": ROW_TOLERANCE,
    "key row error": ROW_TOLERANCE,
    "attention error": ATTENTION_TOLERANCE,
    "sink error": ATTENTION_TOLERANCE,
}


def test_a_run_that_proves_what_it_should() -> None:
    assert audit(REPORT, [ROW, ROW]) == []


@pytest.mark.parametrize("column", TOLERANCES)
@pytest.mark.parametrize("factor", [1.01, math.inf, math.nan])
def test_what_is_beyond_its_limit_is_named(column: str, factor: float) -> None:
    faults = audit(REPORT, [ROW, ROW | {column: TOLERANCES[column] * factor}])
    assert len(faults) == 1
    assert f"story: {column} is " in faults[0]


def test_tokens_that_were_not_found_again() -> None:
    (fault,) = audit(REPORT, [ROW | {"retrieved": 49}])
    assert fault == "story: 49 tokens retrieved, 50 expected"


@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_that_no_account_knows(feature: str) -> None:
    report = copy.deepcopy(REPORT)
    report["features"][feature] = COUNTS | {"lost": {}}
    (fault,) = audit(report, [ROW])
    assert fault == f"{feature}: captured + counted = 90, but the scheduler computed 100"


@pytest.mark.parametrize("feature", FEATURES)
def test_fewer_tokens_than_the_lengths_say(feature: str) -> None:
    report = copy.deepcopy(REPORT)
    report["features"][feature] = COUNTS | {"captured": 80, "lost": {"ring_full": 20}}
    (fault,) = audit(report, [ROW])
    assert fault == f"{feature}: captured 80, the lengths say 90"
