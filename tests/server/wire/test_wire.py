"""The real daemon, as a stock LMCache client and as a native client see it."""

from __future__ import annotations

import random

import msgspec
import pytest
import zmq

from lmcache_qprotocol.codec import encode
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.keys import KeyFamily
from lmcache_qprotocol.messages import (
    ChunkQuery,
    Hello,
    IdentityQuery,
    PartialChunk,
    RangeKey,
    RingDescription,
    StoreProof,
)
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until

QUERY = ChunkQuery(
    family=KeyFamily(model_name="m##query", world_size=1, kv_rank=0x01000100), chunk_hashes=()
)


FEATURES = b"\x94" + b"".join(
    bytes([0xA0 + len(name)]) + name
    for name in (
        b"transfer_query",
        b"transfer_key",
        b"transfer_value",
        b"transfer_attention_output",
    )
)


@pytest.mark.parametrize(
    ("operation", "payloads", "result"),
    [
        (b"\x18", [], b"\xa2OK"),  # noop
        (b"\xa4noop", [], b"\xa2OK"),
        (b"\x15", [], b"\x10"),  # get_chunk_size: 16
        (b"\xaeget_chunk_size", [], b"\x10"),
        (b"\x16", [b"\xc0"], b"\xc3"),  # ping of nobody: true
        (b"\x16", [b"\x07"], b"\xc2"),  # ping of an unknown instance: false
        (b"\xa4ping", [b"\xc0"], b"\xc3"),
        (b"\x20", [], FEATURES),  # get_experimental
        (b"\xb0get_experimental", [], FEATURES),
        (b"\x05", [b"\xc1"] * 4, b"\x92\xc4\x00\xc2"),  # a store that can't be decoded: ["", false]
    ],
)
def test_legacy_bytes(
    daemon: RunningDaemon, operation: bytes, payloads: list[bytes], result: bytes
) -> None:
    with BareClient(daemon.url) as client:
        client.send([b"\xcd\x12\x34", operation, *payloads])
        assert client.receive() == [b"\xcd\x12\x34", operation, result]


def test_a_one_frame_message_harms_nobody(daemon: RunningDaemon) -> None:
    before = daemon.metrics()["lmcache_qserver_messages_unanswerable_total"]
    with BareClient(daemon.url) as client:
        client.send([b"\x01"])
        assert client.ask("noop").result == "OK"
    assert daemon.metrics()["lmcache_qserver_messages_unanswerable_total"] == before + 1


def test_ten_thousand_random_messages_harm_nobody(daemon: RunningDaemon) -> None:
    dice = random.Random(20261130)
    with BareClient(daemon.url) as noisy, BareClient(daemon.url) as client:
        noisy.hello()
        for _ in range(10_000):
            frames = [dice.randbytes(dice.randrange(24)) for _ in range(dice.randrange(1, 9))]
            if dice.random() < 0.5:
                frames[1:2] = [
                    encode(dice.choice([1, 3, 4, 5, 21, 22, 24, 32, "retrieve_q", "hello"]))
                ]
            noisy.send(frames)
            noisy.socket.setsockopt(zmq.RCVTIMEO, 0)
            try:
                while True:
                    noisy.receive()
            except zmq.Again:
                pass
        assert client.ask("noop").result == "OK"
        noisy.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        noisy.send([b"\xa4last", b"\x18"])
        while (answer := noisy.receive())[0] != b"\xa4last":
            pass
        assert answer[2] == b"\xa2OK"
    assert daemon.process.poll() is None
    assert "Traceback" not in daemon.log()


