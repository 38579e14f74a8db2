"""Futures, errors and ends of requests, against a fake server."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_qclient.link.requests import ReplyFuture, RequestLink
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import PROTOCOL_VERSION, Hello
from lmcache_qprotocol.operations import GET_CHUNK_SIZE, HELLO, NOOP, PING
from tests.worker_client.link.fake_server import FakeServer, Silence
from tests.worker_client.link.waiting import wait_until

GREETING = (Hello(protocol_version=PROTOCOL_VERSION, client="test"),)


@pytest.fixture
def link(server: FakeServer) -> Iterator[RequestLink]:
    link = RequestLink(server.url)
    yield link
    link.close()


def silent(_: object) -> None:
    raise Silence


def test_a_result_comes_back(link: RequestLink) -> None:
    assert link.call(GET_CHUNK_SIZE) == 256
    assert link.outstanding == 0


def test_results_are_matched_by_uid(link: RequestLink, server: FakeServer) -> None:
    server.answers["ping"] = lambda request: request.payloads[0] % 2 == 0
    futures = [link.submit(PING, (number,)) for number in range(100)]
    assert [future.result(10) for future in futures] == [number % 2 == 0 for number in range(100)]


def test_the_servers_error_has_its_code(link: RequestLink, server: FakeServer) -> None:
    def refuse(_: object) -> None:
        raise RequestError(ErrorCode.BUSY, "later")

    link.call(HELLO, GREETING)
    server.answers["noop"] = refuse
    with pytest.raises(RequestError) as caught:
        link.call(NOOP)
    assert caught.value.code is ErrorCode.BUSY


def test_an_answer_that_is_none_is_a_connection_error(
    link: RequestLink, server: FakeServer
) -> None:
    server.answers["noop"] = lambda request: 17
    with pytest.raises(ConnectionError, match="noop"):
        link.call(NOOP)


def test_silence_is_a_connection_error_that_says_what_to_do(
    link: RequestLink, server: FakeServer
) -> None:
    server.answers["noop"] = silent
    with pytest.raises(
        ConnectionError, match=r"noop within 0.05 s.*lmcache-qserver start"
    ) as caught:
        link.call(NOOP, timeout_s=0.05)
    assert server.url in str(caught.value)
    assert link.outstanding == 0


def test_nobody_waits_for_a_server_that_is_known_to_be_dead(
    link: RequestLink, server: FakeServer
) -> None:
    server.answers["noop"] = silent
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="died before it answered noop"):
        link.call(NOOP, timeout_s=60.0, is_alive=lambda: False)
    assert time.monotonic() - began < 10.0
    assert link.outstanding == 0


def test_a_server_that_lives_may_take_its_time(link: RequestLink, server: FakeServer) -> None:
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            server.release_held()
        return True

    server.holding = True
    assert link.call(GET_CHUNK_SIZE, timeout_s=60.0, is_alive=look) == 256
    assert looks >= 2


def test_a_late_reply_is_dropped(link: RequestLink, server: FakeServer) -> None:
    server.holding = True
    with pytest.raises(ConnectionError):
        link.call(NOOP, timeout_s=0.05)
    wait_until(lambda: server.held)
    server.holding = False
    server.release_held()
    assert link.call(GET_CHUNK_SIZE) == 256


def test_a_full_link_refuses_at_once(server: FakeServer) -> None:
    server.answers["noop"] = silent
    link = RequestLink(server.url, max_outstanding=3)
    futures = [link.submit(NOOP) for _ in range(4)]
    assert [future.done() for future in futures] == [False, False, False, True]
    with pytest.raises(ConnectionError, match="unanswered"):
        futures[3].result(0)
    link.close()
    with pytest.raises(ConnectionError, match="closed"):
        futures[0].result(0)


def test_ten_thousand_requests_leave_nothing_behind(link: RequestLink) -> None:
    for _ in range(20):
        for future in [link.submit(NOOP) for _ in range(500)]:
            assert future.result(10) == "OK"
    gc.collect()
    assert link.outstanding == 0
    assert not link._outbox
    assert not link._backlog
    assert sum(type(item) is ReplyFuture for item in gc.get_objects()) < 50


def test_requests_forgotten_while_the_server_is_away_pile_up_nowhere(server: FakeServer) -> None:
    server.stop()
    link = RequestLink(server.url, max_outstanding=8)
    link.submit(NOOP)  # waits, and everything else behind it
    for _ in range(100):
        assert link.forget(link.submit(NOOP))
    wait_until(lambda: not link._outbox)
    assert len(link._backlog) <= 9
    link.close()


def test_what_timed_out_is_not_sent_to_the_next_server(server: FakeServer) -> None:
    server.stop()
    link = RequestLink(server.url)
    timed_out = link.submit(GET_CHUNK_SIZE)
    wait_until(lambda: link._backlog)
    waiting = link.submit(NOOP)
    wait_until(lambda: len(link._backlog) == 2)  # so the first has been tried to send
    assert link.forget(timed_out)
    successor = FakeServer(server.url)
    assert waiting.result(10) == "OK"
    assert [name for name, _ in successor.requests] == ["noop"]
    link.close()
    successor.stop()


def test_fail_all_fails_what_is_outstanding_only(link: RequestLink, server: FakeServer) -> None:
    server.answers["noop"] = silent
    futures = [link.submit(NOOP) for _ in range(3)]
    assert link.fail_all(ConnectionError("died")) == 3
    for future in futures:
        with pytest.raises(ConnectionError, match="died"):
            future.result(0)
    assert link.call(GET_CHUNK_SIZE) == 256


def test_reconnect_takes_a_new_identity(link: RequestLink, server: FakeServer) -> None:
    link.call(HELLO, GREETING)
    assert link.boot_id == server.boot_id
    server.answers["noop"] = silent
    outstanding = link.submit(NOOP)
    link.reconnect()
    with pytest.raises(ConnectionError, match="replaced"):
        outstanding.result(0)
    assert link.call(GET_CHUNK_SIZE) == 256
    assert link.boot_id is None  # the server took us for a stranger


def test_a_restarted_server_is_noticed(link: RequestLink, server: FakeServer) -> None:
    seen: list[bytes | None] = []
    link.on_boot_id = seen.append
    link.call(HELLO, GREETING)
    server.stop()
    successor = FakeServer(server.url)
    with pytest.raises(ConnectionError, match="restarted"):
        link.call(NOOP)
    assert seen == [None]
    link.reconnect()
    link.call(HELLO, GREETING)
    assert link.boot_id == successor.boot_id
    successor.stop()


def test_another_boot_id_is_noticed(link: RequestLink, server: FakeServer) -> None:
    seen: list[bytes | None] = []
    link.on_boot_id = seen.append
    link.call(HELLO, GREETING)
    server.boot_id = bytes(16)
    with pytest.raises(ConnectionError, match="restarted"):
        link.call(NOOP)
    assert seen == [bytes(16)]
    assert link.call(NOOP) == "OK"


def test_callbacks_that_raise_do_not_end_the_link(
    link: RequestLink, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    future = link.submit(NOOP)
    future.add_done_callback(broken)
    future.result(10)
    assert link.call(NOOP) == "OK"


def test_a_callback_may_submit_and_close(server: FakeServer) -> None:
    link = RequestLink(server.url)
    closed = threading.Event()

    def close(_: object) -> None:
        link.close()
        closed.set()

    link.submit(NOOP).add_done_callback(close)
    assert closed.wait(10)
    with pytest.raises(ConnectionError, match="closed"):
        link.call(NOOP)


def test_close_is_idempotent_and_ends_the_thread(server: FakeServer) -> None:
    link = RequestLink(server.url, name="to-be-ended")
    link.close()
    link.close()
    assert "to-be-ended" not in {thread.name for thread in threading.enumerate()}


def test_submitting_from_many_threads(link: RequestLink) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                assert link.call(NOOP) == "OK"
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("url", ["", "nonsense", "tcp://127.0.0.1", "http://127.0.0.1:1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        RequestLink(url)


def test_too_few_payloads_are_the_callers_error(link: RequestLink) -> None:
    with pytest.raises(ValueError, match="ping"):
        link.submit(PING)
    assert link.outstanding == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_no_link(link: RequestLink) -> None:
    assert link.call(NOOP) == "OK"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            error = link.submit(NOOP).exception(0)
            link.reconnect()
            link.close()
            status = 0 if isinstance(error, ConnectionError) and "fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert link.call(NOOP) == "OK"


@pytest.mark.parametrize("ending", ["pass", "del link", "link.close()", "os.fork()"])
def test_a_process_ends_without_closing_its_link(server: FakeServer, ending: str) -> None:
    script = f"""
        import os
        from lmcache_qclient.link.requests import RequestLink
        from lmcache_qprotocol.operations import NOOP
        link = RequestLink({server.url!r})
        assert link.call(NOOP) == "OK"
        {ending}
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], timeout=30, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
