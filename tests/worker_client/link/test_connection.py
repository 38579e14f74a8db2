"""Greeting and lifeline together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_qclient.link.connection import Connection
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.operations import NOOP
from tests.worker_client.link.fake_server import FakeServer


def test_open_greets_and_attaches(server: FakeServer) -> None:
    connection = Connection.open(server.url, client="test/1")
    name, (hello,) = server.requests[0]
    assert (name, hello.client, hello.pid) == ("hello", "test/1", os.getpid())
    assert connection.hello.boot_id == server.boot_id == connection.link.boot_id
    assert connection.lifeline is not None
    assert connection.lifeline.is_open()
    connection.close()
    assert not connection.lifeline.is_open()


def test_a_server_without_a_lifeline() -> None:
    server = FakeServer()
    connection = Connection.open(server.url, client="test")
    assert connection.lifeline is None
    assert "without a lifeline" in connection.no_lifeline_because
    assert connection.link.call(NOOP) == "OK"
    connection.close()
    server.stop()


def test_a_lifeline_out_of_reach(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "lifeline.sock").unlink()
    connection = Connection.open(server.url, client="test")
    assert connection.lifeline is None
    assert "not reachable" in connection.no_lifeline_because
    connection.close()


def takes_inline(server: FakeServer) -> None:
    server.limits = Limits(bulk_bytes=1 << 20)


def test_the_lifeline_is_taken_where_it_can_be_reached(server: FakeServer) -> None:
    takes_inline(server)
    connection = Connection.open(server.url, client="test")
    assert connection.transport == "shm"
    connection.close()


def test_bytes_go_inline_where_it_can_not_and_the_log_says_so_once(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    takes_inline(server)
    (tmp_path / "lifeline.sock").unlink()
    connection = Connection.open(server.url, client="test")
    assert connection.transport == "inline"
    connection.renew()
    assert connection.transport == "inline"
    assert sum("go inline" in record.message for record in caplog.records) == 1
    connection.close()


def test_inline_by_choice_leaves_the_lifeline_alone(server: FakeServer) -> None:
    takes_inline(server)
    connection = Connection.open(server.url, client="test", transport="inline")
    assert connection.transport == "inline"
    assert connection.lifeline is None
    assert not server.lifelines
    connection.close()


@pytest.mark.parametrize("transport", ["auto", "inline"])
def test_a_server_that_takes_nothing_inline(
    server: FakeServer, tmp_path: Path, transport: str
) -> None:
    (tmp_path / "lifeline.sock").unlink()
    connection = Connection.open(server.url, client="test", transport=transport)
    assert (connection.transport, connection.lifeline) == ("shm", None)
    assert "allow-inline" in connection.no_lifeline_because
    connection.close()


def test_shm_by_choice_never_goes_inline(server: FakeServer, tmp_path: Path) -> None:
    takes_inline(server)
    (tmp_path / "lifeline.sock").unlink()
    connection = Connection.open(server.url, client="test", transport="shm")
    assert (connection.transport, connection.lifeline) == ("shm", None)
    connection.close()


def test_an_unknown_transport_is_refused_with_the_list(server: FakeServer) -> None:
    with pytest.raises(ValueError, match="auto, shm, inline"):
        Connection.open(server.url, client="test", transport="carrier pigeon")


def test_a_renewed_greeting_names_the_session_before_it(server: FakeServer) -> None:
    connection = Connection.open(server.url, client="test", transport="inline")
    former = connection.hello.session
    connection.renew()
    greetings = [payloads[0] for name, payloads in server.requests if name == "hello"]
    assert [one.former_session for one in greetings] == [b"", former]
    connection.close()


def test_nobody_there() -> None:
    with pytest.raises(ConnectionError, match="lmcache-qserver start"):
        Connection.open("tcp://127.0.0.1:9", client="test", timeout_s=0.1)


def test_a_refused_greeting(server: FakeServer) -> None:
    def refuse(_: object) -> None:
        raise RequestError(ErrorCode.UNSUPPORTED_VERSION, "too new")

    server.answers["hello"] = refuse
    with pytest.raises(RequestError) as caught:
        Connection.open(server.url, client="test")
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_renew_follows_a_restarted_server(server: FakeServer, tmp_path: Path) -> None:
    connection = Connection.open(server.url, client="test")
    link, former = connection.link, connection.lifeline
    server.stop()
    with pytest.raises(ConnectionError):
        connection.renew(0.1)
    successor = FakeServer(server.url, tmp_path / "lifeline.sock")
    hello = connection.renew()
    assert hello.boot_id == successor.boot_id == connection.hello.boot_id
    assert connection.link is link
    assert connection.lifeline is not None
    assert connection.lifeline is not former
    assert former is not None
    assert former.hung_up
    assert link.call(NOOP) == "OK"
    connection.close()
    successor.stop()
