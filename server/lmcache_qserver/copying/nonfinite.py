"""NaN and Inf in what has been copied: found by the lane that copied it, told by the object's metadata, never dropped.

Of a floating-point number as an integer, the exponent's bits being all ones says that it is not finite. So among the
positive numbers those that are not finite are the largest as *signed* integers, and among all those with the sign bit
the largest as *unsigned* ones: two maxima tell whether there is any, at the speed of reading, without an array in
between. Only where there is one, rows are counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PART_BYTES = 256 << 10
"""Looked at twice while it is in a core's own cache."""


class _Form(NamedTuple):
    """How a type writes what is not finite: `signed` and above without a sign, `unsigned` and above with one."""

    signed: int
    unsigned: int
    nbytes: int


FORMS: dict[str, _Form] = {
    "float64": _Form(0x7FF0 << 48, 0xFFF0 << 48, 8),
    "float32": _Form(0x7F80 << 16, 0xFF80 << 16, 4),
    "bfloat16": _Form(0x7F80, 0xFF80, 2),
    "float16": _Form(0x7C00, 0xFC00, 2),
    "float8_e5m2": _Form(0x7C, 0xFC, 1),
    "float8_e4m3fn": _Form(0x7F, 0xFF, 1),  # has no Inf, and one NaN of each sign
}
"""By names of `DTYPE_BYTES`; types that are not here are finite always."""


class RowForm(NamedTuple):
    """What one row (of one token in one layer) is: its elements' type (a name of `DTYPE_BYTES`), and its bytes."""

    dtype: str
    nbytes: int


def nonfinite_rows(copied: npt.NDArray[np.uint8], row: RowForm) -> int:
    """How many rows (of one token in one layer) hold NaN or Inf.

    Args:
        copied: uint8, rows one after the other; contiguous, aligned to its elements.
    """
    form = FORMS.get(row.dtype)
    if form is None or not copied.size:
        return 0
    signed, unsigned = copied.view(f"i{form.nbytes}"), copied.view(f"u{form.nbytes}")
    step = PART_BYTES // form.nbytes
    if not any(
        signed[at : at + step].max() >= form.signed
        or unsigned[at : at + step].max() >= form.unsigned
        for at in range(0, len(signed), step)
    ):
        return 0
    rows = copied.size // row.nbytes
    bad = (signed.reshape(rows, -1).max(axis=1) >= form.signed) | (
        unsigned.reshape(rows, -1).max(axis=1) >= form.unsigned
    )
    return int(bad.sum())
