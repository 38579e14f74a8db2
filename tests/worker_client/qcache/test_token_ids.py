"""Token ids in all the forms in which callers have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcache_qclient.qcache.token_ids import token_list


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        [np.int64(1), torch.tensor(2), 3],
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
    ],
)
def test_forms(token_ids: Any) -> None:
    ids = token_list(token_ids)
    assert ids == [1, 2, 3]
    assert {type(token) for token in ids} == {int}


def test_empty() -> None:
    assert token_list([]) == token_list(np.array([])) == token_list(torch.tensor([])) == []


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        ("123", TypeError),
        (17, TypeError),
        (None, TypeError),
        ({1, 2}, TypeError),
        ([1.0], TypeError),
        ([True], TypeError),
        ([[1, 2]], TypeError),
        (np.array([1.5]), TypeError),
        (np.array([True]), TypeError),
        (torch.tensor([1.0]), TypeError),
        (np.array([[1, 2]]), ValueError),
        (torch.tensor([[1, 2]]), ValueError),
        (torch.tensor(1), ValueError),
        ([-1], ValueError),
        ([1 << 32], ValueError),
    ],
)
def test_what_is_no_sequence_of_token_ids(token_ids: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        token_list(token_ids)
