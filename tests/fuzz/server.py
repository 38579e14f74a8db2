"""The server without sockets, threads and clocks: clients, dispatcher, handlers, store and a small pool in one loop."""

from __future__ import annotations

import asyncio
import logging
import os
from unittest import mock

from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.copying import RingMemory
from lmcache_qserver.device.processes import DeviceProcesses
from lmcache_qserver.events import EventBus
from lmcache_qserver.pool import Pool, PoolMemory
from lmcache_qserver.qstore import QStoreModule, checksums, lifecycle
from lmcache_qserver.testing.bare_client import small_ring
from lmcache_qserver.wire.bulk_answers import BulkAnswers
from lmcache_qserver.wire.clients import Clients, Session
from lmcache_qserver.wire.counts import WireCounts
from lmcache_qserver.wire.dispatch import Dispatcher
from lmcache_qserver.wire.handlers import Handlers
from tests.fuzz.inline_lane import InlineLane
from tests.fuzz.messages import Message
from tests.server.ring_writer import RingWriter

CHUNK_SIZE = 16
POOL_BYTES = 8 * 4096
IDENTITIES = (b"one", b"two")
TURNS = 12
"""Of the loop, after which an answer is there, if nothing waits for a time."""
WAITS = 2000
"""Milliseconds, after which it must be."""


class _Errors(logging.Handler):
    """What the server logs as its own failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class GivingLifeline:
    """Has a ring under every token, in which block b holds chunk b of a sequence under nonce 1."""

    def __init__(self) -> None:
        self.fd, self.nbytes, _ = ring = small_ring()
        self.writer = RingWriter(ring)
        for block in range(4):
            self.writer.stamp(block, first_stamp(1, block * CHUNK_SIZE))

    def take_ring(self, ring_token: bytes) -> RingMemory:
        return RingMemory(os.dup(self.fd), self.nbytes)

    def close(self) -> None:
        self.writer.close()


class Server:
    """Serves messages of two clients by turns, who are attached as soon as they have said hello."""

    def __init__(self) -> None:
        self.memory = PoolMemory(POOL_BYTES)
        self.pool = Pool(self.memory)
        self.counts = WireCounts()
        self.now = 0.0
        self.answers: list[list[bytes]] = []
        self.module = QStoreModule(
            pool=self.pool, bus=EventBus(), chunk_size=CHUNK_SIZE, clock=lambda: self.now
        )
        self.clients = Clients(self._gone)
        self._leaving: set[asyncio.Future[None]] = set()
        limits = Limits(message_bytes=1 << 16, outstanding_requests=4)
        bulk = BulkAnswers(
            asyncio.get_running_loop(), lambda identity, frames: None, cap_bytes=1 << 16
        )
        handlers = Handlers(
            self.module,
            self.clients,
            DeviceProcesses(None, "", lambda: None),
            boot_id=bytes(16),
            features=("transfer_query",),
            chunk_size=CHUNK_SIZE,
            limits=limits,
            bulk=bulk,
            lifeline="",
            clock=lambda: self.now,
        )
        self.dispatcher = Dispatcher(
            handlers.table(),
            self.clients,
            self.counts,
            lambda _, frames: self.answers.append([*map(bytes, frames)]),
            bulk,
            boot_id=bytes(16),
            limits=limits,
            clock=lambda: self.now,
        )
        self.dispatcher.start()

    def _gone(self, session: Session) -> None:
        gone = asyncio.ensure_future(self.module.client_gone(session, self.now))
        self._leaving.add(gone)
        gone.add_done_callback(self._leaving.discard)

    async def serve(self, number: int, frames: Message) -> None:
        """One message, and the check of what it has left.

        Raises:
            AssertionError: a fault of the server.
        """
        identity = IDENTITIES[number % 2]
        self.now += 1.0
        answers = len(self.answers)
        self.dispatcher.handle(identity, frames)
        client = self.clients.seen(identity, self.now)
        assert client is not None
        if client.native and client.session.lifeline is None and not client.session.gone:
            client.session.lifeline = GivingLifeline()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        for _ in range(WAITS):  # checksums are made in pauses
            if not client.outstanding:
                break
            await asyncio.sleep(0.001)
        self.module.reads.expire_leases(self.now)
        told = [code for (_, code), count in self.counts.requests.items() if count]
        assert "internal" not in told, "the server failed"
        assert client.outstanding == client.outstanding_bytes == 0, "something is not answered"
        answerable = len(frames) >= 2 and all(0 < len(frame) <= 64 for frame in frames[:2])
        if client.native:
            assert len(self.answers) - answers == int(answerable)
        self.module.index.validate()
        usage = self.pool.usage()
        assert usage.reserved_bytes == 0, "a reservation was left"

    async def close(self) -> None:
        """Everything goes, and nothing is left."""
        for identity in IDENTITIES:
            client = self.clients.seen(identity, self.now)
            assert client is not None
            self.clients.end(client.session)
        while self._leaving:
            await asyncio.wait(set(self._leaving))
        await self.dispatcher.stop()
        await self.module.close()
        assert self.pool.usage().leased_bytes == 0, "a lease was left"
        self.memory.close()


def run(messages: list[Message]) -> None:
    """Serve these messages with a new server."""

    async def serve_all() -> None:
        server = Server()
        for number, frames in enumerate(messages):
            await server.serve(number // 2, frames)
        await server.close()

    errors = _Errors()
    root = logging.getLogger()
    root.handlers = [errors]
    with (
        mock.patch.object(lifecycle, "Lane", InlineLane),
        mock.patch.object(checksums, "Lane", InlineLane),
    ):
        asyncio.run(serve_all())
    assert not errors.lines, errors.lines
