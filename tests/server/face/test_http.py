"""The HTTP port over the real daemon: what it answers, and what no peer can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from lmcache_qserver.face.http import HttpFace
from lmcache_qserver.face.http_guard import MAX_CONNECTIONS, MAX_REQUEST_BYTES
from lmcache_qserver.face.status import ServerState
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, start_daemon, wait_until

PATHS = ("/", "/livez", "/readyz", "/health", "/version", "/status", "/metrics")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as one:
        yield one


def ask(
    daemon: RunningDaemon, method: str, path: str, body: bytes | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(daemon.http_url.removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def connect(daemon: RunningDaemon) -> socket.socket:
    host, _, port = daemon.http_url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    """Whether the daemon has hung up; anything that it has said is passed over."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_probes(daemon: RunningDaemon) -> None:
    assert ask(daemon, "GET", "/livez") == (200, b"ok\n")
    assert ask(daemon, "GET", "/readyz") == ask(daemon, "GET", "/health") == (200, b"ok\n")
    status, body = ask(daemon, "GET", "/version")
    assert (status, list(json.loads(body))) == (200, ["version"])
    assert ask(daemon, "HEAD", "/livez") == (200, b"")
    assert ask(daemon, "GET", "/livez?verbose=1")[0] == 200


def test_a_daemon_that_stops_hangs_up(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    with connect(daemon) as kept:
        kept.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0
        assert is_closed(kept)


@pytest.mark.parametrize(
    "path", ["/config", "/status/", "/../etc/passwd", "//status", "/%2e%2e/x", "/\0"]
)
def test_unknown_paths_are_404(daemon: RunningDaemon, path: str) -> None:
    with connect(daemon) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(4096).split()[1] in (b"404", b"400")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_served(daemon: RunningDaemon, method: str) -> None:
    for path in PATHS:
        assert ask(daemon, method, path)[0] == 405
    assert ask(daemon, "POST", "/status", b"x" * 1000)[0] == 405
    assert ask(daemon, "GET", "/livez") == (200, b"ok\n")


def hostile_requests() -> Iterator[tuple[str, bytes]]:
    yield "a long line", b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n"
    yield "a long header", b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n"
    yield "many headers", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200_000 + b"\r\n"
    yield "a header without end", b"GET / HTTP/1.1\r\nX: " + b"a" * (4 << 20)
    yield "a long body", b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n" + b"a" * (4 << 20)
    yield (
        "chunks",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 400_000,
    )
    yield "two lengths", b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
    yield "garbage", os.urandom(1 << 20)
    yield "tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)


@pytest.mark.parametrize("request_bytes", [pytest.param(b, id=a) for a, b in hostile_requests()])
def test_what_is_too_large_or_no_request_is_cut_off(
    daemon: RunningDaemon, request_bytes: bytes
) -> None:
    with connect(daemon) as connection:
        try:
            connection.sendall(request_bytes)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
        assert answer == b"" or answer.split()[1] in (b"400", b"405", b"413", b"431")
        wait_until(lambda: is_closed(connection), "the daemon hangs up")
    assert ask(daemon, "GET", "/livez") == (200, b"ok\n")
    assert "Traceback" not in daemon.log()


def test_no_request_takes_memory() -> None:
    with running_daemon() as daemon:
        ask(daemon, "GET", "/status")
        before = daemon.resident_bytes()
        for _ in range(20):
            with connect(daemon) as connection:
                try:
                    connection.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 500_000)
                except ConnectionError:
                    continue
        assert daemon.resident_bytes() - before < 16 << 20


def test_many_slow_peers_hold_up_no_probe() -> None:
    """More connections than there may be, each in the middle of a request: those that wait longest make room."""
    with running_daemon() as daemon, ExitStack() as stack:
        files = daemon.open_files()
        slow = []
        for _ in range(MAX_CONNECTIONS + 100):
            one = stack.enter_context(connect(daemon))
            one.sendall(b"GET /livez HTTP/1.1\r\nX-Slow: ")
            slow.append(one)
        for _ in range(20):
            began = time.monotonic()
            assert ask(daemon, "GET", "/livez") == (200, b"ok\n")
            assert time.monotonic() - began < 5
        assert daemon.open_files() - files <= MAX_CONNECTIONS + 2
        wait_until(lambda: sum(map(is_closed, slow)) >= 100, "the oldest are closed")
        assert not is_closed(slow[-1])
        slow[-1].setblocking(True)
        slow[-1].sendall(b"done\r\nHost: x\r\n\r\n")
        assert slow[-1].recv(4096).startswith(b"HTTP/1.1 200"), "a slow one is served in its time"


class Stopping:
    """What HttpFace needs of a server for its probes."""

    def why_not_ready(self) -> str:
        return "stopping"


@contextlib.asynccontextmanager
async def small_face() -> AsyncIterator[int]:
    """Its port; of a server that stops, with short patience."""
    state = cast(ServerState, Stopping())
    face = HttpFace(state, CollectorRegistry(), head_s=0.2, idle_s=0.4)
    url = await face.open("127.0.0.1", 0)
    try:
        yield int(url.rpartition(":")[2])
    finally:
        await face.close()


async def test_a_stopping_server_is_alive_and_not_ready() -> None:
    async with small_face() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path, answer in (("livez", b"200"), ("readyz", b"503"), ("health", b"503")):
            writer.write(f"GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == answer
            body = await reader.readline()
            assert body == (b"ok\n" if answer == b"200" else b"stopping\n")
        writer.close()


async def test_a_request_that_takes_too_long_is_cut_off() -> None:
    """A byte now and then is no progress."""
    async with small_face() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ends = asyncio.ensure_future(reader.read())
        writer.write(b"GET /livez HTTP/1.1\r\nX: ")
        for _ in range(500):
            writer.write(b"x")
            await asyncio.wait({ends}, timeout=0.02)
            if ends.done():
                break
        assert ends.done(), "ten seconds of it"
        writer.close()


async def test_an_answered_peer_may_come_again_for_a_while() -> None:
    async with small_face() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


def test_a_peer_that_keeps_asking_is_served_on_one_connection(daemon: RunningDaemon) -> None:
    """The limit of bytes is a request's, not a connection's."""
    host = daemon.http_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=20)
    headers = {f"X-{number}": "y" * 4000 for number in range(5)}
    for _ in range(2 * MAX_REQUEST_BYTES // 20_000 + 2):
        connection.request("GET", "/livez", headers=headers)
        reply = connection.getresponse()
        assert (reply.status, reply.read()) == (200, b"ok\n")
    connection.close()
