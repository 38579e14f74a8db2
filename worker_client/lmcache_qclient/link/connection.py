"""A connection to one server: requests, greeting and lifeline, opened and renewed together.

Bytes go one of two ways, the *transport*: `shm`, memory that the lifeline passes, or `inline`, in the messages
themselves. It is chosen at every greeting: `auto` takes the lifeline where its socket can be reached.
"""

from __future__ import annotations

import logging
import os
import time

from lmcache_qclient.link.lifeline import LifelineClient
from lmcache_qclient.link.requests import RequestLink
from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.messages import PROTOCOL_VERSION, Hello, HelloReply
from lmcache_qprotocol.operations import HELLO

logger = logging.getLogger(__name__)

MIN_TIMEOUT_S = 0.1

AUTO, SHM, INLINE = "auto", "shm", "inline"
TRANSPORTS = (AUTO, SHM, INLINE)


class Connection:
    """A greeted server; made by `open`.

    One thread at a time calls `renew` or `close`; `link` and `lifeline` may be used by all.

    Attributes:
        link: for requests; it stays the same object when the connection is renewed.
        hello: what the server said at the last greeting.
        lifeline: None when the server has none, or it is not reachable from here. After a failed `renew` it is the
            former one, closed.
        no_lifeline_because: words for people when `lifeline` is None.
        transport: how bytes go, SHM or INLINE. SHM without a lifeline means that they can't.
    """

    def __init__(self, link: RequestLink, client: str, wanted: str = AUTO) -> None:
        self.link = link
        self.client = client
        self.transport = ""
        self._wanted = wanted
        self.hello: HelloReply
        self.lifeline: LifelineClient | None = None
        self.no_lifeline_because = ""

    @classmethod
    def open(
        cls, url: str, *, client: str, timeout_s: float = 10.0, transport: str = AUTO
    ) -> Connection:
        """Connect to the server at `url` and say hello.

        Args:
            client: program and version, for the server's logs.
            timeout_s: for all of it, seconds.
            transport: one of TRANSPORTS.

        Raises:
            ValueError: the url is none, or there is no such transport.
            ConnectionError: no server answers there in time.
            RequestError: it refused; unsupported_version for one.
        """
        check_transport(transport)
        connection = cls(RequestLink(url), client, transport)
        try:
            connection._greet(time.monotonic() + timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def url(self) -> str:
        """Of the server's ZeroMQ endpoint."""
        return self.link.url

    def is_alive(self) -> bool:
        """Whether the server is not known to be dead; without a lifeline nothing tells."""
        return self.lifeline is None or self.lifeline.is_open()

    def renew(self, timeout_s: float = 10.0) -> HelloReply:
        """Start over: new socket, new session, new lifeline. What was outstanding fails with ConnectionError.

        The server drops what it held for the former session (leases). Rings must be registered again.

        Raises:
            ConnectionError, RequestError: as `open`; the connection is good for nothing but another `renew` then.
        """
        if self.lifeline is not None:
            self.lifeline.close()
        self.link.reconnect()
        return self._greet(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Close both sockets; what is outstanding fails with ConnectionError. Idempotent."""
        self.link.close()
        if self.lifeline is not None:
            self.lifeline.close()

    def _greet(self, deadline: float) -> HelloReply:
        former = self.hello.session if self.transport else b""
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            client=self.client,
            pid=os.getpid(),
            former_session=former,
        )
        reply: HelloReply = self.link.call(HELLO, (hello,), _left(deadline))
        lifeline = self._attach(reply, deadline)
        self.hello, self.lifeline = reply, lifeline
        self._choose_transport()
        if self.link.boot_id is None:
            self.link.boot_id = reply.boot_id  # the greeting's own reply came without it
        return reply

    def _choose_transport(self) -> None:
        takes_inline = self.hello.limits.bulk_bytes > 0
        inline = self._wanted == INLINE or (self._wanted == AUTO and self.lifeline is None)
        before, self.transport = self.transport, INLINE if inline and takes_inline else SHM
        if not takes_inline and self.lifeline is None:
            self.no_lifeline_because += (
                "; and the server takes no bytes inline: start it with --allow-inline"
            )
        if self.transport == INLINE and before != INLINE:
            logger.warning(
                "bytes to and from %s go inline, in messages: the same results, slower (%s)",
                self.url,
                self.no_lifeline_because,
            )

    def _attach(self, hello: HelloReply, deadline: float) -> LifelineClient | None:
        if self._wanted == INLINE:
            self.no_lifeline_because = "the lifeline is not used, because transport is inline"
            return None
        if not hello.lifeline:
            self.no_lifeline_because = f"the server at {self.url} runs without a lifeline socket"
            return None
        try:
            lifeline = LifelineClient.connect(hello.lifeline, hello.session, _left(deadline))
        except (ConnectionError, RequestError) as error:
            self.no_lifeline_because = str(error)
            logger.info("no lifeline to %s: %s", self.url, error)
            return None
        self.no_lifeline_because = ""
        return lifeline


def check_transport(transport: str) -> None:
    """Make sure that there is such a transport.

    Raises:
        ValueError: there is not.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is one of {', '.join(TRANSPORTS)}, not {transport!r}")


def _left(deadline: float) -> float:
    return max(MIN_TIMEOUT_S, deadline - time.monotonic())
