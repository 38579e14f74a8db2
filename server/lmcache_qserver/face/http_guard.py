"""Bounds what a peer of the HTTP port can hold: connections, the time of a request, and its bytes.

    connected ─┬─ a request's head is complete ─▶ in service ─┬─ answered ─▶ idle (the next request may come)
               └─ not within HEAD_S ─▶ closed                 └─ not taken, no next request within IDLE_S ─▶ closed

When there are as many connections as there may be, the one that has waited longest for its peer makes room: a probe is
served however many others say nothing. None is closed for it while it is in service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

MAX_CONNECTIONS = 256
MAX_REQUEST_BYTES = 64 << 10
"""Head and body; what is asked here fits in some hundred."""
HEAD_S = 10.0
IDLE_S = 75.0
"""Longer than the usual scrape interval of a minute, so that a scraper keeps its connection."""


class HttpGuard:
    """All connections of one port.

    Args:
        loop: where they are served.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        max_connections: int = MAX_CONNECTIONS,
        head_s: float = HEAD_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._loop = loop
        self._max_connections = max_connections
        self._head_s = head_s
        self._idle_s = idle_s
        self._connections: dict[Any, GuardedConnection] = {}
        self._waiting: dict[Any, asyncio.TimerHandle] = {}  # for its peer, the longest first

    def __len__(self) -> int:
        """Open connections."""
        return len(self._connections)

    def wrap(self, inner: asyncio.Protocol) -> GuardedConnection:
        """What a listener takes for a new connection that `inner` serves."""
        return GuardedConnection(inner, self)

    def made(self, connection: GuardedConnection) -> None:
        """Called by a connection that is there now."""
        if len(self._connections) >= self._max_connections and self._waiting:
            next(iter(self._waiting)).abort()
        self._connections[connection.transport] = connection
        self._wait(connection.transport, self._head_s)

    def lost(self, connection: GuardedConnection) -> None:
        """Called by a connection that is over."""
        self._connections.pop(connection.transport, None)
        self._stop_waiting(connection.transport)

    def serving(self, transport: Any) -> None:
        """A request is complete and in service."""
        self._stop_waiting(transport)

    def served(self, transport: Any) -> None:
        """Its answer is on the way, and the next request may come."""
        connection = self._connections.get(transport)
        if connection is not None:
            connection.received_bytes = 0
            self._wait(transport, self._idle_s)

    def _wait(self, transport: Any, seconds: float) -> None:
        self._stop_waiting(transport)
        self._waiting[transport] = self._loop.call_later(seconds, transport.abort)

    def _stop_waiting(self, transport: Any) -> None:
        timer = self._waiting.pop(transport, None)
        if timer is not None:
            timer.cancel()


class GuardedConnection(asyncio.Protocol):
    """Hands everything on to the protocol that serves, and counts."""

    def __init__(self, inner: asyncio.Protocol, guard: HttpGuard) -> None:
        self.transport: Any = None
        self.received_bytes = 0
        self._inner = inner
        self._guard = guard
        self.pause_writing: Callable[[], None] = inner.pause_writing
        self.resume_writing: Callable[[], None] = inner.resume_writing
        self.eof_received: Callable[[], bool | None] = inner.eof_received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = transport
        self._guard.made(self)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._guard.lost(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self.received_bytes += len(data)
        if self.received_bytes > MAX_REQUEST_BYTES:
            self.transport.abort()
            return
        self._inner.data_received(data)
