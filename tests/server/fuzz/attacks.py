"""Hypothesis strategies for hostile messages.

From noise to what is almost right: random frames; valid messages with a frame, a field or a byte changed; valid
operations with whatever ids, ranges, hashes and lists, up to the limits and beyond.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from lmcache_qprotocol.codec import encode
from lmcache_qprotocol.keys import KeyFamily
from lmcache_qprotocol.limits import MAX_CHUNKS, MAX_FRAMES, MAX_PARTIALS, MAX_SALT_CHARS
from lmcache_qprotocol.messages import ChunkQuery, RangeKey, StoreProof
from lmcache_qprotocol.operations import OPERATIONS, Operation
from tests.protocol.plain_msgpack import pack
from tests.protocol.strategies import of_type, plain_values

GOLDEN = Path(__file__).parents[2] / "golden/messages.json"
Frames = list[bytes]


def golden_requests() -> list[Frames]:
    """The golden vectors' requests, frame by frame."""
    vectors = json.loads(GOLDEN.read_text())["messages"]
    return [
        [bytes.fromhex(frame) for frame in vector["frames"]]
        for vector in vectors
        if vector["kind"] == "request"
    ]


@functools.cache
def _payload(operation: Operation, index: int) -> st.SearchStrategy[bytes]:
    kind = operation.payloads[index]
    return st.binary(max_size=64) if kind is memoryview else of_type(kind).map(encode)


@st.composite
def valid_requests(draw: st.DrawFn) -> Frames:
    """Well-formed requests of any operation, with whatever values the types allow."""
    operation = draw(st.sampled_from(OPERATIONS))
    count = draw(st.integers(operation.required, len(operation.payloads)))
    op = operation.name if operation.legacy_id is None else operation.legacy_id
    payloads = [draw(_payload(operation, index)) for index in range(count)]
    return [encode(draw(st.integers(0, 99))), encode(op), *payloads]


@st.composite
def changed_bytes(draw: st.DrawFn) -> Frames:
    """A golden request in which some bytes of one frame are others, or fewer, or more."""
    frames = list(draw(st.sampled_from(golden_requests())))
    index = draw(st.integers(0, len(frames) - 1))
    frame = frames[index]
    at = draw(st.integers(0, len(frame)))
    cut = draw(st.integers(0, 3))
    frames[index] = frame[:at] + draw(st.binary(max_size=4)) + frame[at + cut :]
    return frames


@st.composite
def changed_fields(draw: st.DrawFn) -> Frames:
    """A golden request in which one value, at any depth, is another one."""
    frames = list(draw(st.sampled_from(golden_requests())))
    index = draw(st.integers(1, len(frames) - 1))
    try:
        value = msgspec.msgpack.decode(frames[index])
    except msgspec.MsgspecError:  # a bulk frame
        value = None
    frames[index] = pack(_changed(draw, value))
    return frames


def _changed(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, msgspec.msgpack.Ext):
        return None
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value, key=str)))
        others = {key: _plain(one) for key, one in value.items()}
        return {**others, name: _changed(draw, value[name])}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        kept = [_plain(one) for one in value]
        return [*kept[:place], _changed(draw, value[place]), *kept[place + 1 :]]
    return draw(plain_values)


def _plain(value: Any) -> Any:
    return None if isinstance(value, msgspec.msgpack.Ext) else value


@st.composite
def changed_frames(draw: st.DrawFn) -> Frames:
    """Frames of valid requests, cut, doubled, mixed, or too many."""
    frames = draw(valid_requests()) + draw(st.sampled_from(golden_requests()))
    picked = draw(st.lists(st.sampled_from(frames), max_size=MAX_FRAMES + 4))
    return picked


noise = st.lists(st.binary(max_size=80), max_size=MAX_FRAMES + 4)

any_message: st.SearchStrategy[Frames] = st.one_of(
    noise, valid_requests(), changed_bytes(), changed_fields(), changed_frames()
)


def at_the_limits(layout: bytes) -> list[tuple[str, tuple[Any, ...], str]]:
    """(operation, payloads, code) of requests at a limit ("ok") and just beyond it."""
    family = KeyFamily(model_name="m##query", world_size=1, kv_rank=0x01000100, layout_id=layout)

    def query(hashes: int, partials: int = 0, salt: int = 0) -> Any:
        """As plain values, so that our own types don't refuse it before the daemon can."""
        plain = msgspec.to_builtins(ChunkQuery(family=family), builtin_types=(bytes,))
        plain["chunk_hashes"] = [bytes(32)] * hashes
        plain["partials"] = [
            {"index": hashes + place, "parent_hash": bytes(32), "tokens": [1]}
            for place in range(partials)
        ]
        plain["family"]["cache_salt"] = "s" * salt
        return (plain,)

    return [
        ("lookup_q", query(MAX_CHUNKS), "ok"),
        ("lookup_q", query(MAX_CHUNKS + 1), "bad_payload"),
        ("lookup_q", query(0, MAX_PARTIALS), "ok"),
        ("lookup_q", query(0, MAX_PARTIALS + 1), "bad_payload"),
        ("lookup_q", query(0, 0, MAX_SALT_CHARS), "ok"),
        ("lookup_q", query(0, 0, MAX_SALT_CHARS + 1), "bad_payload"),
        ("release_q", ([0] * MAX_CHUNKS,), "unknown_lease"),
        ("release_q", ([0] * (MAX_CHUNKS + 1),), "bad_payload"),
        ("ping", ("i" * 256,), "ok"),
        ("ping", ("i" * 257,), "bad_payload"),
        ("ping", (-(1 << 63),), "ok"),
        ("ping", ((1 << 63),), "bad_payload"),
    ]


def store_of(model: str, name: int | str, layout: bytes, **changes: Any) -> tuple[Any, ...]:
    """Payloads of a store of one chunk from block 0, with fields of its key changed."""
    key = RangeKey(
        model_name=model,
        world_size=1,
        worker_id=0,
        end=16,
        chunk_hashes=(bytes(32),),
        layout_id=layout,
    )
    proof = StoreProof(nonces=(1,))
    return (msgspec.structs.replace(key, **changes), name, ((0,),), b"", proof)
