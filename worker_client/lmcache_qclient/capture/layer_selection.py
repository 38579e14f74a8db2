"""Which layers of a model: "0,5,-1", "4-7", "::2", as people write selections of pages, list items and slices.

    5  -1          one layer; negative ones count from the end
    4-7            a range, its end included
    4:8  ::2  -4:  a slice as Python has it, its end excluded

Several of them between commas select what any of them does. Layers are numbered by their place in the model, whatever
the rank that has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_RANGE = re.compile(r"(-?\d+)-(-?\d+)")
_SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(-?\d*))?")
_ONE = re.compile(r"-?\d+")


@dataclass(frozen=True)
class LayerSelection:
    """A parsed selection; made by `parse_layers`."""

    text: str
    terms: tuple[int | tuple[int, int] | slice, ...] = field(compare=False)

    def __str__(self) -> str:
        return self.text

    def of(self, count: int) -> frozenset[int]:
        """The layers that it selects of a model with layers 0 .. count - 1.

        Raises:
            ValueError: the model has no such layer, or none is selected.
        """
        found: set[int] = set()
        for term in self.terms:
            if isinstance(term, slice):
                found.update(range(count)[term])
                continue
            first, last = (self._number(end, count) for end in _ends(term))
            if last < first:
                raise ValueError(f"layers {self.text!r}: a range ends before it begins")
            found.update(range(first, last + 1))
        if not found:
            raise ValueError(f"layers {self.text!r} select none of the model's {count} layers")
        return frozenset(found)

    def _number(self, layer: int, count: int) -> int:
        if not -count <= layer < count:
            raise ValueError(
                f"layers {self.text!r}: the model has layers 0 to {count - 1}, or -{count} to -1, not {layer}"
            )
        return layer % count


def parse_layers(value: object) -> LayerSelection:
    """Read a selection; the head of this file says how it is written.

    Args:
        value: a text, a whole number, or a list of these.

    Raises:
        ValueError: it is something else.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(part, bool) or not isinstance(part, int | str) for part in parts):
        raise _wrong(value)
    text = ",".join(str(part).strip() for part in parts)
    terms = tuple(_term(term.strip(), value) for term in text.split(","))
    return LayerSelection(text, terms)


def _term(text: str, value: object) -> int | tuple[int, int] | slice:
    if _ONE.fullmatch(text):
        return int(text)
    if (ends := _RANGE.fullmatch(text)) is not None:
        return int(ends[1]), int(ends[2])
    if (parts := _SLICE.fullmatch(text)) is not None:
        start, stop, step = (int(part) if part else None for part in parts.groups())
        if step != 0:
            return slice(start, stop, step)
    raise _wrong(value)


def _ends(term: int | tuple[int, int]) -> tuple[int, int]:
    return (term, term) if isinstance(term, int) else term


def _wrong(value: object) -> ValueError:
    return ValueError(
        f'layers are written as "0,5,-1", as a range "4-7" (both ends included) or a slice "::2", not {value!r}'
    )
