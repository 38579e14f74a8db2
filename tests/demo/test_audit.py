"""The audit finds nothing in a run that proves what it should, and names what is wrong with any other."""

import copy
import math
from typing import Any

import pytest
import torch

from demo.attention import attention_weights, compare_attention
from demo.audit import FEATURES, TOLERANCES, audit

COUNTS = {"captured": 90, "lost": {"ring_full": 10}, "pending": 0}
REPORT: dict[str, Any] = {
    "tokens_computed": 100,
    "tokens_expected": 90,
    "features": dict.fromkeys(FEATURES, COUNTS),
}
ROW: dict[str, Any] = {"prompt": "story", "retrieved": 50, "expected": 50, **TOLERANCES}


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


def test_keys_of_another_token_make_the_run_fail() -> None:
    random = torch.Generator().manual_seed(5)
    queries = torch.randn(2, 9, 4, 8, generator=random)
    keys = torch.randn(2, 9, 2, 8, generator=random)
    reference = [attention_weights(*layer) for layer in zip(queries, keys, strict=True)]

    def faults_with(stored: torch.Tensor) -> list[str]:
        found = compare_attention(queries, stored, reference)
        measured = {
            "attention error": found.weight_error,
            "beyond 1e-5": found.beyond / found.seen,
            "sink error": found.mass_error,
        }
        return audit(REPORT, [ROW | measured])

    assert faults_with(keys) == []
    broken = keys.clone()
    broken[1, 6] = keys[1, 5]
    faults = faults_with(broken)
    assert [fault.split(" is ")[0] for fault in faults] == [
        "story: attention error",
        "story: beyond 1e-5",
        "story: sink error",
    ]


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
