"""Answers that ZeroMQ reads straight out of the pool.

    fetch_q ─▶ pinned bytes ─▶ handed to ZeroMQ without a copy ─▶ its last byte is with the kernel ─▶ unpinned

Bytes wait in the pool, where they are anyway, until their reader takes them: a slow one makes no memory grow. It may
have so many bytes on their way and no more; what it asks for beyond is refused as `busy`. One that takes nothing at
all is disconnected by ZeroMQ (main_loop.py), which ends its messages, and with them the pins.

ZeroMQ does not call back when it is done with a message, so those under way are looked through now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.qstore.reading import PinnedBytes
from lmcache_qserver.wire.clients import Client

SWEEP_S = 0.01
"""Between two looks."""


class Tracker(Protocol):
    """Says whether ZeroMQ still reads a message's bytes."""

    @property
    def done(self) -> bool:
        """It does not, and never will."""


SendBulk = Callable[[bytes, Sequence[bytes | memoryview]], Tracker | None]
"""Sends frames to a routing identity, the long ones without a copy; None when nothing was sent."""


class _UnderWay(NamedTuple):
    tracker: Tracker
    pinned: PinnedBytes
    client: Client
    nbytes: int


class BulkAnswers:
    """All bulk answers under way.

    Args:
        cap_bytes: of one client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: SendBulk, *, cap_bytes: int) -> None:
        self._loop = loop
        self._send = send
        self._cap_bytes = cap_bytes
        self._under_way: list[_UnderWay] = []
        self._is_scheduled = False

    @property
    def nbytes(self) -> int:
        """Bytes under way, over all clients. O(answers)."""
        return sum(one.nbytes for one in self._under_way)

    def check_room(self, client: Client, nbytes: int) -> None:
        """Make sure that the client may ask for so many bytes more.

        Raises:
            RequestError(busy): it has not taken enough of those before.
        """
        if client.bulk_bytes + nbytes > self._cap_bytes:
            self._sweep()
        if client.bulk_bytes and client.bulk_bytes + nbytes > self._cap_bytes:
            raise RequestError(
                ErrorCode.BUSY,
                f"{client.bulk_bytes} bytes are on their way to you, {self._cap_bytes} are the most: read some first",
            )

    def send(
        self, client: Client, frames: Sequence[bytes | memoryview], pinned: PinnedBytes
    ) -> None:
        """Send frames, among them the pinned bytes, which are unpinned when ZeroMQ is done with them."""
        tracker = self._send(client.identity, frames)
        if tracker is None:
            pinned.release()
            return
        nbytes = len(pinned.data)
        client.bulk_bytes += nbytes
        self._under_way.append(_UnderWay(tracker, pinned, client, nbytes))
        self._schedule()

    def close(self) -> None:
        """Unpin everything; call it when the socket is closed."""
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            self._end(one)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_later(SWEEP_S, self._look_again)

    def _look_again(self) -> None:
        self._is_scheduled = False
        self._sweep()
        if self._under_way:
            self._schedule()

    def _sweep(self) -> None:
        waiting = []
        for one in self._under_way:
            if one.tracker.done:
                self._end(one)
            else:
                waiting.append(one)
        self._under_way = waiting

    @staticmethod
    def _end(one: _UnderWay) -> None:
        one.client.bulk_bytes -= one.nbytes
        one.pinned.release()
