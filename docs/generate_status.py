"""Writes docs/status.md's tables and docs/status.schema.json, from the types of `/status`.

python docs/generate_status.py            rewrite them in place
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from lmcache_qserver.status_report import StatusReport

PAGE = Path(__file__).parent / "status.md"
SCHEMA = Path(__file__).parent / "status.schema.json"
PART = re.compile(r"(<!-- generated: fields -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD_FIRST = ("version", "server")
"""Fields of the whole page that come first, on the page as in the answer."""


def schema() -> str:
    """docs/status.schema.json."""
    (whole,), parts = msgspec.json.schema_components([StatusReport], ref_template="#/$defs/{name}")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "/status of lmcache-qserver",
        **whole,
        "$defs": parts,
    }
    return json.dumps(document, indent=1) + "\n"


def updated(text: str) -> str:
    """The page with fresh tables."""
    return PART.sub(lambda match: match[1] + tables() + match[2], text)


def tables() -> str:
    """One table for each structure, the whole page first."""
    lines: list[str] = []
    for kind in structures(StatusReport):
        name = "the whole" if kind is StatusReport else f"`{kind.__name__}`"
        doc = (kind.__doc__ or "").strip()
        lines += [f"**{name}**: {doc}", "", "| field | type | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{field}` | {words} | {text} |" for field, words, text in fields(kind)]
        lines.append("")
    return "\n".join(lines)


def structures(kind: type[Any]) -> list[type[Any]]:
    """The structure and all that it is made of, each once."""
    found = [kind]
    for hint in get_type_hints(kind).values():
        for part in _parts(hint):
            found += [one for one in structures(part) if one not in found]
    return found


def fields(kind: type[Any]) -> Iterator[tuple[str, str, str]]:
    """(name, type in words, meaning) of each field."""
    hints = get_type_hints(kind, include_extras=True)
    for name in sorted(hints, key=lambda one: one not in HEAD_FIRST):
        hint = hints[name]
        assert get_origin(hint) is Annotated, f"{kind.__name__}.{name} has no description"
        plain, meta = get_args(hint)
        yield name, in_words(plain), meta.description


def in_words(hint: Any) -> str:
    """A type for people."""
    parts = get_args(hint)
    if get_origin(hint) is list:
        return f"array of {in_words(parts[0])}"
    if get_origin(hint) is dict:
        return f"map of {in_words(parts[0])} to {in_words(parts[1])}"
    if parts:
        return " or ".join(map(in_words, parts))
    if hint is Any:
        return "anything"
    return f"`{hint.__name__}`" if issubclass(hint, msgspec.Struct) else str(hint.__name__)


def _parts(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for part in get_args(hint):
        yield from _parts(part)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
    SCHEMA.write_text(schema())
