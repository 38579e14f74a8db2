"""The SDK's connection: renews itself once when the server has been restarted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from lmcache_qclient.link.connection import INLINE, Connection
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qclient.qcache.fetched import Fetched
from lmcache_qclient.qcache.pool_map import PoolMap
from lmcache_qclient.qcache.source import Source
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import HelloReply
from lmcache_qprotocol.operations import Operation

Result = TypeVar("Result")

CLOSE_S = 1.0
"""How long `close` waits for an answer."""

_STRANGER = frozenset({ErrorCode.HELLO_REQUIRED, ErrorCode.LIFELINE_REQUIRED})
"""What a server says that does not know our session."""


class Session:
    """One request at a time over a connection of its own.

    Args:
        connection: open; closed with the session.
        timeout_s: for every answer, seconds.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        connection: Connection,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pool: PoolMap | None = None
        self._fetched: Fetched | None = None
        self._told: ReplyFuture | None = None
        self._broken = False

    def run(self, work: Callable[[], Result]) -> Result:
        """Do `work`, which may be done twice: once more on a new connection when the present one turns out dead.

        A new connection has a new session, so the server drops the leases that a lost answer may have granted.

        Raises:
            ConnectionError: the new connection failed as well, or could not be made.
            Exception: whatever else `work` raises.
        """
        with self._lock:
            if self._is_stale():
                self._renew()
            try:
                return work()
            except (ConnectionError, RequestError) as error:
                if not _is_lost(error):
                    raise
                self._renew()
                return self._second_try(work)

    def ask(self, operation: Operation, payloads: tuple[Any, ...]) -> Any:
        """One request; only inside `run`. Raises as `RequestLink.call`, at once when the server dies."""
        connection = self.connection
        return connection.link.call(operation, payloads, self.timeout_s, connection.is_alive)

    def submit(self, operation: Operation, payloads: tuple[Any, ...]) -> ReplyFuture:
        """Send one request, and go on; only inside `run`."""
        return self.connection.link.submit(operation, payloads)

    def wait(
        self, future: ReplyFuture, operation: Operation, timeout_s: float | None = None
    ) -> Any:
        """The answer of a submitted request. Raises as `ask`.

        Args:
            timeout_s: None: that of every answer.
        """
        connection = self.connection
        allowed_s = self.timeout_s if timeout_s is None else timeout_s
        return connection.link.wait(future, operation, allowed_s, connection.is_alive)

    def tell(self, operation: Operation, payloads: tuple[Any, ...]) -> None:
        """One request whose answer nobody waits for; only inside `run`. Its failure is of no concern."""
        self._told = self.connection.link.submit(operation, payloads)

    def suspect(self, error: ConnectionError | RequestError, hello: HelloReply) -> bool:
        """What was submitted in `run`, and waited for outside, failed: the next `run` renews the connection if need be.

        Args:
            hello: the greeting of the connection that it was submitted over.

        Returns:
            Whether it is worth a second try: the error is the connection's, not the request's.
        """
        if not _is_lost(error):
            return False
        with self._lock:
            if self.connection.hello.session == hello.session:
                self._broken = True
        return True

    def now(self) -> float:
        """Seconds, monotonic; what leases are measured in."""
        return self._clock()

    def still_leased(self, asked_at: float, lease_ms: int) -> bool:
        """Whether a lease has certainly not ended up to now, so that what has been read under it is right.

        The server counts its time from when the request came, which was after `asked_at`. The other end that a lease
        can have is its session's, and the server hangs the lifeline up before it takes a session's leases away.

        Args:
            asked_at: seconds, before the request was sent.
            lease_ms: as the reply said; 0 when it did not.
        """
        if self.connection.transport == INLINE:
            return True  # the server answered for every byte, which it does under a lease that holds only
        lifeline = self.connection.lifeline
        in_time = (self._clock() - asked_at) * 1000 < lease_ms
        return in_time and lifeline is not None and lifeline.is_open()

    def source(self) -> Source:
        """What reads the bytes of leases; only inside `run`.

        Raises:
            RequestError(lifeline_required): the server's memory can't be reached from here, and bytes don't go inline.
        """
        if self.connection.transport == INLINE:
            if self._fetched is None:
                self._fetched = Fetched(self.connection, self.timeout_s)
            return self._fetched
        lifeline = self.connection.lifeline
        if lifeline is None:
            raise RequestError(
                ErrorCode.LIFELINE_REQUIRED,
                "retrieving needs the server's memory: run on its host, or mount its runtime directory into this "
                f"container ({self.connection.no_lifeline_because})",
            )
        if self._pool is None or self._pool.lifeline is not lifeline:
            self._pool = PoolMap(lifeline)
        return self._pool

    def close(self) -> None:
        """Close the connection; the mapping goes with the last array over it."""
        with self._lock:
            self._pool = None
            self._wait_for_what_was_told()
            self.connection.close()

    def _wait_for_what_was_told(self) -> None:
        """Without a lifeline only the last release gives leases back before their time."""
        if self.connection.transport == INLINE and self._told is not None:
            with contextlib.suppress(Exception):  # it is of no concern any more
                self._told.exception(CLOSE_S)

    def _is_stale(self) -> bool:
        return self._broken or not self.connection.is_alive()

    def _renew(self) -> None:
        self._broken = True
        self._pool = None
        self.connection.renew(self.timeout_s)
        self._broken = False

    def _second_try(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except ConnectionError:
            self._broken = True
            raise


def _is_lost(error: ConnectionError | RequestError) -> bool:
    """The connection is to blame, or the server does not know it."""
    return not isinstance(error, RequestError) or error.code in _STRANGER
