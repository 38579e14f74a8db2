"""Frames to messages and back. No I/O: the caller owns the sockets.

    request   [uid, op, payload...]          uid is the sender's own and comes back as it is
    reply     [uid, op, result?]             to a client that has not said hello; absent means None
    reply     [uid, op, result, ReplyMeta]   to a client that has; nil for None and for errors

Every frame is one msgpack value, but for bulk frames, which are plain bytes (operations.py).
Whatever bytes come in, decoding gives a message or raises ProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lmcache_qprotocol.errors import ErrorCode, ProtocolError, RequestError
from lmcache_qprotocol.limits import MAX_FRAMES, MAX_UID_BYTES
from lmcache_qprotocol.messages import ReplyMeta, StoreResult
from lmcache_qprotocol.operations import BY_WIRE, OPERATIONS, Operation

Frame = bytes | memoryview
NIL = b"\xc0"

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises on bad bytes; recursion is for nesting deeper than the interpreter's."""

_encoder = msgspec.msgpack.Encoder()
_wire_op = msgspec.msgpack.Decoder(int | str)
_meta = msgspec.msgpack.Decoder(ReplyMeta)

encode = _encoder.encode
"""One value to one frame."""

BULK_REQUESTS = frozenset(encode(op.name) for op in OPERATIONS if op.has_bulk_payload)
"""Operation frames of requests that bring a bulk frame, for who wants to receive that without a copy."""
BULK_REPLIES = frozenset(encode(op.name) for op in OPERATIONS if op.has_bulk_result)
"""The same of replies."""

_OPERATION_OF_FRAME: dict[bytes, Operation] = {encode(op): found for op, found in BY_WIRE.items()}
"""In the shortest encoding, which is what clients send; other encodings are decoded."""


class Request(NamedTuple):
    """A decoded request: the raw frames `uid` and `op_frame` to echo, and all payloads.

    A missing optional payload is None.
    """

    uid: bytes
    op_frame: bytes
    operation: Operation
    payloads: tuple[Any, ...]


class Reply(NamedTuple):
    """A decoded reply. `meta` is None from a server that took us for a legacy client."""

    uid: bytes
    result: Any
    meta: ReplyMeta | None


def encode_request(uid: bytes, operation: Operation, payloads: Sequence[Any]) -> list[Frame]:
    """Frames of a request; operations that the peer knows travel by its integer.

    Args:
        uid: one encoded msgpack value of at most 64 bytes.
    """
    if not operation.required <= len(payloads) <= len(operation.payloads):
        raise ValueError(
            f"{operation.name} takes {len(operation.payloads)} payloads, not {len(payloads)}"
        )
    op = operation.name if operation.legacy_id is None else operation.legacy_id
    return [uid, encode(op), *map(_encode_frame, payloads)]


def _encode_frame(value: Any) -> Frame:
    return value if type(value) is memoryview else encode(value)


def decode_uid(frames: Sequence[Frame]) -> tuple[bytes, bytes]:
    """The two frames that a reply echoes.

    Raises:
        ProtocolError(bad_frame): there are none; such a message can't be answered.
    """
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(
            ErrorCode.BAD_FRAME, f"a message has 2 to {MAX_FRAMES} frames, not {len(frames)}"
        )
    uid, op = _short(frames[0]), _short(frames[1])
    if not 0 < len(uid) <= MAX_UID_BYTES or not 0 < len(op) <= MAX_UID_BYTES:
        raise ProtocolError(
            ErrorCode.BAD_FRAME, f"uid and operation have 1 to {MAX_UID_BYTES} bytes each"
        )
    return uid, op


def _short(frame: Frame) -> bytes:
    """The frame, or as much of a long one as shows that it is too long."""
    return frame if type(frame) is bytes else bytes(frame[: MAX_UID_BYTES + 1])


def decode_request(frames: Sequence[Frame]) -> Request:
    """A request from its frames.

    Raises:
        ProtocolError: bad_frame, unknown_operation, wrong_arity or bad_payload.
    """
    uid, op_frame = decode_uid(frames)
    operation = decode_operation(op_frame)
    return Request(uid, op_frame, operation, decode_payloads(operation, frames))


def decode_payloads(operation: Operation, frames: Sequence[Frame]) -> tuple[Any, ...]:
    """The payloads of a request whose operation is known already; `decode_request` is both steps in one.

    Raises:
        ProtocolError: wrong_arity or bad_payload.
    """
    count = len(frames) - 2
    if not operation.required <= count <= len(operation.payloads):
        raise ProtocolError(
            ErrorCode.WRONG_ARITY,
            f"{operation.name} takes {operation.required} to {len(operation.payloads)} payloads, "
            f"not {count}",
        )
    payloads = [_decode_payload(operation, index, frames[index + 2]) for index in range(count)]
    payloads += [None] * (len(operation.payloads) - count)
    return tuple(payloads)


def decode_operation(op_frame: bytes) -> Operation:
    """The operation that the second frame names.

    Raises:
        ProtocolError: bad_frame or unknown_operation.
    """
    known = _OPERATION_OF_FRAME.get(op_frame)
    if known is not None:
        return known
    try:
        op = _wire_op.decode(op_frame)
    except _UNDECODABLE:
        raise ProtocolError(
            ErrorCode.BAD_FRAME, "the operation is neither an integer nor a name"
        ) from None
    operation = BY_WIRE.get(op)
    if operation is None:
        raise ProtocolError(
            ErrorCode.UNKNOWN_OPERATION, f"no operation {op!r} in this version of the protocol"
        )
    return operation


def _decode_payload(operation: Operation, index: int, frame: Frame) -> Any:
    try:
        return operation.decode_payload(index, frame)
    except _UNDECODABLE as error:
        raise ProtocolError(
            ErrorCode.BAD_PAYLOAD, f"{operation.name}, payload {index}: {error}"
        ) from None


def encode_result(
    uid: bytes, op_frame: bytes, result: Any, meta: ReplyMeta | bytes | None
) -> list[Frame]:
    """Frames of a successful reply.

    Args:
        meta: for a client that has said hello (the encoded frame will do), else None.
    """
    if meta is not None:
        return [uid, op_frame, _encode_frame(result), _encoded(meta)]
    if isinstance(result, StoreResult):
        result = (result.event, result.ok)
    return [uid, op_frame] if result is None else [uid, op_frame, _encode_frame(result)]


def _encoded(meta: ReplyMeta | bytes) -> bytes:
    return meta if type(meta) is bytes else encode(meta)


def encode_error(uid: bytes, op_frame: bytes, meta: ReplyMeta) -> list[bytes]:
    """Frames of an error reply to a client that has said hello; `meta.code` is set."""
    return [uid, op_frame, NIL, encode(meta)]


def decode_reply(frames: Sequence[Frame], operation: Operation) -> Reply:
    """A reply from its frames.

    Raises:
        RequestError: the server answered with an error; its code is the server's.
        ProtocolError(bad_frame, bad_payload): not a reply to this operation.
    """
    uid, _ = decode_uid(frames)
    meta = None
    if len(frames) > 3:
        try:
            meta = _meta.decode(frames[3])
        except _UNDECODABLE as error:
            raise ProtocolError(ErrorCode.BAD_PAYLOAD, f"reply's fourth frame: {error}") from None
        if meta.code is not None:
            raise RequestError(meta.code, meta.message)
    try:
        result = operation.decode_result(frames[2] if len(frames) > 2 else NIL)
    except _UNDECODABLE as error:
        raise ProtocolError(ErrorCode.BAD_PAYLOAD, f"result of {operation.name}: {error}") from None
    return Reply(uid, result, meta)
