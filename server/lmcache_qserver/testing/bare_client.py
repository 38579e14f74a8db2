"""A client that speaks the bare wire, blocking: what tests need of a worker or an SDK, and nothing else."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

import zmq

from lmcache_qprotocol.codec import Frame, Reply, decode_reply, encode, encode_request
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.lifeline import (
    MAX_PACKET_BYTES,
    Accepted,
    Attach,
    Attached,
    OfferRing,
    Packet,
    decode_packet,
    encode_packet,
)
from lmcache_qprotocol.messages import PROTOCOL_VERSION, Hello, HelloReply, RingDescription
from lmcache_qprotocol.operations import BY_NAME
from lmcache_qprotocol.stamps import STAMP_BYTES

TIMEOUT_MS = 10_000


class BareClient:
    """One DEALER socket.

    Args:
        unread: answers that ZeroMQ takes ahead of `receive`; None for its default.
    """

    def __init__(self, url: str, unread: int | None = None) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.setsockopt(zmq.SNDTIMEO, TIMEOUT_MS)
        if unread is not None:
            self.socket.setsockopt(zmq.RCVHWM, unread)
        self.socket.connect(url)
        self._uid = 0

    def __enter__(self) -> BareClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, frames: Sequence[Frame]) -> None:
        """Frames as they are."""
        self.socket.send_multipart(frames)

    def receive(self) -> list[bytes]:
        """The next message; raises `zmq.Again` when none comes in time."""
        return self.socket.recv_multipart()

    def ask(self, name: str, *payloads: Any) -> Reply:
        """One request and its reply.

        Raises:
            RequestError: the server's error.
        """
        operation = BY_NAME[name]
        self._uid += 1
        uid = encode(self._uid)
        self.send(encode_request(uid, operation, payloads))
        reply = decode_reply(self.receive(), operation)
        assert reply.uid == uid
        return reply

    def hello(self) -> HelloReply:
        """Say hello."""
        reply: HelloReply = self.ask(
            "hello",
            Hello(protocol_version=PROTOCOL_VERSION, client="bare test client", pid=os.getpid()),
        ).result
        return reply


class BareLifeline:
    """One connection to the lifeline's socket."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TIMEOUT_MS / 1000)
        self._connect(path)

    def _connect(self, path: str) -> None:
        """With a time-out a socket does not wait for room in the server's backlog: that is done here."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while True:
            try:
                self.socket.connect(path)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.socket.close()
                    raise
                time.sleep(0.001)
            else:
                return

    def __enter__(self) -> BareLifeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def exchange(self, packet: Packet | bytes, fds: Sequence[int] = ()) -> tuple[Packet, list[int]]:
        """One packet and its answer, with the descriptors that came along."""
        data = packet if isinstance(packet, bytes) else encode_packet(packet)
        socket.send_fds(self.socket, [data], list(fds))
        answer, received, _, _ = socket.recv_fds(self.socket, MAX_PACKET_BYTES, 4)
        return decode_packet(answer), received

    def attach(self, session: bytes) -> tuple[Attached, int]:
        """Attach; the pool's descriptor is the caller's."""
        answer, fds = self.exchange(Attach(session))
        assert isinstance(answer, Attached), answer
        return answer, fds[0]

    def offer(self, fd: int, nbytes: int) -> bytes:
        """Offer a ring; its token."""
        token = secrets.token_bytes(16)
        answer, _ = self.exchange(OfferRing(token, nbytes), [fd])
        assert isinstance(answer, Accepted), answer
        return token


SMALL_LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=(0, 1),
    first_head=0,
    num_heads=2,
    total_heads=2,
    head_dim=8,
    dtype="float32",
)


def small_ring(num_blocks: int = 4, block_size: int = 16) -> tuple[int, int, int]:
    """(descriptor, bytes, stamps_offset) of a sealed, zeroed ring for `SMALL_LAYOUT`."""
    stamps_offset = num_blocks * block_size * SMALL_LAYOUT.token_bytes
    nbytes = stamps_offset + num_blocks * block_size * STAMP_BYTES
    fd = os.memfd_create("test-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd, nbytes, stamps_offset


def register_small_ring(
    client: BareClient,
    lifeline: BareLifeline,
    instance_id: int | str,
    chunk_size: int,
    model: str = "test/model",
    ring: tuple[int, int, int] | None = None,
) -> RingDescription:
    """Offer and register a small ring under an id; the client has said hello, the lifeline is attached.

    Args:
        ring: what `small_ring` gave, and stays the caller's; None: a new one.
    """
    fd, nbytes, stamps_offset = ring or small_ring()
    token = lifeline.offer(fd, nbytes)
    if ring is None:
        os.close(fd)
    description = RingDescription(
        layout=SMALL_LAYOUT,
        num_blocks=4,
        block_size=16,
        chunk_size=chunk_size,
        ring_token=token,
        stamps_offset=stamps_offset,
    )
    client.ask("register_q_cache", instance_id, (), model, 1, "test", None, (), description)
    return description
