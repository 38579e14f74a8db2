"""What daemon, fork server and device processes say to each other. All three are this program; nobody else can speak.

daemon → fork server     SEQPACKET   Start (+ the child's end of its control socket, + the pipe of its life), Kill
daemon → child           SEQPACKET   Attach (+ the child's end of a ring's socket)
child  → daemon          SEQPACKET   Ready, or Failed and the end
lane   ⇄ ring's thread   STREAM      OpenRing → Opened, CopyChunks → Copied; or Failed. Closing the socket closes the
                                     ring: the other end closes when all is given back
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple, TypeVar

import msgspec

from lmcache_qprotocol.errors import ErrorCode

MAX_PACKET_BYTES = 1 << 12
_LENGTH = struct.Struct("=I")

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start a child.

    Attributes:
        key: names it from now on.
        kind: "cuda" or "sim".
        uuid: of the device, 16 bytes.
    """

    key: int
    kind: str
    uuid: bytes


class Kill(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL; nothing if it has ended."""

    key: int


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Serve a ring over the socket beside this."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The device is there, and the pool is pinned.

    Attributes:
        name: as torch names the device, by the child's numbering.
    """

    name: str
    pid: int


class OpenRing(msgspec.Struct, frozen=True, tag=True):
    """See `RingGeometry` and `DeviceMemory`."""

    num_blocks: int
    block_bytes: int
    block_size: int
    stamps_offset: int
    nbytes: int
    handle: bytes


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The ring may be copied from."""

    device: str


class PooledChunk(msgspec.Struct, frozen=True, array_like=True):
    """A `ChunkCopy` whose target is told by its place in the pool.

    Attributes:
        block_ids: int32, in the machine's byte order.
        offset: of the target in the pool, bytes.
    """

    block_ids: bytes
    first_stamp: int
    offset: int
    skip: int
    rows: int | None
    layers: int


class CopyChunks(msgspec.Struct, frozen=True, tag=True):
    """Copy and prove; `event` is the handle of the worker's event."""

    chunks: list[PooledChunk]
    event: bytes


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The copy is over; `fault` as in `StampFault`, None when every row is proven."""

    fault: tuple[int, int, int, int] | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It could not be done.

    Attributes:
        code: of a refusal that the worker is to hear; None for a failure of the device.
    """

    message: str
    code: ErrorCode | None = None


ToForkServer = Start | Kill
FromChild = Ready | Failed
Request = OpenRing | CopyChunks
Reply = Opened | Copied | Failed

encode = msgspec.msgpack.encode
decode_for_fork_server = msgspec.msgpack.Decoder(ToForkServer).decode
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


class Packet(NamedTuple):
    """What came over a SEQPACKET socket; no data: the other end is closed."""

    data: bytes
    fds: list[int]


def receive_packet(source: socket.socket, max_fds: int = 2) -> Packet:
    """The next packet.

    Raises:
        BlockingIOError: there is none yet, and the socket does not block.
    """
    data, fds, _, _ = socket.recv_fds(source, MAX_PACKET_BYTES, max_fds)
    return Packet(data, fds)


def send_message(target: socket.socket, message: object) -> None:
    """One message over a stream."""
    data = encode(message)
    target.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(source: socket.socket) -> bytes | None:
    """The next message over a stream; None when the other end is closed."""
    head = _receive_exactly(source, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    return _receive_exactly(source, length)


def _receive_exactly(source: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = source.recv_into(view)
        if not received:
            return None
        view = view[received:]
    return bytes(data)
