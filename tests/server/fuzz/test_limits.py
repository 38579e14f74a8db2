"""Every limit is reached over the real sockets: a stable code, bounded memory, and nobody else is held up."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import time
from collections import Counter

import msgspec
import pytest
import zmq

from lmcache_qprotocol.codec import decode_reply, encode, encode_request
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.lifeline import Attach, Refused
from lmcache_qprotocol.messages import RangeKey, ReplyMeta, RingDescription, StoreProof
from lmcache_qprotocol.operations import BY_NAME
from lmcache_qprotocol.stamps import STAMP_BYTES
from lmcache_qserver.qstore.lifecycle import MAX_INSTANCES_PER_CLIENT
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from lmcache_qserver.wire.clients import MAX_CLIENTS
from lmcache_qserver.wire.lifeline import MAX_CONNECTIONS
from tests.server.fuzz.bystander import Bystander
from tests.server.fuzz.hostile_fds import closing, memfd

META = msgspec.msgpack.Decoder(ReplyMeta)


def test_outstanding_requests_of_one_client(daemon: RunningDaemon, bystander: Bystander) -> None:
    """Stores of 4 MiB each pile up behind their lane; beyond the limit they are refused at once, and all are answered."""
    layout = msgspec.structs.replace(SMALL_LAYOUT, head_dim=1 << 14)
    rows_bytes = 16 * layout.token_bytes
    nbytes = rows_bytes + 16 * STAMP_BYTES
    sent = 1500
    with (
        BareClient(daemon.url) as client,
        BareLifeline(daemon.lifeline) as lifeline,
        closing(memfd(nbytes, 2)) as fd,
    ):
        limit = (hello := client.hello()).limits.outstanding_requests
        os.close(lifeline.attach(hello.session)[1])
        description = RingDescription(
            layout=layout,
            num_blocks=1,
            block_size=16,
            chunk_size=16,
            ring_token=lifeline.offer(fd, nbytes),
            stamps_offset=rows_bytes,
        )
        client.ask("register_q_cache", "many", (), "m", 1, "t", None, (), description)
        client.socket.setsockopt(zmq.RCVHWM, 0)
        for number in range(sent):
            key = RangeKey(
                model_name="m##query",
                world_size=1,
                worker_id=0,
                end=16,
                chunk_hashes=(number.to_bytes(32, "big"),),
                layout_id=layout_id(layout),
            )
            store = (key, "many", ((0,),), b"", StoreProof(nonces=(1,)))
            client.send(encode_request(encode(number), BY_NAME["store_q"], store))
        bystander.check()
        codes: Counter[str] = Counter()
        client.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        for _ in range(sent):
            try:
                result = decode_reply(client.receive(), BY_NAME["store_q"]).result
                codes["stored" if result.ok else str(*result.outcome.refused)] += 1
            except RequestError as error:
                codes[error.code.value] += 1
    print(codes)
    assert codes["busy"] > 0
    assert codes["busy"] <= sent - limit
    assert sum(codes.values()) == sent


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
    lifelines = [BareLifeline(daemon.lifeline) for _ in range(MAX_CONNECTIONS - 1)]
    wait_until(lambda: _connections(daemon) == MAX_CONNECTIONS, "all are there")
    with BareLifeline(daemon.lifeline) as refused:
        assert refused.socket.recv(1) == b""
    bystander.check()
    lifelines.pop().socket.close()
    wait_until(lambda: _connections(daemon) < MAX_CONNECTIONS, "one is gone")
    with BareLifeline(daemon.lifeline) as admitted:
        assert isinstance(admitted.exchange(Attach(bytes(16)))[0], Refused)
    for lifeline in lifelines:
        lifeline.socket.close()


def _connections(daemon: RunningDaemon) -> int:
    return int(daemon.status()["server"]["lifeline_connections"])


def test_without_descriptors_the_answer_is_busy(bystander: Bystander) -> None:
    """The table of files is full to the last entry: attach, offer and connect are answered, and serve again later."""
    with (
        running_daemon(chunk_size=16, pool_bytes="1MiB") as daemon,
        BareClient(daemon.url) as client,
        BareLifeline(daemon.lifeline) as lifeline,
        closing(small_ring()[0]) as ring,
    ):
        session = client.hello().session
        wait_until(lambda: daemon.open_files("socket:") > 0, "it has accepted")
        lifeline.exchange(Attach(bytes(16)))
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        highest = 1 + max(int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd"))
        _fill_gaps(daemon, highest)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (highest, limits[1]))
        answer, fds = lifeline.exchange(Attach(session))
        assert isinstance(answer, Refused), answer
        assert answer.code is ErrorCode.BUSY
        assert fds == []
        answer, _ = lifeline.exchange(Attach(session), [ring])
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


def _fill_gaps(daemon: RunningDaemon, highest: int) -> None:
    """Numbers below the highest that are free: one connection each."""
    used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    assert used <= highest
    for _ in itertools.repeat(None, highest - used):
        HOLDERS.append(socket.create_connection(_address(daemon.url)))
    wait_until(
        lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) >= highest, "no number is free below"
    )


HOLDERS: list[socket.socket] = []


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_ten_thousand_connects_in_a_row(daemon: RunningDaemon, bystander: Bystander) -> None:
    for number in range(5_000):
        socket.create_connection(_address(daemon.url)).close()
        BareLifeline(daemon.lifeline).socket.close()
        if number % 500 == 0:
            bystander.check()


@pytest.mark.parametrize("first", [b"", b"\xff", b"\xff\0\0\0\0\0\0\0\x01\x7f", b"GET / HTTP/1.1\r\n"])
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
    deaf = zmq.Context.instance().socket(zmq.DEALER)
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


