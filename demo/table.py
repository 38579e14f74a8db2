"""A plain-text table: fixed width, aligned, readable in a log."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence


def render_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str] | None = None) -> str:
    """`rows` as lines of text, one column per key (in the order keys first appear, or as `columns` says).

    Columns of numbers are right-aligned, others left; an absent or None cell is "-". Numbers are shortened to what a
    reader compares (see `cell_text`); pass a str to show a value as it is. No trailing newline.
    """
    names = (
        list(columns)
        if columns is not None
        else list(dict.fromkeys(name for row in rows for name in row))
    )
    texts = [[cell_text(row.get(name)) for name in names] for row in rows]
    widths = [
        max([_width(name), *(_width(line[i]) for line in texts)]) for i, name in enumerate(names)
    ]
    to_right = [_is_numeric([row.get(name) for row in rows]) for name in names]

    def line(cells: Sequence[str]) -> str:
        padded = (
            _pad(cell, width, right)
            for cell, width, right in zip(cells, widths, to_right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(names), "  ".join("-" * width for width in widths), *map(line, texts)])


def cell_text(value: object) -> str:
    """1234567 → "1,234,567", 0.98765 → "0.988", 6.2e-06 → "6.2e-06", True → "yes", None → "-", else str()."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if abs(value) >= 999.5:
            return f"{value:,.0f}"
        if 0 < abs(value) < 0.001:
            return f"{value:.1e}"
        return f"{value:.3g}"
    return " ".join(str(value).split())  # one line


def _is_numeric(values: Sequence[object]) -> bool:
    present = [value for value in values if value is not None]
    return bool(present) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) for v in present
    )


def _pad(text: str, width: int, to_right: bool) -> str:
    fill = " " * (width - _width(text))
    return fill + text if to_right else text + fill


def _width(text: str) -> int:
    """Terminal columns: East Asian wide characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )
