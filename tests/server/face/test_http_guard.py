"""The guard by itself: what it does does not depend on what the HTTP library bounds."""

from __future__ import annotations

import asyncio
from typing import cast

from lmcache_qserver.face.http_guard import MAX_REQUEST_BYTES, GuardedConnection, HttpGuard


class Inner(asyncio.Protocol):
    """What serves; it takes anything."""

    def __init__(self) -> None:
        self.received = 0
        self.ended = False

    def data_received(self, data: bytes) -> None:
        self.received += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True


class Transport:
    """Ends its connection when it is aborted, as a real one does."""

    def __init__(self) -> None:
        self.connection: GuardedConnection | None = None
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True
        assert self.connection is not None
        self.connection.connection_lost(None)


def connect(guard: HttpGuard) -> tuple[Transport, Inner]:
    transport, inner = Transport(), Inner()
    transport.connection = guard.wrap(inner)
    transport.connection.connection_made(cast(asyncio.BaseTransport, transport))
    return transport, inner


def send(transport: Transport, nbytes: int) -> None:
    assert transport.connection is not None
    transport.connection.data_received(bytes(nbytes))


async def test_a_request_has_so_many_bytes_and_the_next_one_as_many_again() -> None:
    guard = HttpGuard(asyncio.get_running_loop())
    transport, inner = connect(guard)
    send(transport, MAX_REQUEST_BYTES)
    assert not transport.aborted
    guard.serving(transport)
    guard.served(transport)
    send(transport, MAX_REQUEST_BYTES)
    assert not transport.aborted
    send(transport, 1)
    assert transport.aborted
    assert inner.ended
    assert inner.received == 2 * MAX_REQUEST_BYTES, "nothing beyond is served"
    assert len(guard) == 0


async def test_who_waits_longest_makes_room_and_nobody_in_service() -> None:
    guard = HttpGuard(asyncio.get_running_loop(), max_connections=3)
    served, first, second = (connect(guard)[0] for _ in range(3))
    guard.serving(served)
    third, _ = connect(guard)
    assert [one.aborted for one in (served, first, second, third)] == [False, True, False, False]
    guard.served(served)
    connect(guard)
    assert [one.aborted for one in (served, second, third)] == [False, True, False]
    assert len(guard) == 3


async def test_a_connection_that_is_over_leaves_nothing() -> None:
    guard = HttpGuard(asyncio.get_running_loop(), head_s=0.01, idle_s=0.01)
    transport, _ = connect(guard)
    guard.serving(transport)
    assert transport.connection is not None
    transport.connection.connection_lost(None)
    guard.served(transport)
    await asyncio.sleep(0.03)
    assert not transport.aborted, "no timer is left behind"
    assert len(guard) == 0


async def test_who_was_served_and_says_no_more_goes_too() -> None:
    guard = HttpGuard(asyncio.get_running_loop(), head_s=1000.0, idle_s=0.01)
    transport, inner = connect(guard)
    guard.serving(transport)
    guard.served(transport)
    send(transport, 10)
    for _ in range(1000):
        if inner.ended:
            break
        await asyncio.sleep(0.01)
    assert transport.aborted, "half a request more is none"
