"""Who is on the other side: clients by routing identity, and their sessions.

    Client     a routing identity of the ROUTER socket. It decides how answers are framed.
    Session    what the rest of the server takes for "the client": it owns instances, leases and one lifeline.

        first message ──▶ session without a token        (legacy: may do what LMCache's clients do)
        hello         ──▶ session with a token           the one before it is gone
        attach        ──▶ session with a lifeline        (lifeline.py)
        lifeline lost, hello again, idle for too long ──▶ the session is gone, once and for ever

Whoever has said hello once is answered in native form for as long as it is remembered, even when its session is gone:
an error says that a new hello is due, where silence would let it hang.

Invariants: a session is in `_by_token` exactly while it has a token and is not gone; `on_gone` is called once for it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lmcache_qprotocol.messages import Hello

if TYPE_CHECKING:
    from lmcache_qserver.copying import RingSource

MAX_CLIENTS = 4096
IDLE_S = 600.0


class Lifeline(Protocol):
    """A session's lifeline, as far as the main loop needs it."""

    def take_ring(self, ring_token: bytes) -> RingSource | None:
        """The ring that was offered under this token; it is the caller's from now on."""

    def close(self) -> None:
        """Close the connection and what it still holds."""


class Session:
    """Hashable by identity.

    Attributes:
        token: 16 random bytes after hello, None before.
        program, pid: as hello said, for logs.
        lifeline: while one is attached.
        gone: nothing may be given to it any more.
    """

    __slots__ = ("gone", "lifeline", "pid", "program", "token")

    def __init__(
        self, token: bytes | None = None, program: str = "legacy client", pid: int = 0
    ) -> None:
        self.token = token
        self.program = program
        self.pid = pid
        self.lifeline: Lifeline | None = None
        self.gone = False

    def __repr__(self) -> str:
        return f"{self.program!r} (pid {self.pid})" if self.token else self.program


class Client:
    """One routing identity.

    Attributes:
        native: it has said hello and gets native replies.
        outstanding, outstanding_bytes: requests that are not answered yet, and the length of their messages.
        bulk_bytes: of bulk answers that have not left yet.
        registered: it has registered an instance: its silence is the reaper's business for a while.
        silence_logged: the log has been told that failures of this client can't be answered.
    """

    __slots__ = (
        "bulk_bytes",
        "identity",
        "last_seen",
        "native",
        "outstanding",
        "outstanding_bytes",
        "registered",
        "session",
        "silence_logged",
    )

    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.session = Session()
        self.native = False
        self.last_seen = now
        self.outstanding = 0
        self.outstanding_bytes = 0
        self.bulk_bytes = 0
        self.registered = False
        self.silence_logged = False


class Clients:
    """The table of clients.

    Args:
        on_gone: called on the loop, once per session that is gone.
        idle_s: a client without lifeline is forgotten after so long without a message.
        registered_idle_s: the same for one that has registered an instance.
    """

    def __init__(
        self,
        on_gone: Callable[[Session], None],
        *,
        max_clients: int = MAX_CLIENTS,
        idle_s: float = IDLE_S,
        registered_idle_s: float = IDLE_S,
    ) -> None:
        self._on_gone = on_gone
        self._max_clients = max_clients
        self._idle_s = idle_s
        self._registered_idle_s = max(idle_s, registered_idle_s)
        self._by_identity: dict[
            bytes, Client
        ] = {}  # ordered by last_seen, the longest silent first
        self._by_token: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    @property
    def sessions(self) -> int:
        """Sessions that said hello and are not gone."""
        return len(self._by_token)

    @property
    def lifelines(self) -> int:
        """Sessions with a lifeline. O(sessions)."""
        return sum(session.lifeline is not None for session in self._by_token.values())

    def seen(self, identity: bytes, now: float) -> Client | None:
        """The client that a message comes from; None when there are too many, and none can be forgotten."""
        client = self._by_identity.pop(identity, None)
        if client is None:
            if len(self._by_identity) >= self._max_clients and not self._forget_one():
                return None
            client = Client(identity, now)
        client.last_seen = now
        self._by_identity[identity] = client
        return client

    def say_hello(self, client: Client, hello: Hello) -> Session:
        """A new session for the client; the one before is gone, and the one that it says it had."""
        self.end(client.session)
        former = self._by_token.get(hello.former_session)
        if former is not None:  # a client without lifeline that came back over another connection
            self.end(former)
        token = secrets.token_bytes(16)
        client.session = self._by_token[token] = Session(token, hello.client, hello.pid)
        client.native = True
        client.registered = False
        return client.session

    def by_token(self, token: bytes) -> Session | None:
        """The session that got this token in its reply to hello."""
        return self._by_token.get(token)

    def end(self, session: Session) -> None:
        """The session is gone; nothing if it was already. Closes its lifeline."""
        if session.gone:
            return
        session.gone = True
        if session.token is not None:
            del self._by_token[session.token]
        lifeline, session.lifeline = session.lifeline, None
        if lifeline is not None:
            lifeline.close()
        self._on_gone(session)

    def expire(self, now: float) -> int:
        """Forget clients without lifeline that were silent for too long; how many. Call it now and then."""
        silent = []
        for client in self._by_identity.values():
            if now - client.last_seen < self._idle_s:
                break
            limit_s = self._registered_idle_s if client.registered else self._idle_s
            if now - client.last_seen >= limit_s and self._may_forget(client):
                silent.append(client)
        for client in silent:
            self._forget(client)
        return len(silent)

    def _forget_one(self) -> bool:
        victim = next(filter(self._may_forget, self._by_identity.values()), None)
        if victim is not None:
            self._forget(victim)
        return victim is not None

    @staticmethod
    def _may_forget(client: Client) -> bool:
        return client.session.lifeline is None and client.outstanding == 0

    def _forget(self, client: Client) -> None:
        del self._by_identity[client.identity]
        self.end(client.session)
