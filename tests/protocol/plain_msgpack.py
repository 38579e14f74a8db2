"""A msgpack packer of our own, to check the real one against: shortest forms only, floats of 64 bits.

Golden files are JSON, which has no bytes; there `{"$bin": hex}` stands for bytes and
`{"$ext": [code, hex]}` for an extension value.
"""

from __future__ import annotations

import struct
from typing import Any


class Ext:
    """An extension value."""

    def __init__(self, code: int, data: bytes) -> None:
        self.code = code
        self.data = data


def from_json(value: Any) -> Any:
    """JSON to plain Python values, with bytes and extensions in place."""
    if isinstance(value, list):
        return [from_json(element) for element in value]
    if isinstance(value, dict):
        if value.keys() == {"$bin"}:
            return bytes.fromhex(value["$bin"])
        if value.keys() == {"$ext"}:
            code, data = value["$ext"]
            return Ext(code, bytes.fromhex(data))
        return {key: from_json(element) for key, element in value.items()}
    return value


def pack(value: Any) -> bytes:
    """The shortest msgpack form of a plain value."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return _pack_int(value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, str):
        raw = value.encode()
        return _head(len(raw), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + raw
    if isinstance(value, bytes):
        return _head(len(value), 0, 0, (0xC4, 0xC5, 0xC6)) + value
    if isinstance(value, Ext):
        return _pack_ext(value)
    if isinstance(value, dict):
        body = b"".join(pack(key) + pack(element) for key, element in value.items())
        return _head(len(value), 0x80, 16, (None, 0xDE, 0xDF)) + body
    return _head(len(value), 0x90, 16, (None, 0xDC, 0xDD)) + b"".join(map(pack, value))


def _head(length: int, fix: int, fix_limit: int, tags: tuple[int | None, int, int]) -> bytes:
    if length < fix_limit:
        return bytes([fix | length])
    for tag, form, limit in zip(tags, (">B", ">H", ">I"), (1 << 8, 1 << 16, 1 << 32), strict=True):
        if tag is not None and length < limit:
            return bytes([tag]) + struct.pack(form, length)
    raise ValueError(length)


def _pack_int(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">b", value)
    forms = ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
    if value < 0:
        forms = ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))
    for tag, form in forms:
        try:
            return bytes([tag]) + struct.pack(form, value)
        except struct.error:
            continue
    raise ValueError(value)


def _pack_ext(value: Ext) -> bytes:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(len(value.data))
    head = _head(len(value.data), 0, 0, (0xC7, 0xC8, 0xC9)) if fixed is None else bytes([fixed])
    return head + struct.pack(">b", value.code) + value.data
