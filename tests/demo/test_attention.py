"""Attention from queries and keys against plain loops, and what a comparison must notice."""

import math
from collections.abc import Callable

import pytest
import torch

from demo import attention
from demo.attention import (
    SINK_TOKENS,
    attention_weights,
    compare_attention,
    largest_difference,
    median_head,
    sink_mass,
)

LAYERS, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 7, 6, 2, 4


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def query() -> torch.Tensor:
    return random(LAYERS, TOKENS, HEADS, HEAD_DIM, seed=1)


@pytest.fixture
def key() -> torch.Tensor:
    return random(LAYERS, TOKENS, KV_HEADS, HEAD_DIM, seed=2)


def by_loops(query: torch.Tensor, key: torch.Tensor) -> list[list[list[float]]]:
    """[heads][tokens][tokens] of one layer in Python's own floats, number by number."""
    q, k = query.tolist(), key.tolist()
    heads = []
    for head in range(HEADS):
        shared = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}[head]  # three query heads to a key head
        rows = []
        for i in range(TOKENS):
            scores = []
            for j in range(i + 1):
                product = sum(q[i][head][d] * k[j][shared][d] for d in range(HEAD_DIM))
                scores.append(math.exp(product / math.sqrt(HEAD_DIM)))
            rows.append([score / sum(scores) for score in scores] + [0.0] * (TOKENS - i - 1))
        heads.append(rows)
    return heads


@pytest.mark.parametrize("rows", [1, 3, TOKENS, 128])
def test_weights_are_what_loops_say(
    query: torch.Tensor, key: torch.Tensor, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_ROWS", rows)
    weights = attention_weights(query[0], key[0])
    assert (weights.shape, weights.dtype) == ((HEADS, TOKENS, TOKENS), torch.float64)
    wanted = torch.tensor(by_loops(query[0], key[0]), dtype=torch.float64)
    assert largest_difference(weights, wanted) < 1e-14


def test_a_head_for_every_query_head_and_one_for_all(query: torch.Tensor) -> None:
    keys = random(TOKENS, HEADS, HEAD_DIM, seed=3)
    every = attention_weights(query[0], keys)
    one = attention_weights(query[0], keys[:, 4:5])
    for head in range(HEADS):
        alone = attention_weights(query[0][:, head : head + 1], keys[:, head : head + 1])
        assert largest_difference(every[head], alone[0]) < 1e-14
    assert largest_difference(one[4], every[4]) < 1e-14


def test_scores_too_large_for_exp_are_no_trouble(query: torch.Tensor, key: torch.Tensor) -> None:
    weights = attention_weights(query[0] * 1e3, key[0] * 1e3)
    assert torch.isfinite(weights).all()
    assert largest_difference(weights.sum(-1), torch.ones(HEADS, TOKENS)) < 1e-12


@pytest.mark.parametrize("shape", [(TOKENS - 1, 2, 4), (TOKENS, 2, 3), (TOKENS, 4, 4)])
def test_keys_that_do_not_go_with_the_queries_are_refused(
    query: torch.Tensor, shape: tuple[int, int, int]
) -> None:
    with pytest.raises(ValueError, match="don't go with"):
        attention_weights(query[0], torch.ones(shape))


def test_sink_mass_is_what_loops_say(query: torch.Tensor, key: torch.Tensor) -> None:
    loops = by_loops(query[1], key[1])
    wanted = [
        sum(sum(rows[i][:4]) for i in (4, 5, 6)) / 3  # positions that have more to look at
        for rows in loops
    ]
    mass = sink_mass(attention_weights(query[1], key[1]))
    assert mass.tolist() == pytest.approx(wanted, abs=1e-14)


def test_sink_mass_of_even_attention_is_the_share_of_the_first_four() -> None:
    even = torch.ones(9, 9).tril()
    even = even / even.sum(-1, keepdim=True)
    assert sink_mass(even[None]).tolist() == pytest.approx(
        [sum(4 / count for count in range(5, 10)) / 5]
    )


def test_sink_mass_needs_a_token_beside_the_sink() -> None:
    with pytest.raises(ValueError, match="none beside"):
        sink_mass(torch.eye(SINK_TOKENS)[None])


def test_median_head_is_the_one_in_the_middle() -> None:
    mass = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.8, 0.7]])
    assert median_head(mass[:1]) == (0, 2)
    assert median_head(mass) == (1, 2)


def test_difference_is_the_worst_one_and_infinite_where_not_finite() -> None:
    reference = torch.zeros(2, 3)
    ours = reference.clone()
    ours[1, 2] = -0.25
    assert largest_difference(ours, reference) == 0.25
    for value in (math.nan, math.inf):
        ours[0, 0] = value
        assert largest_difference(ours, reference) == math.inf
        assert largest_difference(reference, ours) == math.inf
        assert largest_difference(ours, ours) == math.inf
    with pytest.raises(ValueError, match="compare"):
        largest_difference(ours, reference[:1])
    with pytest.raises(ValueError, match="compare"):
        largest_difference(ours[:0], reference[:0])


def eager(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    """A reference per layer, by the loops, in the type that eager attention has."""
    return [torch.tensor(by_loops(q, k)) for q, k in zip(query, key, strict=True)]


def test_comparison_of_what_agrees(query: torch.Tensor, key: torch.Tensor) -> None:
    found = compare_attention(query, key, eager(query, key))
    assert found.mass.shape == (LAYERS, HEADS)
    assert found.weight_error < 1e-7
    assert found.mass_error < 1e-7
    assert found.beyond == 0
    assert found.mass[1].tolist() == sink_mass(attention_weights(query[1], key[1])).tolist()


def test_comparison_of_a_prefix(query: torch.Tensor, key: torch.Tensor) -> None:
    whole = eager(query, key)
    assert compare_attention(query[:, :5], key[:, :5], whole).weight_error < 1e-7


def wrong_token(key: torch.Tensor) -> torch.Tensor:
    return torch.cat([key[:, :3], key[:, 3:5].flip(1), key[:, 5:]], dim=1)


def wrong_layer(key: torch.Tensor) -> torch.Tensor:
    return key.flip(0)


def wrong_head(key: torch.Tensor) -> torch.Tensor:
    return key.flip(2)


def one_element_of_the_last_layer(key: torch.Tensor) -> torch.Tensor:
    broken = key.clone()
    broken[-1, 3, 1, 2] += 1e-3
    return broken


def not_a_number(key: torch.Tensor) -> torch.Tensor:
    broken = key.clone()
    broken[0, 3, 1, 2] = math.nan
    return broken


BROKEN = (wrong_token, wrong_layer, wrong_head, one_element_of_the_last_layer, not_a_number)


@pytest.mark.parametrize("broken", BROKEN)
def test_comparison_notices_broken_keys(
    query: torch.Tensor, key: torch.Tensor, broken: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    found = compare_attention(query, broken(key), eager(query, key))
    assert found.weight_error > 1e-5
    assert found.mass_error > 1e-5
    assert found.beyond > 0


def test_comparison_counts_what_is_off(query: torch.Tensor, key: torch.Tensor) -> None:
    reference = eager(query, key)
    reference[0][2, 5, 1] += 2e-5
    reference[1][4, 6, 6] -= 3e-5
    reference[1][4, 6, 0] = math.nan
    found = compare_attention(query, key, reference)
    assert found.weight_error == math.inf
    assert (found.beyond, found.seen) == (3, LAYERS * HEADS * (1 + 2 + 3 + 4 + 5 + 6 + 7))
