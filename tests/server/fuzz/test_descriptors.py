"""Hostile descriptors: whatever comes over the lifeline, the daemon refuses it, closes it, and waits for nobody."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.lifeline import Accepted, OfferRing, Refused, encode_packet
from lmcache_qprotocol.messages import RangeKey, RingDescription, StoreProof
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon, wait_until
from lmcache_qserver.wire.lifeline import MAX_RINGS
from tests.server.fuzz.bystander import Bystander
from tests.server.fuzz.hostile_fds import (
    REFUSED,
    RING_BYTES,
    STAMPS_OFFSET,
    closing,
    lingering_socket,
    memfd,
)
from tests.server.ring_writer import RingWriter

DESCRIPTION = RingDescription(
    layout=SMALL_LAYOUT,
    num_blocks=4,
    block_size=16,
    chunk_size=16,
    ring_token=bytes(16),
    stamps_offset=STAMPS_OFFSET,
)


class Hostile:
    """A client that has said hello and attached."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.client, self.lifeline = BareClient(daemon.url), BareLifeline(daemon.lifeline)
        os.close(self.lifeline.attach(self.client.hello().session)[1])

    def offer(self, *fds: int, nbytes: int = RING_BYTES) -> ErrorCode | bytes:
        """The refusal's code, or the token under which the ring was accepted."""
        token = secrets.token_bytes(16)
        answer, _ = self.lifeline.exchange(OfferRing(token, nbytes), fds)
        if isinstance(answer, Refused):
            return answer.code
        assert isinstance(answer, Accepted)
        return token

    def register(self, token: bytes, name: int | str = "hostile", **changes: Any) -> ErrorCode:
        """The code with which a registration is refused."""
        description = msgspec.structs.replace(DESCRIPTION, ring_token=token, **changes)
        with pytest.raises(RequestError) as caught:
            self.client.ask(
                "register_q_cache", name, (), "test/model", 1, "test", None, (), description
            )
        return caught.value.code

    def close(self) -> None:
        self.lifeline.socket.close()
        self.client.socket.close()


@pytest.fixture
def hostile(daemon: RunningDaemon, bystander: Bystander) -> Iterator[Hostile]:
    """The bystander looks at the daemon before and after."""
    made = Hostile(daemon)
    yield made
    made.close()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_sealed_memory_is_refused(hostile: Hostile, kind: str) -> None:
    with closing(REFUSED[kind]()) as fd:
        token = hostile.offer(fd)
    assert isinstance(token, bytes), "what only the kernel can tell is asked in the lane"
    assert hostile.register(token) is ErrorCode.RING_REFUSED


@pytest.mark.parametrize("count", [0, 2, 3, 200, 253])
def test_another_number_of_descriptors_than_one_is_refused(
    daemon: RunningDaemon, hostile: Hostile, count: int
) -> None:
    files = daemon.open_files()
    with closing(*[memfd(RING_BYTES, fcntl.F_SEAL_SHRINK) for _ in range(count or 1)]) as fd:
        code = hostile.offer(*[fd] * count)
    assert code is (ErrorCode.BAD_FRAME if count else ErrorCode.BAD_PAYLOAD)
    wait_until(lambda: daemon.open_files() <= files, "all are closed")


def test_the_same_descriptor_twice_is_two_rings_and_each_token_is_good_once(
    hostile: Hostile,
) -> None:
    with closing(small_ring()[0]) as fd:
        first, second = hostile.offer(fd), hostile.offer(fd)
    assert isinstance(first, bytes)
    assert isinstance(second, bytes)
    description = msgspec.structs.replace(DESCRIPTION, ring_token=first)
    ask = ("register_q_cache", "one", (), "test/model", 1, "test", None, (), description)
    hostile.client.ask(*ask)
    hostile.client.ask(*ask)  # the same again refreshes
    assert hostile.register(first, "two") is ErrorCode.LIFELINE_REQUIRED
    assert hostile.register(first, "one", stamps_offset=STAMPS_OFFSET + 8) in {
        ErrorCode.LIFELINE_REQUIRED,
        ErrorCode.RING_REFUSED,
    }
    assert hostile.register(secrets.token_bytes(16)) is ErrorCode.LIFELINE_REQUIRED


