"""The daemon's side of a ring on a device, with a test in the place of the device's process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.copying import ChunkCopy, RingGeometry, StampFault
from lmcache_qserver.device.api import DeviceError
from lmcache_qserver.device.device_ring import DeviceRing
from lmcache_qserver.device.messages import (
    Copied,
    CopyChunks,
    Failed,
    Opened,
    OpenRing,
    PooledChunk,
    Reply,
    decode_request,
    receive_message,
    send_message,
)

GEOMETRY = RingGeometry(4, 96, 4, 384)
NBYTES = 384 + 128


class PlayedProcess:
    """The other end of everything."""

    def __init__(self) -> None:
        self.lost, self.why = False, ": it was too hot"
        self.kills = 0
        ours, self.connection = socket.socketpair()
        life, self.life = os.pipe()
        self.ring = DeviceRing(self, ours, life, "cuda", NBYTES, b"h" * 64)
        self.ring.claimed = True

    def kill(self) -> None:
        self.kills += 1

    def answer(self, *replies: Reply) -> list[object]:
        """Replies to come, one a request; what was asked is in the list then."""
        asked: list[object] = []

        def serve() -> None:
            for reply in replies:
                data = receive_message(self.connection)
                assert data is not None
                asked.append(decode_request(data))
                send_message(self.connection, reply)

        threading.Thread(target=serve, daemon=True).start()
        return asked

    def close(self) -> None:
        self.connection.close()
        if self.life >= 0:
            os.close(self.life)
            self.life = -1
        self.ring.close()


@pytest.fixture
def process() -> Iterator[PlayedProcess]:
    one = PlayedProcess()
    yield one
    one.close()


def chunk() -> ChunkCopy:
    return ChunkCopy((2, 0), 77, np.zeros(192, np.uint8), skip=1, rows=5, layers=2, offset=4096)


def test_requests_say_all_and_answers_are_believed(process: PlayedProcess) -> None:
    asked = process.answer(Opened("cuda:3"), Copied((0, 1, 2, 3)), Copied(None))
    assert process.ring.device == "cuda"
    process.ring.open(GEOMETRY)
    assert process.ring.device == "cuda:3"
    assert process.ring.copy([chunk()], b"e" * 64) == StampFault(0, 1, 2, 3)
    assert process.ring.copy([chunk()], b"e" * 64) is None
    blocks = np.array([2, 0], np.int32).tobytes()
    copy = CopyChunks([PooledChunk(blocks, 77, 4096, 1, 5, 2)], b"e" * 64)
    assert asked == [OpenRing(4, 96, 4, 384, NBYTES, b"h" * 64), copy, copy]


def test_a_ring_that_is_described_wrongly_is_refused_before_anybody_is_asked(
    process: PlayedProcess,
) -> None:
    with pytest.raises(RequestError) as caught:
        process.ring.open(RingGeometry(5, 96, 4, 384))
    assert caught.value.code is ErrorCode.RING_REFUSED


def test_refusals_are_the_workers_and_failures_are_not(process: PlayedProcess) -> None:
    process.answer(Failed("no such handle", ErrorCode.RING_REFUSED), Failed("out of order"))
    with pytest.raises(RequestError, match="no such handle"):
        process.ring.open(GEOMETRY)
    with pytest.raises(DeviceError, match="out of order"):
        process.ring.copy([chunk()], b"")


def test_nothing_returns_before_the_process_is_really_gone(process: PlayedProcess) -> None:
    """Its sockets close first, and then the device may still write into the pool."""
    ended = threading.Event()
    found: list[str] = []

    def copy() -> None:
        try:
            process.ring.copy([chunk()], b"")
        except DeviceError as error:
            found.append(str(error))
        ended.set()

    thread = threading.Thread(target=copy)
    thread.start()
    assert receive_message(process.connection) is not None
    process.connection.close()
    assert not ended.wait(0.2), "the process is still there"
    os.close(process.life)
    process.life = -1
    thread.join(10)
    assert found == ["the process of the device has ended: it was too hot"]


def test_closing_waits_until_everything_is_given_back(process: PlayedProcess) -> None:
    closing = threading.Thread(target=process.ring.close)
    closing.start()
    assert receive_message(process.connection) is None, "that is how it asks"
    closing.join(0.2)
    assert closing.is_alive()
    process.connection.close()
    closing.join(10)
    assert process.ring.closed
    process.ring.close()


def test_a_ring_that_nobody_took_closes_at_once(process: PlayedProcess) -> None:
    process.ring.claimed = False
    process.ring.close()
    assert process.ring.closed


def test_aborting_kills_the_process_and_losing_is_the_processs(process: PlayedProcess) -> None:
    process.ring.abort()
    assert process.kills == 1
    assert not process.ring.lost
    process.lost = True
    assert process.ring.lost
