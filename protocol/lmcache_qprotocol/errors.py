"""Errors that cross the wire, and their stable codes.

    QServerError           everything this project raises on purpose about a request
    ├── ProtocolError      the *bytes* are wrong: a bug or an attack on the sender's side
    └── RequestError       the bytes are fine, the *request* can't be served; says what to do

A code never changes its meaning and is never reused; prose may change. Tests assert codes.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """Closed set of error codes; the value is what travels."""

    BAD_FRAME = "bad_frame"
    """Too few or too many frames, or a frame that isn't one msgpack value."""
    UNKNOWN_OPERATION = "unknown_operation"
    WRONG_ARITY = "wrong_arity"
    BAD_PAYLOAD = "bad_payload"
    """A payload has the wrong type, or a value outside its range."""
    TOO_LARGE = "too_large"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNSUPPORTED_TRANSPORT = "unsupported_transport"
    """The server can't reach this kind of memory."""
    HELLO_REQUIRED = "hello_required"
    LIFELINE_REQUIRED = "lifeline_required"
    UNKNOWN_INSTANCE = "unknown_instance"
    INSTANCE_BUSY = "instance_busy"
    NOT_OWNER = "not_owner"
    """The instance belongs to another connection."""
    RING_REFUSED = "ring_refused"
    """The ring's memory doesn't fit what was said about it."""
    BLOCKS_NOT_COVERING = "blocks_not_covering"
    """Fewer ring blocks than the token range needs, or ids outside the ring."""
    TOO_MANY_LEASES = "too_many_leases"
    UNKNOWN_LEASE = "unknown_lease"
    UNKNOWN_UPLOAD = "unknown_upload"
    """Never begun by this client, complete, or given up."""
    BUSY = "busy"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


class QServerError(Exception):
    """Base of all errors with a code.

    Args:
        code: the stable code.
        message: one sentence for people: what was wrong, and what to do.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"[{code.value}] {message}")
        self.code = code
        self.message = message


class ProtocolError(QServerError):
    """The peer's bytes are not a message of this protocol."""


class RequestError(QServerError):
    """A well-formed request that can't be served."""
