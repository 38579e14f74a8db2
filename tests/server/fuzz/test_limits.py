"""Every limit is reached over the real sockets: a stable code, bounded memory, and nobody else is held up."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from lmcache_qprotocol.codec import decode_reply, encode, encode_request
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.lifeline import Attach, OfferRing, Refused
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import RangeKey, StoreProof
from lmcache_qprotocol.operations import BY_NAME
from lmcache_qserver.qstore.lifecycle import MAX_INSTANCES_PER_CLIENT
from lmcache_qserver.testing.bare_client import (
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from lmcache_qserver.wire.clients import MAX_CLIENTS
from lmcache_qserver.wire.dispatch import OUTSTANDING_MESSAGES
from lmcache_qserver.wire.lifeline import MAX_CONNECTIONS
from tests.server.fuzz.bystander import MIB, Bystander
from tests.server.fuzz.hostile_fds import closing
from tests.server.wire_worker import WireWorker

PREFIX = 1 << 17
"""Tokens; hashing them takes a lane tens of milliseconds."""


class Slow:
    """A worker whose lane hashes long prefixes, so that its stores pile up."""

    def __init__(self, worker: WireWorker) -> None:
        self.worker = worker
        self.limit = Limits().outstanding_requests
        self.sent = 0
        self.long_key = worker.key(start=PREFIX - 16, end=PREFIX, token_ids=(300,) * PREFIX)

    def send(self, key: RangeKey) -> None:
        """One store of one block, without waiting."""
        store = (key, self.worker.instance_id, ((0,),), b"", StoreProof(nonces=(1,)))
        self.worker.client.send(encode_request(encode(self.sent), BY_NAME["store_q"], store))
        self.sent += 1

    def codes(self) -> Counter[str]:
        """How all of them ended; each is answered."""
        codes: Counter[str] = Counter()
        for _ in range(self.sent):
            try:
                decode_reply(self.worker.client.receive(), BY_NAME["store_q"])
                codes["ok"] += 1
            except RequestError as error:
                codes[error.code.value] += 1
        return codes


@pytest.fixture
def bystander(daemon: RunningDaemon) -> Iterator[Bystander]:
    """One client's unanswered messages may take 64 MiB; what the allocator keeps of them and of decoding is as much."""
    made = Bystander(daemon, growth_bytes=128 * MIB)
    yield made
    made.close()


@pytest.fixture
def slow(daemon: RunningDaemon, bystander: Bystander) -> Iterator[Slow]:
    with WireWorker(daemon, "slow") as worker:
        worker.client.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        yield Slow(worker)


def test_outstanding_requests_of_one_client(slow: Slow, bystander: Bystander) -> None:
    """Beyond the limit they are refused at once, and every one is answered."""
    for _ in range(3):
        slow.send(slow.long_key)
    for _ in range(slow.limit + 400):
        slow.send(slow.worker.key(bytes(32)))  # all wait for the first of them
    bystander.check()
    codes = slow.codes()
    print(codes)
    assert codes["busy"] > 0
    assert codes["ok"] >= slow.limit
    bystander.check()


def test_outstanding_bytes_of_one_client(slow: Slow, bystander: Bystander) -> None:
    """Long messages are refused long before there are many of them."""
    for _ in range(4):
        slow.send(slow.long_key)
    opaque = {"x": msgspec.Raw(encode(bytes(4 << 20)))}
    for _ in range(40):
        slow.send(slow.worker.key(bytes(32), request_configs=opaque))
    bystander.check()
    codes = slow.codes()
    print(codes)
    fit = OUTSTANDING_MESSAGES * (16 << 20) // (4 << 20)
    assert codes["busy"] > 0
    assert codes["ok"] - 4 >= fit - 2
    bystander.check()


def test_clients(daemon: RunningDaemon, bystander: Bystander) -> None:
    """One more than the table holds: the longest silent makes room, and memory does not grow with them."""
    context = zmq.Context()
    for number in range(MAX_CLIENTS + 200):
        with context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 1000)
            client.connect(daemon.url)
            client.send_multipart([b"\x01", b"\x18"])
            client.recv_multipart()
        if number % 500 == 0:
            bystander.check()
    context.term()
    assert daemon.status()["server"]["clients"] <= MAX_CLIENTS


def test_instances_of_one_client(daemon: RunningDaemon, bystander: Bystander) -> None:
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        os.close(lifeline.attach(client.hello().session)[1])
        ring = small_ring()
        for number in range(MAX_INSTANCES_PER_CLIENT):
            register_small_ring(client, lifeline, number, 16, ring=ring)
        with pytest.raises(RequestError) as caught:
            register_small_ring(client, lifeline, "one more", 16, ring=ring)
        assert caught.value.code is ErrorCode.BUSY
        client.ask("unregister_q_cache", 0)
        register_small_ring(client, lifeline, "one more", 16, ring=ring)
        os.close(ring[0])


