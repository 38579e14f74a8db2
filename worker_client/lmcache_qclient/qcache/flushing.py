"""Waiting until the server has everything in its persistent tier.

The wait holds no lock, so other threads go on with the same connection; when one of them has to renew it, the question
is asked again for the rest of the time. A server that was restarted meanwhile can't answer it: what it has is
persisted, and what the former one had not written is gone, so `True` would say something false.
"""

from __future__ import annotations

import time
from functools import partial

from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.store_errors import NotPersisted
from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.messages import FlushReply, HelloReply
from lmcache_qprotocol.operations import FLUSH_Q

MOST_S = 3600.0
"""What a server waits at most."""


def flush(session: Session, timeout_s: float, stored_at: bytes) -> None:
    """Return when everything that is stored is in the persistent tier.

    Args:
        timeout_s: for it to be so, seconds.
        stored_at: boot id of the server that was stored to last; empty: nothing was.

    Raises:
        ValueError: no such time.
        NotPersisted: it is not, or can't be known to be.
        ConnectionError: the server does not answer.
    """
    if not 0 <= timeout_s <= MOST_S:
        raise ValueError(f"timeout_s is in [0, {MOST_S:g}] seconds, not {timeout_s}")
    deadline = time.monotonic() + timeout_s
    boot_id = stored_at
    for more in (True, False):
        left_s = max(0.0, deadline - time.monotonic())
        future, hello = session.run(partial(_begin, session, left_s))
        if boot_id not in (b"", hello.boot_id):
            raise NotPersisted(
                "the server was restarted since the last store: look up what it has, and store again what is missing"
            )
        boot_id = hello.boot_id
        try:
            reply: FlushReply = session.wait(future, FLUSH_Q, left_s + session.timeout_s)
        except (ConnectionError, RequestError) as error:
            if not more or not session.suspect(error, hello):
                raise
            continue
        if not reply.persisted:
            raise NotPersisted(reply.message, reply.waiting)
        return


def _begin(session: Session, left_s: float) -> tuple[ReplyFuture, HelloReply]:
    return session.submit(FLUSH_Q, (int(left_s * 1000),)), session.connection.hello
