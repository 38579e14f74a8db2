"""The table of operations: the one source for the codec, the server's dispatch and PROTOCOL.md.

An operation travels as its legacy integer or as its name. Payloads are frames of their own, in
order; trailing ones may be optional. `result` is the type of the reply's third frame, which is
absent for None.

A payload or result of the type `memoryview` is a *bulk* frame: plain bytes, without msgpack around
them, so that neither side copies them to wrap or unwrap them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lmcache_qprotocol.keys import ModelName, Salt
from lmcache_qprotocol.limits import MAX_CHUNKS, MAX_GROUPS
from lmcache_qprotocol.messages import (
    BlockId,
    ChunkQuery,
    Count,
    FlushReply,
    GroupInfos,
    Hello,
    HelloReply,
    IdentitiesReply,
    IdentityQuery,
    InstanceId,
    LookupReply,
    Name,
    OpaqueMap,
    PurgeReply,
    RangeKey,
    RetrieveReply,
    RingDescription,
    StoreProof,
    StoreResult,
    UploadReply,
    VerifyReply,
    WorkerReport,
)

BlockGroups = Annotated[
    tuple[Annotated[tuple[BlockId, ...], Meta(max_length=1 << 20)], ...],
    Meta(max_length=MAX_GROUPS),
]
"""Ring block ids, one list per group."""
EventHandle = Annotated[bytes, Meta(max_length=4096)]
Extensions = Annotated[tuple[msgspec.msgpack.Ext, ...], Meta(max_length=8192)]
"""Legacy tensor addresses, Ext code 1; a native client sends none."""
UploadId = Annotated[int, Meta(ge=1, lt=1 << 62)]
LeaseIds = Annotated[tuple[Count, ...], Meta(max_length=MAX_CHUNKS)]


class NoFailure:
    """Type of `SILENCE`."""


SILENCE = NoFailure()
"""Legacy clients have no failing result for this operation: any answer would mean success."""


class Operation:
    """One row of the table.

    Attributes:
        name: string form on the wire.
        legacy_id: integer form, None for operations that only we have.
        payloads: type of each payload frame.
        required: how many of them must be there.
        result: type of the result.
        legacy_failure: the result that tells a legacy client of a failure, or SILENCE.
        purpose: one sentence, for PROTOCOL.md.
    """

    __slots__ = (
        "_decode_result",
        "_decoders",
        "legacy_failure",
        "legacy_id",
        "name",
        "payloads",
        "purpose",
        "required",
        "result",
    )

    def __init__(
        self,
        name: str,
        legacy_id: int | None,
        payloads: tuple[Any, ...],
        result: Any,
        purpose: str,
        *,
        optional: int = 0,
        legacy_failure: object = SILENCE,
    ) -> None:
        self.name = name
        self.legacy_id = legacy_id
        self.payloads = payloads
        self.required = len(payloads) - optional
        self.result = result
        self.purpose = purpose
        self.legacy_failure = legacy_failure
        self._decoders = tuple(map(_decoder, payloads))
        self._decode_result = _decoder(result)

    @property
    def has_bulk_payload(self) -> bool:
        """A bulk frame travels with the request."""
        return memoryview in self.payloads

    @property
    def has_bulk_result(self) -> bool:
        """The result is a bulk frame."""
        return self.result is memoryview

    def decode_payload(self, index: int, frame: bytes | memoryview) -> Any:
        """Raises `msgspec.MsgspecError` subclasses, which codec.py translates."""
        return self._decoders[index](frame)

    def decode_result(self, frame: bytes | memoryview) -> Any:
        """Raises `msgspec.MsgspecError` subclasses, which codec.py translates."""
        return self._decode_result(frame)


def _decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    return memoryview if kind is memoryview else msgspec.msgpack.Decoder(kind).decode


HELLO = Operation(
    "hello", None, (Hello,), HelloReply, "Says who one is and learns what the server is."
)
REGISTER_Q_CACHE = Operation(
    "register_q_cache",
    3,
    (InstanceId, Extensions, Name, Count, Name, OpaqueMap | None, GroupInfos, RingDescription),
    None,
    "Registers a worker's ring under the id of its KV cache.",
    optional=1,
)
UNREGISTER_Q_CACHE = Operation(
    "unregister_q_cache",
    4,
    (InstanceId, WorkerReport),
    None,
    "Releases the ring of an instance; answered when no copy from it is running any more.",
    optional=1,
)
STORE_Q = Operation(
    "store_q",
    5,
    (RangeKey, InstanceId, BlockGroups, EventHandle, StoreProof),
    StoreResult,
    "Copies the rows of whole chunks (or of one piece) out of an instance's ring.",
    optional=1,
    legacy_failure=StoreResult(b"", False),
)
BEGIN_UPLOAD_Q = Operation(
    "begin_upload_q",
    None,
    (RangeKey, InstanceId, StoreProof),
    UploadReply,
    "Begins a store of one chunk (or piece) whose bytes come in parts.",
)
UPLOAD_PART_Q = Operation(
    "upload_part_q",
    None,
    (UploadId, Count, memoryview),
    None,
    "Brings the next bytes of an upload.",
)
END_UPLOAD_Q = Operation(
    "end_upload_q",
    None,
    (UploadId, memoryview),
    StoreResult,
    "Brings the stamps of an upload, which prove its rows; answered when it is stored, or refused.",
)
GET_CHUNK_SIZE = Operation("get_chunk_size", 21, (), Count, "Tokens per chunk.")
PING = Operation(
    "ping",
    22,
    (InstanceId | None, WorkerReport),
    bool,
    "Shows that an instance lives; false when the server does not know it.",
    optional=1,
    legacy_failure=False,
)
NOOP = Operation("noop", 24, (), str, 'Answers "OK".')
GET_EXPERIMENTAL = Operation(
    "get_experimental", 32, (), tuple[str, ...], "Names of the features that the server stores."
)
LOOKUP_Q = Operation(
    "lookup_q",
    None,
    (ChunkQuery,),
    LookupReply,
    "Tells which chunks are there, and why the others are not.",
)
RETRIEVE_Q = Operation(
    "retrieve_q",
    None,
    (ChunkQuery,),
    RetrieveReply,
    "Leases the chunks that are there to a reader.",
)
FETCH_Q = Operation(
    "fetch_q",
    None,
    (Count, Count, Count, Count),
    memoryview,
    "Sends bytes of a leased chunk to a reader that can't map the pool.",
)
RELEASE_Q = Operation("release_q", None, (LeaseIds,), None, "Gives leases back.")
IDENTITIES_Q = Operation(
    "identities_q",
    None,
    (IdentityQuery,),
    IdentitiesReply,
    "Tells under which salts, LoRA adapters and items the same token ids are stored.",
)
VERIFY_Q = Operation(
    "verify_q",
    None,
    (),
    VerifyReply,
    "Hashes everything that is stored, and drops what differs from its checksum.",
)
FLUSH_Q = Operation(
    "flush_q",
    None,
    (Count,),
    FlushReply,
    "Waits, so many milliseconds at most, until everything stored is in the persistent tier, too.",
)
PURGE_Q = Operation(
    "purge_q",
    None,
    (ModelName, Salt | None),
    PurgeReply,
    "Deletes what is stored of a model (with or without a feature's suffix), or of one salt of it, in every tier.",
)

OPERATIONS: tuple[Operation, ...] = (
    HELLO,
    REGISTER_Q_CACHE,
    UNREGISTER_Q_CACHE,
    STORE_Q,
    BEGIN_UPLOAD_Q,
    UPLOAD_PART_Q,
    END_UPLOAD_Q,
    GET_CHUNK_SIZE,
    PING,
    NOOP,
    GET_EXPERIMENTAL,
    LOOKUP_Q,
    RETRIEVE_Q,
    FETCH_Q,
    RELEASE_Q,
    IDENTITIES_Q,
    VERIFY_Q,
    FLUSH_Q,
    PURGE_Q,
)

BY_NAME: dict[str, Operation] = {operation.name: operation for operation in OPERATIONS}
BY_WIRE: dict[int | str, Operation] = {operation.name: operation for operation in OPERATIONS}
BY_WIRE.update(
    {operation.legacy_id: operation for operation in OPERATIONS if operation.legacy_id is not None}
)
