"""Writes the generated parts of PROTOCOL.md: the tables of operations, structures, packets and limits.

    python docs/generate_protocol.py            rewrite them in place
    python docs/generate_protocol.py --check    exit 1 if the file is out of date

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`; everything else is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect as mi

from lmcache_qprotocol import lifeline, limits
from lmcache_qprotocol.messages import ReplyMeta
from lmcache_qprotocol.operations import OPERATIONS, SILENCE, Operation

PROTOCOL = Path(__file__).parents[1] / "PROTOCOL.md"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


# --- types in words -------------------------------------------------------------------------------


def in_words(info: mi.Type) -> str:
    """A type as PROTOCOL.md writes it, e.g. `array (<= 256) of int 0..2^31-1`."""
    return _WORDS[type(info)](info)


def number(value: int) -> str:
    """An integer, with large ones around a power of two written as such."""
    for shift in range(10, 64):
        for base, sign in ((1 << shift, ""), (-(1 << shift), "-")):
            if value == base:
                return f"{sign}2^{shift}"
            if value == base - 1 and not sign:
                return f"2^{shift}-1"
    return str(value)


def _int_words(info: Any) -> str:
    low = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
    high = info.le if info.le is not None else None if info.lt is None else info.lt - 1
    if low is None and high is None:
        return "int"
    return f"int {'' if low is None else number(low)}..{'' if high is None else number(high)}"


def _float_words(info: Any) -> str:
    return "float" if info.gt is None else f"float > {info.gt}"


def _size_words(info: Any) -> str:
    least, most = info.min_length or 0, info.max_length
    if most is None:
        return f" (>= {least})" if least else ""
    if least == most:
        return f" ({most})"
    return f" ({least}..{number(most)})" if least else f" (<= {number(most)})"


def _union_words(info: Any) -> str:
    # nil last, whatever the order in which the source names it.
    kinds = sorted(info.types, key=lambda kind: isinstance(kind, mi.NoneType))
    return " or ".join(in_words(kind) for kind in kinds)


def _array_words(info: Any) -> str:
    return f"array{_size_words(info)} of {in_words(info.item_type)}"


def _fixed_array_words(info: Any) -> str:
    return "array [" + ", ".join(in_words(kind) for kind in info.item_types) + "]"


def _map_words(info: Any) -> str:
    return f"map{_size_words(info)} of {in_words(info.key_type)} to {in_words(info.value_type)}"


_WORDS: dict[type, Callable[[Any], str]] = {
    mi.NoneType: lambda info: "nil",
    mi.BoolType: lambda info: "bool",
    mi.IntType: _int_words,
    mi.FloatType: _float_words,
    mi.StrType: lambda info: "str" + _size_words(info),
    mi.BytesType: lambda info: "bin" + _size_words(info),
    mi.RawType: lambda info: "anything",
    mi.MemoryViewType: lambda info: "bulk",
    mi.ExtType: lambda info: "ext",
    mi.LiteralType: lambda info: " or ".join(f"`{value}`" for value in info.values),
    mi.EnumType: lambda info: info.cls.__name__,
    mi.StructType: lambda info: info.cls.__name__,
    mi.UnionType: _union_words,
    mi.TupleType: _fixed_array_words,
    mi.VarTupleType: _array_words,
    mi.DictType: _map_words,
}


# --- tables ---------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def operations_table() -> str:
    """One row per operation."""
    head = ("name", "id", "payloads", "result", "failure, legacy", "purpose")
    return table(head, map(_operation_row, OPERATIONS))


def _operation_row(operation: Operation) -> list[str]:
    payloads = [in_words(mi.type_info(kind)) for kind in operation.payloads]
    for place in range(operation.required, len(payloads)):
        payloads[place] = f"[{payloads[place]}]"
    numbered = "<br>".join(f"{place}: {words}" for place, words in enumerate(payloads))
    legacy_id = "" if operation.legacy_id is None else str(operation.legacy_id)
    result = "none" if operation.result is None else in_words(mi.type_info(operation.result))
    failure = "silence"
    if operation.legacy_failure is not SILENCE:
        failure = f"`{_plain(operation.legacy_failure)}`"
    if operation.legacy_id is None:
        failure = ""
    return [f"`{operation.name}`", legacy_id, numbered, result, failure, operation.purpose]


def _plain(failure: Any) -> str:
    """A legacy failure as its two elements (or its one value)."""
    if isinstance(failure, msgspec.Struct):
        event, ok = msgspec.structs.astuple(failure)[:2]
        return f'[bin "{event.decode()}", {str(ok).lower()}]'
    return str(failure).lower()


def structures() -> str:
    """Every structure that an operation or a reply carries, in the order of first use."""
    found: dict[type, Any] = {}
    for operation in OPERATIONS:
        for kind in (*operation.payloads, operation.result):
            _collect(mi.type_info(kind), found)
    _collect(mi.type_info(ReplyMeta), found)
    return "\n".join(_structure(info) for info in found.values())


def _collect(info: Any, found: dict[type, Any]) -> None:
    if isinstance(info, mi.StructType):
        if info.cls not in found:
            found[info.cls] = info
            for field in info.fields:
                _collect(field.type, found)
        return
    inner = [getattr(info, name, None) for name in ("item_type", "key_type", "value_type")]
    for kind in (*inner, *getattr(info, "types", ()), *getattr(info, "item_types", ())):
        if kind is not None:
            _collect(kind, found)


def _structure(info: Any) -> str:
    shape = "array, in this order" if info.array_like else "map"
    rows = [[f"`{field.name}`", in_words(field.type), _default(field)] for field in info.fields]
    return f"**{info.cls.__name__}** ({shape})\n\n" + table(("field", "type", "default"), rows)


def _default(field: Any) -> str:
    if field.required:
        return ""
    value = field.default
    if value is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "left out"
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    if isinstance(value, Enum):
        value = value.value
    words: dict[Any, str] = {None: "nil", True: "true", False: "false", "": '""', b"": "empty"}
    if isinstance(value, int) and not isinstance(value, bool):
        return number(value)
    if isinstance(value, str) and value:
        return f'"{value}"'
    return words.get(value, "empty") if isinstance(value, str | bytes | bool | None) else "empty"


def packets() -> str:
    """The lifeline's packets; `kind` tells them apart."""
    rows = []
    for cls in get_args(lifeline.Packet):
        info: Any = mi.type_info(cls)
        fields = "<br>".join(f"`{field.name}`: {in_words(field.type)}" for field in info.fields)
        rows.append([f"`{info.tag}`", fields])
    return table(("kind", "fields"), rows)


def limits_table() -> str:
    """All constants of limits.py, and what `hello` announces."""
    rows = [
        [f"`{name}`", number(value)]
        for name, value in vars(limits).items()
        if name.startswith("MAX_")
    ]
    rows.append(["`MAX_PACKET_BYTES`", number(lifeline.MAX_PACKET_BYTES)])
    return table(("limit", "value"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "operations": operations_table,
    "structures": structures,
    "packets": packets,
    "limits": limits_table,
}


def updated(text: str) -> str:
    """`text` with every generated part made anew.

    Raises:
        KeyError: a marker names a part that nobody generates.
    """
    return PART.sub(lambda match: match[1] + PARTS[match[2]]() + match[3], text)


def main() -> int:
    """Rewrites or checks PROTOCOL.md; 1 if it was out of date and is only to be checked."""
    text = PROTOCOL.read_text()
    fresh = updated(text)
    if sys.argv[1:] == ["--check"]:
        return int(fresh != text)
    PROTOCOL.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
