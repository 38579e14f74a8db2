"""Selections of layers: how they are written, and what they select of a model of ten layers."""

from __future__ import annotations

import pytest

from lmcache_qclient.capture.layer_selection import parse_layers


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ("0", {0}),
        (5, {5}),
        ("0,5,-1", {0, 5, 9}),
        ([0, 5, -1], {0, 5, 9}),
        (["4-7", 1], {1, 4, 5, 6, 7}),
        ("4-7", {4, 5, 6, 7}),
        ("-3--1", {7, 8, 9}),
        (" 2 , 3-3", {2, 3}),
        ("::2", {0, 2, 4, 6, 8}),
        ("1:9:4", {1, 5}),
        ("-2:", {8, 9}),
        (":3", {0, 1, 2}),
        ("5:100", {5, 6, 7, 8, 9}),
        ("::-3", {9, 6, 3, 0}),
    ],
)
def test_what_is_selected(value: object, layers: set[int]) -> None:
    assert parse_layers(value).of(10) == layers


@pytest.mark.parametrize(
    "value", ["", "a", "1,,2", "1-", "1.5", "::0", "1-2-3", None, True, 1.0, {}, [], [None], [True]]
)
def test_what_is_no_selection_is_refused_with_the_forms(value: object) -> None:
    with pytest.raises(ValueError, match=r'"0,5,-1".*"4-7".*"::2"'):
        parse_layers(value)


@pytest.mark.parametrize("value", ["10", "-11", "4-10", "0,99"])
def test_layers_that_the_model_does_not_have(value: str) -> None:
    with pytest.raises(ValueError, match="0 to 9"):
        parse_layers(value).of(10)


@pytest.mark.parametrize(("value", "said"), [("7-4", "ends before"), ("10:", "select none")])
def test_selections_of_nothing(value: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_layers(value).of(10)
