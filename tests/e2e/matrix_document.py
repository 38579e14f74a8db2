"""docs/capture-matrix.md, written by tests when QSERVER_MATRIX is set: a table for each of the files that they are in.

A case that is run again replaces its row; one that is skipped (its kernels need another processor) keeps it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "capture-matrix.md"
TITLES = ("# What has been captured, and compared", "## Shapes", "## Selection")
"""Of the sections, in this order."""


def write_row(title: str, head: str, *cells: object, behind: str = "") -> None:
    """Write one row of a section's table.

    Args:
        title: one of `TITLES`.
        head: what stands between the title and the rows.
        cells: of the row; the first one names it.
        behind: what stands behind the table.
    """
    if not os.environ.get("QSERVER_MATRIX"):
        return
    sections = _sections()
    row = "| " + " | ".join(map(str, cells)) + " |"
    rows = {_name(line): line for line in [*_rows(sections.get(title, "")), row]}
    sections[title] = f"\n{head}" + "".join(f"{line}\n" for line in rows.values()) + behind
    found = [f"{one}\n{sections[one]}" for one in TITLES if one in sections]
    DOCUMENT.write_text("\n".join(found))


def _sections() -> dict[str, str]:
    """By title, what stands below it."""
    _, *parts = re.split(r"^(#+ .*)\n", DOCUMENT.read_text(), flags=re.MULTILINE)
    bodies = [body.rstrip("\n") + "\n" for body in parts[1::2]]
    return dict(zip(parts[::2], bodies, strict=True))


def _rows(section: str) -> list[str]:
    _, _, below = section.partition("\n|---")
    return [line for line in below.splitlines()[1:] if line.startswith("|")]


def _name(row: str) -> str:
    return row.split("|")[1].strip()
