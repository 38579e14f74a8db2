"""From healthy to lost and back, against a fake server that dies, hangs, forgets and returns."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_qclient.link import health
from lmcache_qclient.link.connection import Connection
from lmcache_qclient.link.health import Heartbeat
from lmcache_qprotocol.messages import HelloReply
from lmcache_qprotocol.operations import GET_CHUNK_SIZE, NOOP
from tests.worker_client.link.fake_server import FakeServer, Silence
from tests.worker_client.link.waiting import wait_until

NEVER_S = 3600.0


class Owner:
    """Counts what the heartbeat tells it."""

    def __init__(self) -> None:
        self.lost = 0
        self.restored: list[HelloReply] = []
        self.failing = 0
        self.healthy_inside: list[bool] = []
        self.heartbeat: Heartbeat | None = None

    def on_lost(self) -> None:
        self.lost += 1

    def on_restored(self, hello: HelloReply) -> None:
        assert self.heartbeat is not None
        self.healthy_inside.append(self.heartbeat.healthy)
        if self.failing:
            self.failing -= 1
            raise ZeroDivisionError("the owner's bug")
        self.restored.append(hello)


@pytest.fixture
def connection(server: FakeServer) -> Iterator[Connection]:
    connection = Connection.open(server.url, client="test")
    yield connection
    connection.close()


class Rig:
    """A heartbeat under test and its owner."""

    def __init__(self, connection: Connection, **options: Any) -> None:
        self.owner = Owner()
        options = {"interval_s": NEVER_S, "reply_timeout_s": 5.0, **options}
        self.heartbeat = Heartbeat(
            connection,
            on_lost=self.owner.on_lost,
            on_restored=self.owner.on_restored,
            ping_payloads=lambda: ("worker",),
            **options,
        )
        self.owner.heartbeat = self.heartbeat
        self.heartbeat.start()


@pytest.fixture
def rig(connection: Connection) -> Iterator[Rig]:
    rig = Rig(connection)
    yield rig
    rig.heartbeat.stop()


def pings(server: FakeServer) -> int:
    return sum(name == "ping" for name, _ in server.requests)


def test_pings_at_the_interval_with_the_payloads(
    connection: Connection, server: FakeServer
) -> None:
    rig = Rig(connection, interval_s=0.01)
    wait_until(lambda: pings(server) >= 3)
    rig.heartbeat.stop()
    assert ("ping", ("worker", None)) in server.requests
    assert rig.heartbeat.healthy
    assert not rig.owner.lost


def test_beat_now_does_not_wait_for_the_interval(rig: Rig, server: FakeServer) -> None:
    rig.heartbeat.beat_now()
    wait_until(lambda: pings(server) == 1)
    assert rig.heartbeat.healthy


def test_a_hang_up_is_noticed_at_once_and_fails_what_is_outstanding(
    rig: Rig, connection: Connection, server: FakeServer, tmp_path: Path
) -> None:
    def silent(_: object) -> None:
        raise Silence

    server.answers["noop"] = silent
    outstanding = connection.link.submit(NOOP)
    server.stop()
    with pytest.raises(ConnectionError, match="lifeline hung up"):
        outstanding.result(10)
    assert not rig.heartbeat.healthy
    wait_until(lambda: rig.owner.lost == 1)
    successor = FakeServer(server.url, tmp_path / "lifeline.sock")
    wait_until(lambda: rig.heartbeat.healthy)
    assert [hello.boot_id for hello in rig.owner.restored] == [successor.boot_id]
    assert rig.owner.healthy_inside == [False]
    assert rig.owner.lost == 1
    successor.stop()


def test_a_hanging_server_is_lost_after_the_time_out(
    connection: Connection, server: FakeServer
) -> None:
    def silent(_: object) -> None:
        raise Silence

    server.answers["ping"] = silent
    rig = Rig(connection, reply_timeout_s=0.2)
    rig.heartbeat.beat_now()
    wait_until(lambda: rig.owner.lost)
    wait_until(lambda: rig.owner.restored)  # it still greets
    rig.heartbeat.stop()


def test_a_restart_without_a_lifeline_is_noticed_by_any_reply() -> None:
    server = FakeServer()
    connection = Connection.open(server.url, client="test")
    rig = Rig(connection)
    server.stop()
    successor = FakeServer(server.url)
    with pytest.raises(ConnectionError, match="restarted"):
        connection.link.call(GET_CHUNK_SIZE)
    wait_until(lambda: rig.owner.restored)
    assert rig.owner.restored[0].boot_id == successor.boot_id
    wait_until(lambda: rig.heartbeat.healthy)
    rig.heartbeat.stop()
    connection.close()
    successor.stop()


def test_a_server_that_forgot_us_is_told_again(
    rig: Rig, connection: Connection, server: FakeServer
) -> None:
    server.answers["ping"] = lambda request: bool(rig.owner.restored)
    rig.heartbeat.beat_now()
    wait_until(lambda: rig.owner.restored)
    wait_until(lambda: rig.heartbeat.healthy)
    assert rig.owner.restored == [connection.hello]
    assert not rig.owner.lost
    assert sum(name == "hello" for name, _ in server.requests) == 1


def test_a_failing_owner_is_asked_again(
    rig: Rig, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    rig.owner.failing = 2
    server.answers["ping"] = lambda request: bool(rig.owner.restored)
    with caplog.at_level(logging.WARNING):
        rig.heartbeat.beat_now()
        wait_until(lambda: rig.heartbeat.healthy and rig.owner.restored)
    assert rig.owner.lost == 1
    assert "the owner's bug" in caplog.text


def test_a_failing_on_lost_does_not_end_the_heartbeat(
    connection: Connection, server: FakeServer
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    heartbeat = Heartbeat(connection, interval_s=NEVER_S, on_lost=broken)
    heartbeat.start()
    server.hang_up()
    wait_until(lambda: sum(name == "hello" for name, _ in server.requests) == 2)
    wait_until(lambda: heartbeat.healthy)
    heartbeat.stop()


def test_start_and_stop_are_idempotent(connection: Connection) -> None:
    heartbeat = Heartbeat(connection)
    heartbeat.start()
    heartbeat.start()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("lmcache-q-heartbeat") == 1
    heartbeat.stop()
    heartbeat.stop()
    heartbeat.start()
    heartbeat.beat_now()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("lmcache-q-heartbeat") == 0


def test_stop_does_not_wait_for_a_server_that_is_away(
    rig: Rig, connection: Connection, server: FakeServer
) -> None:
    server.stop()
    wait_until(lambda: rig.owner.lost)
    wait_until(lambda: connection.link.outstanding)  # a greeting is under way
    stopper = threading.Thread(target=rig.heartbeat.stop)
    stopper.start()
    stopper.join(4.0)  # less than reply_timeout_s
    assert not stopper.is_alive()


def test_stopping_in_a_callback(connection: Connection, server: FakeServer) -> None:
    heartbeat = Heartbeat(connection, interval_s=NEVER_S, on_lost=lambda: heartbeat.stop())
    heartbeat.start()
    server.hang_up()
    wait_until(
        lambda: "lmcache-q-heartbeat" not in {thread.name for thread in threading.enumerate()}
    )
    heartbeat.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_unhealthy(rig: Rig) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            rig.heartbeat.start()
            rig.heartbeat.beat_now()
            rig.heartbeat.stop()
            status = 1 if rig.heartbeat.healthy else 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rig.heartbeat.healthy


def test_an_answer_that_the_hang_up_overtakes_is_not_lost(
    connection: Connection, server: FakeServer, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops answers first and hangs up then; the two come over different sockets."""
    monkeypatch.setattr(health, "ARRIVE_S", 10.0)
    server.holding = True
    future = connection.link.submit(GET_CHUNK_SIZE)
    wait_until(lambda: len(server.held) == 1)
    server.hang_up()
    wait_until(lambda: not rig.heartbeat.healthy)
    server.release_held()
    assert future.result(10) == 256
