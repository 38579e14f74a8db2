"""NaN and Inf among a chunk's rows, of every type that has them; exactly the rows that hold some are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qserver.copying.nonfinite import FORMS, PART_BYTES, RowForm, nonfinite_rows

FLOATS = [name for name in DTYPE_BYTES if "float" in name]
WIDTH = 24


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def by_torch(data: np.ndarray, dtype: str) -> int:
    """An independent count: torch's own idea of what is finite, in float64."""
    values = torch.from_numpy(data.copy()).view(getattr(torch, dtype)).to(torch.float64)
    return int((~values.isfinite()).reshape(-1, WIDTH).any(dim=1).sum())


def test_every_float_is_known() -> None:
    assert set(FORMS) == set(FLOATS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_every_bit_pattern_of_a_small_type(dtype: str) -> None:
    size = DTYPE_BYTES[dtype]
    patterns = np.arange(1 << 8 * size, dtype=f"u{size}")
    for start in range(0, len(patterns), 1 << 12):
        some = patterns[start : start + (1 << 12)]
        rows = np.zeros((len(some), WIDTH), dtype=some.dtype)
        rows[np.arange(len(some)), np.arange(len(some)) % WIDTH] = some
        data = rows.reshape(-1).view(np.uint8)
        assert nonfinite_rows(data, RowForm(dtype, WIDTH * size)) == by_torch(data, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_bits(dtype: str, data: st.DataObject) -> None:
    size = DTYPE_BYTES[dtype]
    raw = data.draw(st.binary(min_size=WIDTH * size * 3, max_size=WIDTH * size * 3))
    array = np.frombuffer(raw, np.uint8).copy()
    assert nonfinite_rows(array, RowForm(dtype, WIDTH * size)) == by_torch(array, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", [0, -1, PART_BYTES // 2])
def test_one_number_in_a_large_chunk(dtype: str, sign: int, place: int) -> None:
    values = torch.randn(64 * 1024, WIDTH).clamp(-6, 6).to(getattr(torch, dtype))
    row = RowForm(dtype, WIDTH * DTYPE_BYTES[dtype])
    assert nonfinite_rows(bytes_of(values), row) == 0
    bad = torch.tensor([sign * float("nan")]).to(values.dtype)
    if sign < 0:
        # A negative NaN, which x86 makes of 0 / 0: set the sign by hand.
        bits = bad.view(torch.uint8)
        bits[-1] |= 0x80
    values.view(-1)[place] = bad[0]
    raw = values.view(torch.uint8).view(-1, values.element_size())
    raw[place] = bad.view(torch.uint8)
    assert nonfinite_rows(bytes_of(values), row) == 1


@pytest.mark.parametrize("dtype", [name for name in DTYPE_BYTES if "float" not in name])
def test_integers_are_finite(dtype: str) -> None:
    data = np.full(WIDTH * 8, 0xFF, dtype=np.uint8)
    assert nonfinite_rows(data, RowForm(dtype, WIDTH * DTYPE_BYTES[dtype])) == 0


def test_largest_finite_numbers_are_finite() -> None:
    for dtype in FLOATS:
        info = torch.finfo(getattr(torch, dtype))
        values = torch.tensor([info.max, info.min] * WIDTH, dtype=torch.float64)
        data = bytes_of(values.to(getattr(torch, dtype)))
        assert nonfinite_rows(data, RowForm(dtype, WIDTH * DTYPE_BYTES[dtype])) == 0, dtype