def test_lifelines(daemon: RunningDaemon, bystander: Bystander) -> None:
    """Those beyond the limit are closed at once; who was there before stays; the next is let in when one goes."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(BareLifeline(daemon.lifeline))
        for _ in range(MAX_CONNECTIONS - 2):
            stack.enter_context(BareLifeline(daemon.lifeline))
        wait_until(lambda: _connections(daemon) == MAX_CONNECTIONS, "all are there")
        with BareLifeline(daemon.lifeline) as refused:
            assert refused.socket.recv(1) == b""
        bystander.check()
        first.socket.close()
        wait_until(lambda: _connections(daemon) < MAX_CONNECTIONS, "one is gone")
        with BareLifeline(daemon.lifeline) as admitted:
            assert isinstance(admitted.exchange(Attach(bytes(16)))[0], Refused)


def _connections(daemon: RunningDaemon) -> int:
    return int(daemon.metrics()["lmcache_qserver_lifelines"])


def test_without_descriptors_the_answer_is_busy(bystander: Bystander) -> None:
    """The table of files is full to the last entry: attach, offer and connect are answered, and serve again later."""
    with (
        running_daemon(chunk_size=16, pool_bytes="1MiB") as daemon,
        BareClient(daemon.url) as client,
        BareLifeline(daemon.lifeline) as lifeline,
        WireWorker(daemon, register=False) as attached,
        closing(small_ring()[0]) as ring,
        contextlib.ExitStack() as holders,
    ):
        session = client.hello().session
        wait_until(lambda: daemon.open_files("socket:") > 0, "it has accepted")
        lifeline.exchange(Attach(bytes(16)))
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        highest = 1 + max(int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd"))
        _fill_gaps(daemon, highest, holders)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (highest, limits[1]))
        answer, fds = lifeline.exchange(Attach(session))
        assert isinstance(answer, Refused), answer
        assert answer.code is ErrorCode.BUSY
        assert fds == []
        offer = OfferRing(bytes(16), 4096)
        answer, _ = attached.lifeline.exchange(offer, [ring])
        assert isinstance(answer, Refused)
        assert answer.code is ErrorCode.BUSY
        assert client.ask("noop").result == "OK"
        waiting = BareLifeline(daemon.lifeline)  # in the backlog: nobody can accept it
        assert client.ask("noop").result == "OK"
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        os.close(lifeline.attach(session)[1])
        register_small_ring(client, lifeline, "late", 16)
        assert isinstance(waiting.exchange(Attach(bytes(16)))[0], Refused)
        waiting.socket.close()
        assert "Traceback" not in daemon.log()


def _fill_gaps(daemon: RunningDaemon, highest: int, holders: contextlib.ExitStack) -> None:
    """Numbers below the highest that are free: one connection each."""
    used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    assert used <= highest
    for _ in itertools.repeat(None, highest - used):
        holders.enter_context(socket.create_connection(_address(daemon.url)))
    wait_until(
        lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) >= highest, "no number is free below"
    )


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_ten_thousand_connects_in_a_row(daemon: RunningDaemon, bystander: Bystander) -> None:
    for number in range(5_000):
        socket.create_connection(_address(daemon.url)).close()
        BareLifeline(daemon.lifeline).socket.close()
        if number % 500 == 0:
            bystander.check()


@pytest.mark.parametrize(
    "first", [b"", b"\xff", b"\xff\0\0\0\0\0\0\0\x01\x7f", b"GET / HTTP/1.1\r\n"]
)
def test_who_connects_and_stalls_holds_up_nobody(
    daemon: RunningDaemon, bystander: Bystander, first: bytes
) -> None:
    connections = [socket.create_connection(_address(daemon.url)) for _ in range(200)]
    for connection in connections:
        connection.sendall(first)
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        bystander.check()
    for connection in connections:
        connection.close()


def test_a_reader_of_no_answers_costs_little(daemon: RunningDaemon, bystander: Bystander) -> None:
    """80 MB of answers for somebody who reads none: some wait here, the others are dropped and counted."""
    before = daemon.metrics()["lmcache_qserver_answers_undeliverable_total"]
    deaf: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.RCVBUF, 4096)
    deaf.connect(daemon.url)
    deaf.send_multipart([b"\x01", encode("hello"), encode({"protocol_version": 1, "client": "x"})])
    op = encode("no such operation" + "x" * 40)
    for _ in range(40):
        for _ in range(1000):
            deaf.send_multipart([b"\x01", op])
        bystander.check()
    wait_until(
        lambda: daemon.metrics()["lmcache_qserver_answers_undeliverable_total"] > before,
        "answers are dropped",
    )
    deaf.close()
    bystander.check_resources()


def test_half_a_packet_is_a_packet(daemon: RunningDaemon, bystander: Bystander) -> None:
    """Packets have borders: half of one is refused, not waited for, and the rest of it too."""
    with BareLifeline(daemon.lifeline) as lifeline:
        whole = msgspec.msgpack.encode(Attach(bytes(16)))
        for part in (whole[:9], whole[9:], whole + b"\0"):
            answer, _ = lifeline.exchange(part)
            assert isinstance(answer, Refused)
            assert answer.code is ErrorCode.BAD_PAYLOAD
        bystander.check()
