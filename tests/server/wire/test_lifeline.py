"""The lifeline: memory by descriptor, and death in milliseconds."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.lifeline import Accepted, Attach, Attached, OfferRing, Refused, encode_packet
from lmcache_qserver.copying import RingMemory
from lmcache_qserver.testing.bare_client import (
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon, environment, wait_until
from lmcache_qserver.wire import descriptors
from lmcache_qserver.wire import lifeline as lifeline_module
from lmcache_qserver.wire.clients import Clients
from lmcache_qserver.wire.counts import WireCounts
from lmcache_qserver.wire.lifeline import MAX_RINGS, LifelineServer, uid_is_allowed

TOKEN = b"t" * 16
RINGS = "memfd:test-ring"
"""In the names of the daemon's descriptors of rings."""

WORKER = """
import os, sys
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline, register_small_ring
url, path, instance_id, fork = sys.argv[1:]
client, lifeline = BareClient(url), BareLifeline(path)
lifeline.attach(client.hello().session)
register_small_ring(client, lifeline, instance_id, 16)
grandchild = 0
if fork == "fork":
    grandchild = os.fork()  # it holds a copy of the lifeline's socket
    if grandchild == 0:
        import time
        time.sleep(60)
        os._exit(0)
print(grandchild, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _connections_of_the_test_before_are_gone(daemon: RunningDaemon) -> None:
    """So that descriptors can be counted."""
    wait_until(lambda: daemon.metrics()["lmcache_qserver_lifelines"] == 0, "no lifeline is open")


@pytest.fixture
def attached(daemon: RunningDaemon) -> Iterator[tuple[BareClient, BareLifeline]]:
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        _, pool_fd = lifeline.attach(client.hello().session)
        os.close(pool_fd)
        yield client, lifeline


def refused(answer: object) -> ErrorCode:
    assert isinstance(answer, Refused), answer
    return answer.code


def test_who_may_connect() -> None:
    own = os.geteuid()
    assert uid_is_allowed(own, ())
    assert uid_is_allowed(0, ())
    assert not uid_is_allowed(own + 1, ())
    assert not uid_is_allowed(own + 1, (own + 2,))
    assert uid_is_allowed(own + 1, (own + 2, own + 1))


def test_the_peer_is_who_connected() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        assert descriptors.peer_uid(left) == os.getuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(daemon: RunningDaemon) -> None:
    before = daemon.metrics()["lmcache_qserver_lifeline_refused_peers_total"]
    os.chmod(daemon.folder, 0o755)
    os.chmod(daemon.lifeline, 0o666)
    script = (
        "import os, socket, sys; os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]);"
        "sys.exit(s.recv(1) != b'')"
    )
    done = subprocess.run([sys.executable, "-c", script, daemon.lifeline], check=False, timeout=30)
    assert done.returncode == 0
    after = daemon.metrics()["lmcache_qserver_lifeline_refused_peers_total"]
    assert after == before + 1


def test_the_pool_can_be_read_and_nothing_else(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        attached, fd = lifeline.attach(client.hello().session)
        try:
            assert attached.pool_bytes == os.fstat(fd).st_size
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            with mmap.mmap(fd, attached.pool_bytes, prot=mmap.PROT_READ) as view:
                assert len(view) == attached.pool_bytes
            with pytest.raises(PermissionError):
                mmap.mmap(fd, attached.pool_bytes)
            with pytest.raises(OSError, match=r"Invalid argument|Bad file"):
                os.ftruncate(fd, 0)
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    mmap.mmap(again, attached.pool_bytes)
                with pytest.raises(PermissionError):
                    os.ftruncate(again, 0)
                with pytest.raises(PermissionError):
                    os.pwrite(again, b"x", 0)
            finally:
                os.close(again)
        finally:
            os.close(fd)


def test_an_unknown_session_can_not_attach_and_a_known_one_only_once(
    daemon: RunningDaemon,
) -> None:
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        answer, fds = lifeline.exchange(Attach(TOKEN))
        assert refused(answer) is ErrorCode.HELLO_REQUIRED
        assert fds == []
        session = client.hello().session
        _, fd = lifeline.attach(session)
        os.close(fd)
        assert refused(lifeline.exchange(Attach(session))[0]) is ErrorCode.BAD_PAYLOAD
        with BareLifeline(daemon.lifeline) as second:
            assert refused(second.exchange(Attach(session))[0]) is ErrorCode.NOT_OWNER


def test_bad_packets_are_refused_and_the_connection_lives(
    daemon: RunningDaemon, attached: tuple[BareClient, BareLifeline]
) -> None:
    _, lifeline = attached
    fd, nbytes, _ = small_ring()
    files = daemon.open_files(RINGS)
    offer = OfferRing(TOKEN, nbytes)
    assert refused(lifeline.exchange(b"\xc1")[0]) is ErrorCode.BAD_PAYLOAD
    assert refused(lifeline.exchange(b"\xc1", [fd])[0]) is ErrorCode.BAD_PAYLOAD
    assert refused(lifeline.exchange(Attached(1))[0]) is ErrorCode.BAD_PAYLOAD
    assert refused(lifeline.exchange(offer)[0]) is ErrorCode.BAD_PAYLOAD
    assert refused(lifeline.exchange(offer, [fd, fd])[0]) is ErrorCode.BAD_FRAME
    assert refused(lifeline.exchange(bytes(5000))[0]) is ErrorCode.BAD_FRAME
    wait_until(lambda: daemon.open_files(RINGS) == files, "the others are closed")
    assert isinstance(lifeline.exchange(offer, [fd])[0], Accepted)
    wait_until(lambda: daemon.open_files(RINGS) == files + 1, "the others are closed")
    assert refused(lifeline.exchange(offer, [fd])[0]) is ErrorCode.BAD_PAYLOAD
    wait_until(lambda: daemon.open_files(RINGS) == files + 1, "the others are closed")
    os.close(fd)


def test_an_offer_needs_an_attached_connection(daemon: RunningDaemon) -> None:
    fd, nbytes, _ = small_ring()
    with BareLifeline(daemon.lifeline) as lifeline:
        answer, _ = lifeline.exchange(OfferRing(TOKEN, nbytes), [fd])
        assert refused(answer) is ErrorCode.HELLO_REQUIRED
    os.close(fd)


def test_offers_are_bounded_and_closed_with_the_connection(daemon: RunningDaemon) -> None:
    fd, nbytes, _ = small_ring()
    with BareClient(daemon.url) as client:
        session = client.hello().session
        files = daemon.open_files(RINGS)
        with BareLifeline(daemon.lifeline) as lifeline:
            os.close(lifeline.attach(session)[1])
            opened = daemon.open_files(RINGS)
            for _ in range(MAX_RINGS):
                lifeline.offer(fd, nbytes)
            answer, _ = lifeline.exchange(OfferRing(TOKEN, nbytes), [fd])
            assert refused(answer) is ErrorCode.BUSY
            wait_until(
                lambda: daemon.open_files(RINGS) == opened + MAX_RINGS, "the others are closed"
            )
        wait_until(lambda: daemon.open_files(RINGS) == files, "all descriptors are closed")
    os.close(fd)


def test_memory_that_can_shrink_is_refused(
    daemon: RunningDaemon, attached: tuple[BareClient, BareLifeline]
) -> None:
    client, lifeline = attached
    files = daemon.open_files(RINGS)
    fd = os.memfd_create("test-ring-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    token = lifeline.offer(fd, 1 << 20)
    os.close(fd)
    good = register_small_ring(client, lifeline, "good", 16)
    with pytest.raises(RequestError) as caught:
        client.ask(
            "register_q_cache",
            "bad",
            (),
            "m",
            1,
            "test",
            None,
            (),
            msgspec.structs.replace(good, ring_token=token),
        )
    assert caught.value.code is ErrorCode.RING_REFUSED
    client.ask("unregister_q_cache", "good")
    wait_until(lambda: daemon.open_files(RINGS) == files, "all descriptors are closed")


def test_connecting_again_and_again_leaves_nothing_open(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client:
        client.hello()
        files = daemon.open_files()
        for number in range(50):
            with BareLifeline(daemon.lifeline) as lifeline:
                os.close(lifeline.attach(client.hello().session)[1])
                register_small_ring(client, lifeline, number, 16)
        wait_until(lambda: daemon.status()["registered_q_ids"] == [], "all instances are gone")
        wait_until(lambda: daemon.open_files() <= files, "all descriptors are closed")


@pytest.mark.parametrize("fork", ["alone", "fork"])
def test_a_killed_worker_is_released_within_a_second(daemon: RunningDaemon, fork: str) -> None:
    if fork == "fork" and not _kernel_has_peer_pidfd():
        pytest.skip("this kernel has no SO_PEERPIDFD (Linux 6.5)")
    client = BareClient(daemon.url)
    assert client.ask("noop").result == "OK"
    files = daemon.open_files()
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, daemon.url, daemon.lifeline, f"killed-{fork}", fork],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    grandchild = int(worker.stdout.readline())
    try:
        assert f"killed-{fork}" in daemon.status()["registered_q_ids"]
        os.kill(worker.pid, signal.SIGKILL)
        began = time.monotonic()
        wait_until(
            lambda: f"killed-{fork}" not in daemon.status()["registered_q_ids"],
            "the dead worker's instance is gone",
            deadline_s=1.0,
        )
        print(f"released after {1000 * (time.monotonic() - began):.0f} ms")
        if grandchild:
            os.kill(grandchild, 0)  # it is alive, and still holds the socket
    finally:
        if grandchild:
            os.kill(grandchild, signal.SIGKILL)
        worker.kill()
        worker.wait()
        worker.stdin.close()
        worker.stdout.close()
    wait_until(lambda: daemon.open_files() <= files, "all descriptors are closed")
    client.socket.close()


def test_a_peer_that_does_not_read_its_answers_is_dropped(daemon: RunningDaemon) -> None:
    files = daemon.open_files()
    with BareLifeline(daemon.lifeline) as lifeline:
        lifeline.socket.settimeout(30)

        def send_for_ever() -> None:
            while True:
                lifeline.socket.send(encode_packet(Attach(TOKEN)))

        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            send_for_ever()
    wait_until(lambda: daemon.open_files() <= files, "the connection is closed")


def _kernel_has_peer_pidfd() -> bool:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        fd = descriptors.peer_pidfd(left)
        if fd is not None:
            os.close(fd)
        return fd is not None


async def test_who_connects_and_says_nothing_is_closed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline_module, "ATTACH_S", 0.05)
    server = LifelineServer(
        asyncio.get_running_loop(),
        Clients(lambda session: None),
        WireCounts(),
        pool_fd=-1,
        pool_bytes=0,
        allowed_uids=(),
        clock=time.monotonic,
        take_memory=RingMemory,
    )
    server.open(tmp_path / "lifeline.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.setblocking(False)
        silent.connect(str(tmp_path / "lifeline.sock"))
        loop = asyncio.get_running_loop()
        assert await asyncio.wait_for(loop.sock_recv(silent, 1), 10) == b""
    assert len(server) == 0
    server.close()