@pytest.mark.parametrize(
    "changes",
    [
        {"stamps_offset": RING_BYTES},
        {"stamps_offset": (1 << 62) - 8},
        {"stamps_offset": STAMPS_OFFSET + 4},
        {"stamps_offset": STAMPS_OFFSET - 8},
        {"stamps_offset": 0},
        {"num_blocks": (1 << 31) - 1},
        {"num_blocks": (1 << 31) - 1, "stamps_offset": (1 << 62) - 8},
        {"num_blocks": 5},
        {"block_size": 1 << 20},
        {"block_size": 3},
        {"chunk_size": 1 << 24},
        {
            "layout": msgspec.structs.replace(
                SMALL_LAYOUT, head_dim=1 << 24, num_heads=1 << 24, total_heads=1 << 24
            )
        },
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_the_memory_are_refused(
    hostile: Hostile, changes: dict[str, Any]
) -> None:
    with closing(small_ring()[0]) as fd:
        token = hostile.offer(fd)
    assert isinstance(token, bytes)
    assert hostile.register(token, **changes) in {ErrorCode.RING_REFUSED, ErrorCode.BAD_PAYLOAD}


@pytest.mark.parametrize("nbytes", [0, 1, RING_BYTES + 1, 1 << 40, (1 << 62) - 1])
def test_a_size_that_is_not_the_memorys_is_refused(hostile: Hostile, nbytes: int) -> None:
    with closing(small_ring()[0]) as fd:
        token = hostile.offer(fd, nbytes=nbytes)
    assert isinstance(token, bytes)
    assert hostile.register(token) is ErrorCode.RING_REFUSED


def test_a_terabyte_of_holes_is_mapped_and_not_read(
    daemon: RunningDaemon, hostile: Hostile
) -> None:
    before = daemon.resident_bytes()
    with closing(memfd(1 << 40, fcntl.F_SEAL_SHRINK)) as fd:
        token = hostile.offer(fd, nbytes=1 << 40)
    description = msgspec.structs.replace(DESCRIPTION, ring_token=token)
    hostile.client.ask("register_q_cache", "vast", (), "test/model", 1, "t", None, (), description)
    assert daemon.resident_bytes() < before + (8 << 20)


def test_memory_cannot_be_cut_under_the_daemon_and_holes_in_it_are_no_rows(
    hostile: Hostile,
) -> None:
    writer = RingWriter(ring := small_ring())
    register_small_ring(hostile.client, hostile.lifeline, "cutter", 16, ring=ring)
    nonce = writer.write(block=1, start=0)
    fd = ring[0]
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, mmap.PAGESIZE)
    _punch_hole(fd, RING_BYTES)
    key = RangeKey(
        model_name="test/model##query",
        world_size=1,
        worker_id=0,
        end=16,
        chunk_hashes=(os.urandom(32),),
        layout_id=layout_id(SMALL_LAYOUT),
    )
    result = hostile.client.ask(
        "store_q", key, "cutter", ((1,),), b"", StoreProof(nonces=(nonce,))
    ).result
    assert not result.ok
    assert "stamp_mismatch" in str(result.outcome)
    writer.close()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("packet", [b"\xc1", encode_packet(OfferRing(bytes(16), RING_BYTES))])
def test_a_descriptor_whose_close_blocks_holds_up_nobody(
    daemon: RunningDaemon, bystander: Bystander, hostile: Hostile, packet: bytes, count: int
) -> None:
    sockets = [lingering_socket() for _ in range(count)]
    with closing(*[receiver for _, receiver in sockets]):
        senders = [sender for sender, _ in sockets]
        socket.send_fds(hostile.lifeline.socket, [packet], senders)
        for sender in senders:
            os.close(sender)  # the last reference is the daemon's
        hostile.lifeline.socket.recv(4096)
        bystander.check()
        hostile.register(bytes(16))  # closed in the lane
        bystander.check()
        hostile.close()
        bystander.check_resources()


def test_descriptors_that_nobody_read_before_the_end_hold_up_nobody(
    daemon: RunningDaemon, bystander: Bystander
) -> None:
    """They lie in the socket when the daemon closes it: the kernel would close them then and there."""
    sender, receiver = lingering_socket()
    with closing(receiver), BareLifeline(daemon.lifeline) as lifeline:
        lifeline.exchange(b"\xc1")  # it has been accepted
        lifeline.socket.setblocking(False)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with contextlib.suppress(BlockingIOError):  # the queue is full
                lifeline.socket.send(b"\xc1")
                while True:
                    socket.send_fds(lifeline.socket, [b"\xc1"], [sender])
            lifeline.socket.close()  # so the first answer fails, and the other packets are not read
            os.close(sender)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        bystander.check()
        bystander.check_resources()


def test_a_flood_of_descriptors_without_a_registration_is_bounded(
    daemon: RunningDaemon, hostile: Hostile
) -> None:
    files = daemon.open_files()
    codes = []
    with closing(small_ring()[0]) as fd:
        for _ in range(500):
            codes.append(hostile.offer(fd))
    assert codes.count(ErrorCode.BUSY) == 500 - MAX_RINGS
    wait_until(lambda: daemon.open_files() <= files + MAX_RINGS, "the refused ones are closed")


def _punch_hole(fd: int, nbytes: int) -> None:
    punch, keep_size = 2, 1
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_long
    assert libc.fallocate(fd, punch | keep_size, size(0), size(nbytes)) == 0
