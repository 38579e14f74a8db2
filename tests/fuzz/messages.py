"""One fuzzer input ↔ messages: [number of frames, then each frame behind its length], again and again.

Bytes that don't fit are no error: what is missing is empty, so every input means something.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

Message = list[bytes]
MAX_MESSAGES = 16


def join(messages: Sequence[Sequence[bytes]]) -> bytes:
    """The input that `split` makes these messages of."""
    parts = []
    for frames in messages:
        parts.append(bytes([len(frames)]))
        parts += [len(frame).to_bytes(2, "big") + frame for frame in frames]
    return b"".join(parts)


def split(data: bytes) -> list[Message]:
    """At most `MAX_MESSAGES` messages of at most 255 frames."""
    messages: list[Message] = []
    at = 0
    while at < len(data) and len(messages) < MAX_MESSAGES:
        count, at = data[at], at + 1
        frames = []
        for _ in range(count):
            if at >= len(data):
                break
            length, at = int.from_bytes(data[at : at + 2], "big"), at + 2
            frames.append(data[at : at + length])
            at += length
        messages.append(frames)
    return messages


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Change one value of one frame, at any depth, and keep all around it valid."""
    messages = split(data)
    places = [(m, f) for m, frames in enumerate(messages) for f in range(len(frames))]
    if not places:
        return data
    m, f = dice.choice(places)
    try:
        value = msgspec.msgpack.decode(messages[m][f])
        messages[m][f] = msgspec.msgpack.encode(_change(value, dice))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, OverflowError):
        messages[m][f] = dice.randbytes(dice.randrange(8))
    if dice.random() < 0.1:
        messages.insert(dice.randrange(len(messages) + 1), dice.choice(messages))
    return join([frames[:255] for frames in messages])


_EDGES: tuple[Any, ...] = (
    *(sign * (1 << bits) - less for bits in (0, 8, 31, 32, 62, 63) for sign in (1, -1) for less in (0, 1)),
    *("", "a", "_default", "../" * 9, "\U0001f511", b"", bytes(16), bytes(32), None, True, [], {}, 0.5),
)  # fmt: skip


def _change(value: Any, dice: random.Random) -> Any:
    if isinstance(value, dict) and value and dice.random() < 0.9:
        name = dice.choice(list(value))
        return {**value, name: _change(value[name], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        if dice.random() < 0.3:
            return value[:place] + [value[place]] * dice.randrange(4) + value[place + 1 :]
        return [*value[:place], _change(value[place], dice), *value[place + 1 :]]
    if isinstance(value, int) and dice.random() < 0.5:
        return max(-(1 << 63), min(value + dice.choice((-16, -1, 1, 16)), (1 << 64) - 1))
    edge = dice.choice(_EDGES)
    return max(-(1 << 63), edge) if type(edge) is int else edge