def test_a_thousand_requests_in_a_row_are_all_answered(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client:
        for number in range(1000):
            client.send([encode(number), b"\x18"])
        assert [client.receive()[0] for _ in range(1000)] == [encode(n) for n in range(1000)]


def test_messages_without_answers_do_not_hold_up_the_next(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client:
        assert client.ask("noop").result == "OK"
        for _ in range(5000):
            client.send([b"\x01"])
        assert client.ask("noop").result == "OK"


def test_a_native_client_learns_of_its_errors(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client:
        hello = client.hello()
        assert hello.boot_id == daemon.boot_id
        assert hello.chunk_size == 16
        assert hello.lifeline == daemon.lifeline
        reply = client.ask("noop")
        assert reply.meta is not None
        assert reply.meta.boot_id == daemon.boot_id
        client.send([b"\x01", encode("no_such_operation")])
        frames = client.receive()
        assert frames[2] == b"\xc0"
        assert b"unknown_operation" in frames[3]
        with pytest.raises(RequestError) as caught:
            client.ask("unregister_q_cache", 77)
        assert caught.value.code is ErrorCode.UNKNOWN_INSTANCE


PART = (1, 0, memoryview(b"x"))
IDENTITIES = IdentityQuery(
    model_name="m##query", chunks=(PartialChunk(index=0, parent_hash=b"h" * 32, tokens=(1,)),)
)
KEY = RangeKey(model_name="m##query", world_size=1, worker_id=0, end=16, chunk_hashes=(b"h" * 32,))


def test_what_needs_hello_and_what_needs_a_lifeline(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client:
        for name, *payloads in (
            ("retrieve_q", QUERY),
            ("release_q", ()),
            ("fetch_q", 1, 0, 0, 1),
            ("begin_upload_q", KEY, "w", StoreProof(nonces=(1,))),
            ("upload_part_q", *PART),
            ("end_upload_q", 1, memoryview(b"")),
            ("identities_q", IDENTITIES),
        ):
            with pytest.raises(RequestError) as caught:
                client.ask(name, *payloads)
            assert caught.value.code is ErrorCode.HELLO_REQUIRED
        assert client.ask("lookup_q", QUERY).result.prefix == 0
        limits = client.hello().limits
        assert client.ask("retrieve_q", QUERY).result.lease_id == 0
        with pytest.raises(RequestError) as caught:
            client.ask("identities_q", IDENTITIES)
        assert caught.value.code is ErrorCode.LIFELINE_REQUIRED
        with pytest.raises(RequestError) as caught:
            client.ask("fetch_q", 1, 0, 0, limits.bulk_bytes + 1)
        assert caught.value.code is ErrorCode.TOO_LARGE
        with pytest.raises(RequestError) as caught:
            client.ask("upload_part_q", *PART)
        assert caught.value.code is ErrorCode.UNKNOWN_UPLOAD


def test_without_leave_nothing_goes_inline() -> None:
    with (
        running_daemon(chunk_size=16) as daemon,
        BareClient(daemon.url) as client,
    ):
        assert client.hello().limits.bulk_bytes == 0
        with pytest.raises(RequestError) as caught:
            client.ask("retrieve_q", QUERY)
        assert caught.value.code is ErrorCode.LIFELINE_REQUIRED
        ring = RingDescription(
            layout=SMALL_LAYOUT,
            num_blocks=1,
            block_size=16,
            chunk_size=16,
            ring_token=bytes(16),
            stamps_offset=0,
            kind="inline",
        )
        for name, *payloads in (
            ("fetch_q", 1, 0, 0, 1),
            ("register_q_cache", "w", (), "m", 1, "test", None, (), ring),
        ):
            with pytest.raises(RequestError) as caught:
                client.ask(name, *payloads)
            assert caught.value.code is ErrorCode.UNSUPPORTED_TRANSPORT


def test_another_protocol_version_is_refused(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client:
        with pytest.raises(RequestError) as caught:
            client.ask("hello", Hello(protocol_version=99, client="from the future"))
        assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
        assert client.ask("noop").meta is None


def test_a_second_hello_renews_the_session_and_releases_the_first_ones_instances(
    daemon: RunningDaemon,
) -> None:
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        first = client.hello()
        lifeline.attach(first.session)
        register_small_ring(client, lifeline, "renewed", 16)
        assert "renewed" in daemon.status()["registered_q_ids"]
        second = client.hello()
        assert second.session != first.session
        wait_until(
            lambda: "renewed" not in daemon.status()["registered_q_ids"], "the instance is gone"
        )
        assert lifeline.socket.recv(1) == b""


def test_after_the_lifeline_is_lost_a_new_hello_is_asked_for(daemon: RunningDaemon) -> None:
    with BareClient(daemon.url) as client:
        with BareLifeline(daemon.lifeline) as lifeline:
            lifeline.attach(client.hello().session)
            assert client.ask("retrieve_q", QUERY).result.lease_id == 0
            sessions = daemon.status()["server"]["sessions"]
        wait_until(lambda: daemon.status()["server"]["sessions"] < sessions, "the session is over")
        with pytest.raises(RequestError) as caught:
            client.ask("retrieve_q", QUERY)
        assert caught.value.code is ErrorCode.HELLO_REQUIRED
        client.hello()


def test_a_message_above_the_limit_is_an_error_and_a_huge_one_a_disconnect() -> None:
    with (
        running_daemon(max_message_bytes=65536) as small,
        BareClient(small.url) as client,
    ):
        assert client.hello().limits.message_bytes == 65536
        client.send([b"\x01", encode("noop"), bytes(65536)])
        meta = msgspec.msgpack.decode(client.receive()[3])
        assert "too_large" in str(meta)
        client.send([b"\x01", encode("noop"), bytes(1 << 20)])
        client.socket.setsockopt(zmq.RCVTIMEO, 200)
        with pytest.raises(zmq.Again):
            client.receive()
        with BareClient(small.url) as other:
            assert other.ask("noop").result == "OK"
