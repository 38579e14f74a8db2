"""Attaching, offering, hang-up and forks of the lifeline, against a fake server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_qclient.link import forks
from lmcache_qclient.link.lifeline import LifelineClient, check_sealed
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.lifeline import Accepted, Attach, OfferRing, Packet, Refused
from tests.worker_client.link.fake_server import FakeServer
from tests.worker_client.link.memory import sealed_memory
from tests.worker_client.link.waiting import wait_until

SESSION = bytes(range(16))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lifeline.sock")


@pytest.fixture
def lifeline(server: FakeServer, path: str) -> Iterator[LifelineClient]:
    client = LifelineClient.connect(path, SESSION)
    yield client
    client.close()


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def noted(server: FakeServer) -> list[Packet]:
    """What comes over the lifeline from now on, accepted."""
    packets: list[Packet] = []

    def accept(packet: Packet) -> Packet:
        packets.append(packet)
        return Accepted()

    server.packet_answer = accept
    return packets


def test_attach_receives_the_pool(server: FakeServer, path: str) -> None:
    packets = noted(server)
    client = LifelineClient.connect(path, SESSION)
    assert packets == [Attach(session=SESSION)]
    assert client.pool_bytes == 4096
    assert os.fstat(client.pool_fd).st_size == 4096
    assert os.fstat(client.pool_fd).st_ino == os.fstat(server.pool_fd).st_ino
    assert fcntl.fcntl(client.pool_fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert fcntl.fcntl(client.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    client.close()
    assert client.pool_fd == -1


def test_a_ring_goes_over_with_its_descriptor(server: FakeServer, lifeline: LifelineClient) -> None:
    packets = noted(server)
    ring = sealed_memory(8192)
    tokens = {lifeline.offer_ring(ring, 8192) for _ in range(2)}
    assert len(tokens) == len(packets) == 2
    assert all(OfferRing(ring_token=token, nbytes=8192) in packets for token in tokens)
    assert [len(token) for token in tokens] == [16, 16]
    assert {os.fstat(fd).st_ino for fd in server.offered} == {os.fstat(ring).st_ino}
    os.close(ring)


def test_a_refusal_keeps_its_code_and_the_lifeline(
    server: FakeServer, lifeline: LifelineClient
) -> None:
    server.packet_answer = lambda packet: Refused(ErrorCode.RING_REFUSED, "not sealed")
    with pytest.raises(RequestError) as caught:
        lifeline.offer_ring(server.pool_fd, 1)
    assert caught.value.code is ErrorCode.RING_REFUSED
    assert lifeline.is_open()


def test_a_refused_attach_leaves_no_descriptor(server: FakeServer, path: str) -> None:
    server.packet_answer = lambda packet: Refused(ErrorCode.HELLO_REQUIRED, "who are you")
    client_side = open_descriptors()
    with pytest.raises(RequestError) as caught:
        LifelineClient.connect(path, SESSION)
    assert caught.value.code is ErrorCode.HELLO_REQUIRED
    wait_until(lambda: open_descriptors() == client_side)


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"nowhere.*host"):
        LifelineClient.connect(str(tmp_path / "nowhere"), SESSION)
    with pytest.raises(ConnectionError, match="not reachable"):
        LifelineClient.connect("/" + 200 * "x", SESSION)


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "mute"))
    listener.listen()
    with pytest.raises(ConnectionError, match="timed out"):
        LifelineClient.connect(str(tmp_path / "mute"), SESSION, timeout_s=0.05)
    listener.close()


def test_bytes_that_are_no_packet_close_the_lifeline(
    server: FakeServer, lifeline: LifelineClient
) -> None:
    server.packet_answer = lambda packet: {"kind": "nonsense"}  # type: ignore[assignment, return-value]
    with pytest.raises(ConnectionError, match="connect again"):
        lifeline.offer_ring(server.pool_fd, 1)
    assert not lifeline.is_open()


def test_hang_up_is_seen_without_reading(server: FakeServer, lifeline: LifelineClient) -> None:
    assert lifeline.is_open()
    assert not lifeline.hung_up
    server.hang_up()
    wait_until(lambda: not lifeline.is_open())
    assert lifeline.hung_up
    lifeline.close()
    assert lifeline.hung_up
    with pytest.raises(ConnectionError):
        lifeline.offer_ring(server.pool_fd, 1)


def test_closing_it_ourselves_is_no_hang_up(lifeline: LifelineClient) -> None:
    lifeline.close()
    lifeline.close()
    assert not lifeline.is_open()
    assert not lifeline.hung_up
    assert lifeline.fileno() == -1


@pytest.mark.parametrize(
    ("seals", "nbytes", "words"),
    [
        (0, 4096, "not sealed"),
        (fcntl.F_SEAL_GROW, 4096, "not sealed"),
        (fcntl.F_SEAL_SHRINK, 4097, "4096 bytes"),
    ],
)
def test_a_pool_that_may_fault_is_not_taken(seals: int, nbytes: int, words: str) -> None:
    fd = sealed_memory(4096, seals)
    with pytest.raises(ConnectionError, match=words):
        check_sealed(fd, nbytes)
    os.close(fd)


def test_a_plain_file_is_no_pool(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(ConnectionError, match="not sealed"):
        check_sealed(file.fileno(), 0)


def test_connect_checks_the_pool(server: FakeServer, path: str) -> None:
    os.close(server.pool_fd)
    server.pool_fd = sealed_memory(4096, 0)
    with pytest.raises(ConnectionError, match="not sealed"):
        LifelineClient.connect(path, SESSION)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_keep_it_alive(
    server: FakeServer, lifeline: LifelineClient
) -> None:
    """The server must see the parent's end while the child lives on."""
    hold, let_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(let_go)
            closed = lifeline.fileno() == -1 and lifeline.pool_fd == -1
            os.read(hold, 1)
        finally:
            os._exit(0 if closed else 1)
    assert lifeline.is_open()
    lifeline.close()
    wait_until(lambda: not server.lifelines)
    os.close(let_go)
    os.close(hold)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_lifelines_are_forgotten_when_nobody_uses_them(server: FakeServer, path: str) -> None:
    before = len(forks._holders)
    for _ in range(5):
        LifelineClient.connect(path, SESSION).close()
    assert len(forks._holders) == before


@pytest.fixture
def busy_listener(path: str) -> Iterator[tuple[socket.socket, list[socket.socket]]]:
    """A server that accepts nobody, and those that fill its queue."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        listener.settimeout(10.0)
        waiting: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
        waiting.pop().close()
        yield listener, waiting
        for one in waiting:
            one.close()


def test_a_server_with_others_to_accept_first_is_waited_for(
    busy_listener: tuple[socket.socket, list[socket.socket]], path: str
) -> None:
    listener, before = busy_listener
    client = LifelineClient(path, 10.0)
    waiting = threading.Thread(target=client._connect, args=(10.0,))
    waiting.start()
    for accepted in [listener.accept()[0] for _ in (*before, client)]:
        accepted.close()
    waiting.join(10.0)
    client._socket.getpeername()  # raises unless it is connected
    client.close()


def test_but_not_for_ever(
    busy_listener: tuple[socket.socket, list[socket.socket]], path: str
) -> None:
    with pytest.raises(ConnectionError, match="not reachable"):
        LifelineClient.connect(path, SESSION, timeout_s=0.05)
