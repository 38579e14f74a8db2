"""Whatever bytes come in: a message, or an error with a code. And what goes out comes back the same."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_qprotocol import codec, lifeline
from lmcache_qprotocol.errors import ErrorCode, ProtocolError, QServerError, RequestError
from lmcache_qprotocol.limits import MAX_FRAMES, MAX_UID_BYTES
from lmcache_qprotocol.messages import ReplyMeta, StoreResult
from lmcache_qprotocol.operations import OPERATIONS, PING, RELEASE_Q, STORE_Q, Operation
from tests.protocol.plain_msgpack import pack
from tests.protocol.strategies import of_type, plain_values

UID = b"\x07"
FRAME_ERRORS = {ErrorCode.BAD_FRAME, ErrorCode.UNKNOWN_OPERATION, ErrorCode.WRONG_ARITY}
DECODE_ERRORS = FRAME_ERRORS | {ErrorCode.BAD_PAYLOAD}

PAYLOADS = {
    operation.name: st.tuples(*[of_type(kind) for kind in operation.payloads])
    for operation in OPERATIONS
}
RESULTS = {operation.name: of_type(operation.result) for operation in OPERATIONS}
PACKETS = of_type(lifeline.Packet)
METAS = of_type(ReplyMeta)

operations = st.sampled_from(OPERATIONS)
wire_ops = st.one_of(
    st.binary(max_size=MAX_UID_BYTES + 2),
    operations.map(lambda operation: pack(operation.name)),
    operations.map(lambda operation: pack(operation.legacy_id or 0)),
)

HOSTILE = {
    "nothing": b"",
    "reserved byte": b"\xc1",
    "deep arrays": b"\x91" * 100_000,
    "deep arrays, closed": b"\x91" * 100_000 + b"\x00",
    "deep maps": b"\x81\x00" * 100_000,
    "deep map keys": b"\x81" * 100_000,
    "array of 2**32 - 1": b"\xdd\xff\xff\xff\xff",
    "map of 2**32 - 1": b"\xdf\xff\xff\xff\xff",
    "str of 2**32 - 1": b"\xdb\xff\xff\xff\xff",
    "bin of 2**32 - 1": b"\xc6\xff\xff\xff\xff",
    "ext of 2**32 - 1": b"\xc9\xff\xff\xff\xff\x01",
    "nested huge arrays": b"\xdd\x7f\xff\xff\xff" * 500,
    "nan": b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    "infinity": b"\xca\x7f\x80\x00\x00",
    "int beyond int64": b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    "int64's smallest": b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    "str that isn't UTF-8": b"\xa2\xc3\x28",
    "str with a surrogate": b"\xa3\xed\xa0\x80",
    "map with a key that isn't UTF-8": b"\x81\xa1\xff\x00",
    "map with a list as key": b"\x81\x91\x00\x00",
    "map with a map as key": b"\x81\x80\x00",
    "ext 1": b"\xd4\x01\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "timestamp out of range": b"\xc7\x0c\xff\x00\x00\x00\x00\x7f" + b"\xff" * 7,
    "timestamp with impossible nanoseconds": b"\xd7\xff" + b"\xff" * 8,
    "timestamp of a wrong size": b"\xc7\x03\xff\x00\x00\x00",
    "two values": b"\x00\x00",
    "empty map": b"\x80",
    "empty array": b"\x90",
}
"""Frames made to hurt a decoder."""


def hostile_forms(value: bytes) -> list[bytes]:
    """A hostile value as the whole frame, as an unknown field, and inside an array and a map."""
    return [
        value,
        b"\x81\xa1?" + value,
        b"\x91" + value,
        b"\x92\x80" + value,
        b"\x81\xa4kind" + value,
    ]


def decode_or_refuse(frames: list[bytes]) -> codec.Request | None:
    try:
        return codec.decode_request(frames)
    except ProtocolError as error:
        refused = error.code
    assert refused in DECODE_ERRORS
    return None


def decode_reply_or_refuse(frames: list[bytes], operation: Operation) -> None:
    try:
        codec.decode_reply(frames, operation)
        return
    except RequestError:
        refused = None
    except ProtocolError as error:
        refused = error.code
    assert refused in {ErrorCode.BAD_FRAME, ErrorCode.BAD_PAYLOAD} or len(frames) > 3


def decode_packet_or_refuse(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        lifeline.decode_packet(data)


@st.composite
def mutations(draw: st.DrawFn, valid: list[codec.Frame]) -> list[bytes]:
    """Frames of a valid message after one to three wounds."""
    frames = [bytes(frame) for frame in valid]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(frames) - 1))
        data = frames[place]
        at = draw(st.integers(0, len(data)))
        wound = draw(
            st.sampled_from(["cut", "insert", "replace", "hostile", "drop", "double", "swap"])
        )
        if wound == "cut":
            frames[place] = data[:at]
        elif wound == "insert":
            frames[place] = data[:at] + draw(st.binary(min_size=1, max_size=6)) + data[at:]
        elif wound == "replace":
            frames[place] = data[:at] + draw(st.binary(min_size=1, max_size=2)) + data[at + 1 :]
        elif wound == "hostile":
            frames[place] = (
                data[:at]
                + draw(st.sampled_from(sorted(HOSTILE.values(), key=len)))
                + data[at + 1 :]
            )
        elif wound == "drop" and len(frames) > 1:
            del frames[place]
        elif wound == "double":
            frames.insert(place, data)
        else:
            other = draw(st.integers(0, len(frames) - 1))
            frames[place], frames[other] = frames[other], frames[place]
    return frames


# --- any bytes ------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=80), max_size=MAX_FRAMES + 2))
def test_any_frames_decode_or_are_refused(frames: list[bytes]) -> None:
    decode_or_refuse(frames)


@given(wire_ops, st.lists(plain_values.map(pack) | st.binary(max_size=30), max_size=9))
def test_any_payloads_decode_or_are_refused(op: bytes, payloads: list[bytes]) -> None:
    decode_or_refuse([UID, op, *payloads])


@given(st.data())
def test_a_wounded_request_decodes_or_is_refused(data: st.DataObject) -> None:
    operation = data.draw(operations)
    frames = codec.encode_request(UID, operation, data.draw(PAYLOADS[operation.name]))
    decode_or_refuse(data.draw(mutations(frames)))


@given(operations, st.lists(st.binary(max_size=60), max_size=MAX_FRAMES + 2))
def test_any_frames_are_a_reply_or_are_refused(operation: Operation, frames: list[bytes]) -> None:
    decode_reply_or_refuse(frames, operation)


@given(st.data())
def test_a_wounded_reply_decodes_or_is_refused(data: st.DataObject) -> None:
    operation = data.draw(operations)
    result, meta = data.draw(RESULTS[operation.name]), data.draw(st.none() | METAS)
    frames = codec.encode_result(UID, b"\x05", result, meta)
    decode_reply_or_refuse(data.draw(mutations(frames)), operation)


@given(st.binary(max_size=200) | plain_values.map(pack))
def test_any_packet_decodes_or_is_refused(packet: bytes) -> None:
    decode_packet_or_refuse(packet)


@given(st.data())
def test_a_wounded_packet_decodes_or_is_refused(data: st.DataObject) -> None:
    frames = data.draw(mutations([lifeline.encode_packet(data.draw(PACKETS))]))
    decode_packet_or_refuse(frames[0])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_are_refused_wherever_they_stand(name: str) -> None:
    for value in hostile_forms(HOSTILE[name]):
        decode_or_refuse([value, b"\x18"])
        decode_or_refuse([UID, value])
        decode_packet_or_refuse(value)
        for operation in OPERATIONS:
            fine = [b"\x80"] * len(operation.payloads)
            for place in range(len(fine)):
                # Every payload is decoded by its own decoder, without the ones before it.
                with contextlib.suppress(ProtocolError):
                    codec._decode_payload(operation, place, value)
            decode_or_refuse([UID, pack(operation.name), *[value] * len(fine)])
            decode_reply_or_refuse([UID, b"\x05", value], operation)
            decode_reply_or_refuse([UID, b"\x05", b"\xc0", value], operation)


@pytest.mark.parametrize(
    "filler", [b"\x80", b"\x90", b"\xc0", b"\x00", b"\x91\x90", b"\x81\xa0\x90"]
)
def test_no_frame_unfolds_into_many_times_its_size(filler: bytes) -> None:
    """256 KiB of the smallest values, in every place where a peer may send a collection."""
    count = (256 << 10) // len(filler)
    array = b"\xdd" + count.to_bytes(4, "big") + filler * count
    frames = [array, b"\x81\xa1?" + array, b"\x91" + array, b"\x81\xadlayer_indices" + array]
    for frame in frames:
        for operation in OPERATIONS:
            for place in range(len(operation.payloads)):
                tracemalloc.start()
                with contextlib.suppress(ProtocolError):
                    codec._decode_payload(operation, place, frame)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < 20 * len(frame), f"{operation.name}, payload {place}: {peak} bytes"


# --- limits and codes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], ErrorCode.BAD_FRAME),
        ([UID], ErrorCode.BAD_FRAME),
        ([UID, b""], ErrorCode.BAD_FRAME),
        ([b"", b"\x18"], ErrorCode.BAD_FRAME),
        ([b"\x00" * (MAX_UID_BYTES + 1), b"\x18"], ErrorCode.BAD_FRAME),
        ([UID, b"\x18", *[b"\xc0"] * (MAX_FRAMES - 1)], ErrorCode.BAD_FRAME),
        ([UID, b"\xc3"], ErrorCode.BAD_FRAME),
        ([UID, b"\xcb\x40\x38" + b"\x00" * 6], ErrorCode.BAD_FRAME),
        ([UID, b"\x7f"], ErrorCode.UNKNOWN_OPERATION),
        ([UID, pack("noop ")], ErrorCode.UNKNOWN_OPERATION),
        ([UID, b"\x18", b"\xc0"], ErrorCode.WRONG_ARITY),
        ([UID, b"\x05", b"\x80"], ErrorCode.WRONG_ARITY),
        ([UID, b"\x16", b"\xc3"], ErrorCode.BAD_PAYLOAD),
        ([UID, b"\x16", b"\x01\x01"], ErrorCode.BAD_PAYLOAD),
        ([UID, b"\x16", b"\xcb\x3f\xf0" + b"\x00" * 6], ErrorCode.BAD_PAYLOAD),
    ],
)
def test_code_of_a_refusal(frames: list[bytes], code: ErrorCode) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(frames)
    assert caught.value.code is code


def test_a_message_can_have_all_the_frames_there_may_be() -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request([UID, b"\x18", *[b"\xc0"] * (MAX_FRAMES - 2)])
    assert caught.value.code is ErrorCode.WRONG_ARITY


@pytest.mark.parametrize(
    "payload",
    [
        {"model_name": "m", "world_size": 1, "start": 2, "end": 1},
        {"model_name": "", "world_size": 1},
        {"model_name": "m", "world_size": 0},
        {"model_name": "m", "world_size": 1, "token_ids": [1 << 32]},
        {"model_name": "m", "world_size": 1, "token_ids": [-1]},
        {"model_name": "m", "world_size": 1, "end": 1 << 31},
        {"model_name": "m", "world_size": 1, "chunk_hashes": [b"\x00" * 31]},
        {"model_name": "m", "world_size": 1, "layout_id": b"\x00" * 15},
    ],
)
def test_a_key_out_of_range_is_a_bad_payload(payload: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request([UID, b"\x05", pack(payload), b"\x01", b"\x90", b"\xc4\x00"])
    assert caught.value.code is ErrorCode.BAD_PAYLOAD


def test_encode_request_refuses_a_wrong_number_of_payloads() -> None:
    with pytest.raises(ValueError, match="payloads"):
        codec.encode_request(UID, PING, ())


def test_an_error_in_a_reply_keeps_the_code_of_the_server() -> None:
    meta = ReplyMeta(b"\x01" * 16, ErrorCode.BUSY, "try again")
    with pytest.raises(RequestError) as caught:
        codec.decode_reply(codec.encode_error(UID, b"\x05", meta), STORE_Q)
    assert (caught.value.code, caught.value.message) == (ErrorCode.BUSY, "try again")
    assert isinstance(caught.value, QServerError)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@settings(max_examples=30)
@given(data=st.data())
def test_request_round_trip(operation: Operation, data: st.DataObject) -> None:
    payloads = data.draw(PAYLOADS[operation.name])
    present = payloads[: data.draw(st.integers(operation.required, len(payloads)))]
    uid = pack(data.draw(st.integers(0, (1 << 63) - 1)))
    frames = codec.encode_request(uid, operation, present)
    for form in (frames, [memoryview(frame) for frame in frames]):
        request = codec.decode_request(form)
        assert (request.uid, request.operation) == (uid, operation)
        assert request.payloads == present + (None,) * (len(payloads) - len(present))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@settings(max_examples=30)
@given(data=st.data())
def test_reply_round_trip(operation: Operation, data: st.DataObject) -> None:
    result = data.draw(RESULTS[operation.name])
    meta = msgspec.structs.replace(data.draw(METAS), code=None)
    reply = codec.decode_reply(codec.encode_result(UID, b"\x05", result, meta), operation)
    assert reply == (UID, result, meta)
    legacy = codec.decode_reply(codec.encode_result(UID, b"\x05", result, None), operation)
    if isinstance(result, StoreResult):
        result = StoreResult(result.event, result.ok)
    assert legacy == (UID, result, None)


@given(PACKETS)
def test_packet_round_trip(packet: lifeline.Packet) -> None:
    data = lifeline.encode_packet(packet)
    assert lifeline.decode_packet(data) == packet


def test_an_absent_result_is_none() -> None:
    assert codec.encode_result(UID, b"\x05", None, None) == [UID, b"\x05"]
    assert codec.decode_reply([UID, b"\x05"], RELEASE_Q).result is None
