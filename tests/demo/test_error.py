"""max_relative_row_error: what it must notice, and what must never pass for agreement."""

import math

import pytest
import torch

from demo.reference import max_relative_row_error


@pytest.fixture
def queries() -> torch.Tensor:
    return torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(7))


def test_equal_queries_have_no_error(queries: torch.Tensor) -> None:
    assert max_relative_row_error(queries.clone(), queries) == 0.0


def test_scaled_row_gives_its_factor(queries: torch.Tensor) -> None:
    ours = queries.clone()
    ours[1, 3] *= 1.25
    assert max_relative_row_error(ours, queries) == pytest.approx(0.25, rel=1e-5)


def test_larger_of_both_measures_is_returned() -> None:
    reference = torch.ones(1, 1, 1, 100)
    one_wrong = reference.clone()
    one_wrong[0, 0, 0, 17] += 0.5  # the L2 measure says 0.05
    assert max_relative_row_error(one_wrong, reference) == pytest.approx(0.5)
    peaked = torch.full((1, 1, 1, 100), 0.01)
    peaked[0, 0, 0, 0] = 1.0
    all_wrong = peaked.clone()
    all_wrong += 0.01  # the max measure says 0.01
    assert max_relative_row_error(all_wrong, peaked) == pytest.approx(
        0.1 / math.sqrt(1 + 99e-4), rel=1e-4
    )


def test_small_row_counts_as_much_as_a_large_one(queries: torch.Tensor) -> None:
    reference = queries.clone()
    reference[2] *= 1e-4
    ours = reference.clone()
    ours[2, 0] = reference[2, 1]
    assert max_relative_row_error(ours, reference) > 0.5


@pytest.mark.parametrize("roll", [1, -1])
def test_rows_of_another_token_or_layer_stand_out(
    queries: torch.Tensor, roll: tuple[int, int]
) -> None:
    assert max_relative_row_error(queries.roll(roll, 1), queries) > 0.5
    assert max_relative_row_error(queries.roll(roll, 0), queries) > 0.5
    assert max_relative_row_error(queries.roll(roll, 2), queries) > 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["ours", "reference", "both"])
def test_what_is_not_finite_is_infinitely_wrong(
    queries: torch.Tensor, value: float, side: str
) -> None:
    ours, reference = queries.clone(), queries.clone()
    if side != "reference":
        ours[0, 1, 1, 2] = value
    if side != "ours":
        reference[0, 1, 1, 2] = value
    assert max_relative_row_error(ours, reference) == math.inf


def test_row_of_zeros_must_be_zeros(queries: torch.Tensor) -> None:
    reference = queries.clone()
    reference[0, 2] = 0
    assert max_relative_row_error(reference.clone(), reference) == 0.0
    assert max_relative_row_error(queries, reference) == math.inf
    assert max_relative_row_error(reference, queries) == pytest.approx(1.0)


def test_bfloat16_is_compared_exactly(queries: torch.Tensor) -> None:
    error = max_relative_row_error(queries.bfloat16(), queries)
    assert 1e-4 < error < 2**-8


def test_nothing_to_compare_is_refused(queries: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="shape"):
        max_relative_row_error(queries[:, :4], queries)
    with pytest.raises(ValueError, match="no rows"):
        max_relative_row_error(queries[:, :0], queries[:, :0])
    with pytest.raises(ValueError, match="no rows"):
        max_relative_row_error(queries[0, 0], queries[0, 0])
