"""Connection and heartbeat against the real daemon: killed with SIGKILL, and back on the same address."""

from __future__ import annotations

import threading

from lmcache_qclient.link.connection import Connection
from lmcache_qclient.link.health import Heartbeat
from lmcache_qprotocol.messages import HelloReply
from lmcache_qprotocol.operations import GET_CHUNK_SIZE, NOOP, PING
from lmcache_qserver.testing.daemon import running_daemon


def test_killed_and_back() -> None:
    lost, restored = threading.Event(), threading.Event()
    greetings: list[HelloReply] = []

    def on_restored(hello: HelloReply) -> None:
        greetings.append(hello)
        restored.set()

    with running_daemon(chunk_size=32) as daemon:
        connection = Connection.open(daemon.url, client="test")
        assert connection.hello.boot_id == connection.link.boot_id == daemon.boot_id
        assert connection.link.call(NOOP) == "OK"
        assert connection.link.call(PING, (None,)) is True
        heartbeat = Heartbeat(
            connection,
            interval_s=3600,
            on_lost=lost.set,
            on_restored=on_restored,
            ping_payloads=lambda: (None,),
        )
        heartbeat.start()
        daemon.process.kill()
        daemon.process.wait()
        assert lost.wait(10)
        assert not heartbeat.healthy
    with running_daemon(chunk_size=64, url=daemon.url) as successor:
        assert restored.wait(10)
        assert greetings[-1].boot_id == successor.boot_id != daemon.boot_id
        assert connection.link.call(GET_CHUNK_SIZE) == 64
        assert connection.lifeline is not None
        assert connection.lifeline.is_open()
        heartbeat.stop()
        connection.close()
