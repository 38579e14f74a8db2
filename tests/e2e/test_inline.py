"""Bytes inline, through the real daemon: the same results as by shared memory, whoever writes and whoever reads."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.requests import RequestLink
from lmcache_qclient.qcache import connect
from lmcache_qprotocol.codec import decode_reply, encode, encode_request
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import chunk_hashes
from lmcache_qprotocol.messages import ChunkQuery
from lmcache_qprotocol.operations import FETCH_Q, Operation
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qserver.testing.bare_client import BareClient
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from tests.e2e.small_worker import BLOCK, HEAD_DIM, HEADS, LAYERS, MODEL, SmallWorker, rows

CHUNK = 64
TOKENS = list(range(1000, 1000 + 3 * CHUNK + 10))
SMALL_MESSAGES: dict[str, Any] = {"max_message_bytes": "64KiB"}
LARGE_CHUNK = 1024
"""Of 196,608 bytes: four parts of 60 KiB."""


def expected(tokens: int) -> torch.Tensor:
    """`[layers, tokens, heads, head_dim]`."""
    return torch.stack([rows(range(tokens), layer) for layer in range(LAYERS)])


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon with small chunks."""
    with running_daemon(allow_inline=True, chunk_size=CHUNK) as running:
        yield running


def account_is_exact(daemon: RunningDaemon) -> None:
    """Nothing is reserved or leased, and the pool's bytes add up."""
    wait_until(lambda: not daemon.status()["pool"]["leased_bytes"], "no lease is left")
    status = daemon.status()
    pool = status["pool"]
    assert (pool["reserved_bytes"], status["uploads"]["open"], status["uploads"]["bytes"]) == (
        0,
    ) * 3
    assert pool["free_bytes"] + pool["committed_bytes"] == pool["capacity_bytes"]


@pytest.mark.parametrize(
    ("writes", "reads"), [*itertools.product(("shm", "inline"), repeat=2), ("auto", "auto")]
)
def test_every_row_comes_back(daemon: RunningDaemon, writes: str, reads: str) -> None:
    """Whole chunks and a piece."""
    worker = SmallWorker(daemon.url, transport=writes)
    worker.prefill("a", TOKENS)
    worker.finish_step()
    worker.settle("a")
    assert worker.account.captured == len(TOKENS)
    (instance,) = daemon.status()["q_context_meta"].values()
    assert instance["transport"] == worker.adapter.connection.transport
    assert instance["transport"] == ("inline" if writes == "inline" else "shm")
    with connect(daemon.url, daemon.http_url, MODEL, transport=reads) as cache:
        assert cache.transport == ("inline" if reads == "inline" else "shm")
        found = cache.retrieve(TOKENS)
        assert torch.equal(found.tensor, expected(len(TOKENS)))
        assert found.missing == ()
        part = cache.retrieve(TOKENS[: CHUNK + 7])
        assert torch.equal(part.tensor, expected(CHUNK + 7))
    worker.capture.shutdown()
    account_is_exact(daemon)


@pytest.mark.parametrize("reads", ["shm", "inline"])
def test_a_chunk_larger_than_any_message(reads: str) -> None:
    tokens = list(range(2 * LARGE_CHUNK))
    with running_daemon(allow_inline=True, chunk_size=LARGE_CHUNK, **SMALL_MESSAGES) as daemon:
        worker = SmallWorker(daemon.url, ring_blocks=160, transport="inline")
        worker.prefill("a", tokens)
        worker.finish_step()
        worker.settle("a")
        assert worker.account.captured == len(tokens)
        metrics = daemon.metrics()
        parts = metrics['lmcache_qserver_requests_total{code="ok",operation="upload_part_q"}']
        assert parts == 2 * 4
        with connect(daemon.url, daemon.http_url, MODEL, transport=reads) as cache:
            assert torch.equal(cache.retrieve(tokens).tensor, expected(len(tokens)))
        worker.capture.shutdown()
        account_is_exact(daemon)


def test_without_a_reachable_socket_bytes_go_inline_by_themselves(
    daemon: RunningDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    os.rename(daemon.lifeline, daemon.lifeline + ".away")
    try:
        worker = SmallWorker(daemon.url)
        assert worker.adapter.connection.transport == "inline"
        assert sum("go inline" in record.message for record in caplog.records) == 1
        worker.prefill("a", TOKENS)
        worker.finish_step()
        worker.settle("a")
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            assert cache.transport == "inline"
            assert torch.equal(cache.retrieve(TOKENS).tensor, expected(len(TOKENS)))
            with pytest.raises(RequestError) as caught:
                cache.identities(TOKENS)
            assert caught.value.code is ErrorCode.LIFELINE_REQUIRED
        worker.capture.shutdown()
    finally:
        os.rename(daemon.lifeline + ".away", daemon.lifeline)


def test_a_server_takes_nothing_inline_unless_it_is_told_to() -> None:
    with running_daemon(chunk_size=CHUNK) as daemon:
        with pytest.raises(ConnectionError, match="allow-inline"):
            SmallWorker(daemon.url, transport="inline")
        worker = SmallWorker(daemon.url)
        assert worker.adapter.connection.transport == "shm"
        worker.prefill("a", TOKENS)
        worker.finish_step()
        worker.settle("a")
        with connect(daemon.url, daemon.http_url, MODEL, transport="inline") as cache:
            with pytest.raises(RequestError) as caught:
                cache.retrieve(TOKENS)
            assert caught.value.code is ErrorCode.LIFELINE_REQUIRED
        worker.capture.shutdown()


def test_a_lease_that_is_over_gives_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    plainly_submit = RequestLink.submit

    def submit(link: RequestLink, operation: Operation, payloads: Sequence[Any] = ()) -> Any:
        if operation is FETCH_Q:
            time.sleep(0.02)  # the lease is over, however fast the machine is
        return plainly_submit(link, operation, payloads)

    monkeypatch.setattr(RequestLink, "submit", submit)
    with running_daemon(allow_inline=True, chunk_size=CHUNK, lease_timeout_s=0.001) as daemon:
        worker = SmallWorker(daemon.url, transport="inline")
        worker.prefill("a", TOKENS)
        worker.finish_step()
        worker.settle("a")
        with connect(daemon.url, daemon.http_url, MODEL, transport="inline") as cache:
            out = torch.full((LAYERS, len(TOKENS), HEADS, HEAD_DIM), -1.0)
            with pytest.raises(RequestError, match="ran out 3 times") as caught:
                cache.retrieve(TOKENS, out=out)
            assert caught.value.code is ErrorCode.UNKNOWN_LEASE
        worker.capture.shutdown()


def test_an_unknown_transport_is_refused_with_the_list(daemon: RunningDaemon) -> None:
    with pytest.raises(ValueError, match="auto, shm, inline"):
        connect(daemon.url, daemon.http_url, MODEL, transport="rdma")


def test_a_flipped_stamp_is_refused_counted_and_a_miss(daemon: RunningDaemon) -> None:
    worker = SmallWorker(daemon.url, transport="inline")
    worker.prefill("a", TOKENS)
    ring, ledger = worker.capture.ring, worker.capture.ledger
    assert isinstance(ring, QRingBuffer)
    assert ledger is not None
    victim = ledger._requests["a"].open[1].blocks[2]
    stamp = ring.stamp

    def flip_one_bit(slots: torch.Tensor, stamps: torch.Tensor) -> None:
        stamp(slots, stamps)
        ring.flat_stamps[victim * ring.block_size + 5] ^= 1 << 40

    ring.stamp = flip_one_bit  # type: ignore[assignment, method-assign]  # the fault that is planted
    worker.finish_step()
    worker.settle("a")
    assert worker.account.lost[LossReason.STAMP_MISMATCH] == CHUNK
    assert daemon.metrics()['lmcache_mp_store_refused_chunks_total{reason="stamp_mismatch"}'] == 1
    with connect(daemon.url, daemon.http_url, MODEL, transport="inline") as cache:
        found = cache.retrieve(TOKENS)
    assert torch.equal(found.tensor, expected(CHUNK))
    assert found.missing[0].reason is MissReason.STAMP_MISMATCH
    assert ring.num_free_blocks() == ring.num_blocks
    worker.capture.shutdown()
    account_is_exact(daemon)


def test_a_writer_killed_in_the_middle_leaves_nothing_within_the_announced_time() -> None:
    with running_daemon(
        allow_inline=True, chunk_size=LARGE_CHUNK, upload_timeout_s=2.0, **SMALL_MESSAGES
    ) as daemon:
        command = [sys.executable, "-m", "tests.e2e.half_an_upload", daemon.url]
        root = Path(__file__).parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
            assert process.stdout is not None
            begun = json.loads(process.stdout.readline())
            assert begun["upload_ms"] == 2000
            status = daemon.status()
            assert status["pool"]["reserved_bytes"] >= begun["nbytes"]
            assert status["uploads"]["open"] == 1
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        wait_until(
            lambda: not daemon.status()["pool"]["reserved_bytes"], "its room is free", 2.0 + 2.0
        )
        account_is_exact(daemon)
        status = daemon.status()
        assert status["uploads"]["given_up"] == 1
        assert status["pool"]["committed_bytes"] == 0
        assert daemon.metrics()['lmcache_mp_store_refused_chunks_total{reason="copy_failed"}'] == 1


def test_a_restarted_server_is_found_again() -> None:
    with running_daemon(allow_inline=True, chunk_size=CHUNK) as first:
        url = first.url
        worker = SmallWorker(url, transport="inline")
        worker.prefill("a", TOKENS)
        worker.finish_step()
        worker.settle("a")
        first.process.kill()
        first.process.wait()
        heartbeat = worker.adapter._heartbeat
        wait_until(lambda: not heartbeat.healthy, "the loss is noticed", 10.0)
        worker.prefill("b", TOKENS)
        worker.finish_step()
        worker.settle("b")
        assert worker.account.lost[LossReason.SERVER_UNAVAILABLE] == len(TOKENS)
    with running_daemon(allow_inline=True, chunk_size=CHUNK, url=url) as second:
        wait_until(lambda: heartbeat.healthy, "the server is found again")
        worker.prefill("c", TOKENS)
        worker.finish_step()
        worker.settle("c")
        with connect(second.url, second.http_url, MODEL, transport="inline") as cache:
            assert torch.equal(cache.retrieve(TOKENS).tensor, expected(len(TOKENS)))
        ring = worker.capture.ring
        assert ring is not None
        assert ring.num_free_blocks() == ring.num_blocks
        worker.capture.shutdown()


def test_a_server_that_hung_takes_its_worker_back_at_once(daemon: RunningDaemon) -> None:
    """The former session has no lifeline that could tell of its end: the new greeting does."""
    worker = SmallWorker(daemon.url, transport="inline")
    worker.adapter._heartbeat._reply_timeout_s = 0.5
    worker.adapter._heartbeat.start()
    heartbeat = worker.adapter._heartbeat
    daemon.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: not heartbeat.healthy, "the loss is noticed", 10.0)
    daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: heartbeat.healthy, "the worker is registered again", 10.0)
    worker.prefill("a", TOKENS)
    worker.finish_step()
    worker.settle("a")
    assert worker.account.captured == len(TOKENS)
    worker.capture.shutdown()
    account_is_exact(daemon)


def test_a_slow_reader_costs_no_memory_and_no_more_than_its_share() -> None:
    """It asks for three times what it may have on its way before it reads anything."""
    size = 4096
    tokens = list(range(2 * size))
    with running_daemon(allow_inline=True, chunk_size=size) as daemon:
        worker = SmallWorker(daemon.url, ring_blocks=600, transport="inline")
        worker.prefill("a", tokens)
        worker.finish_step()
        worker.settle("a")
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            (layout,) = cache.layouts
        family = layout.family(layout.parts[0], "")
        query = ChunkQuery(family=family, chunk_hashes=tuple(chunk_hashes(tokens, size)))
        with BareClient(daemon.url, unread=1) as reader:
            limits = reader.hello().limits
            lease = reader.ask("retrieve_q", query).result
            nbytes = lease.chunks[0].nbytes
            before = daemon.resident_bytes()
            asked = 3 * limits.bulk_outstanding_bytes // nbytes
            for number in range(asked):
                payloads = (lease.lease_id, number % 2, 0, nbytes)
                reader.send(encode_request(encode(number), FETCH_Q, payloads))
            wait_until(lambda: fetches(daemon) == asked, "all are answered")
            refused = fetches(daemon, "busy")
            assert 0 < refused < asked
            assert daemon.resident_bytes() - before < 16 << 20
            right = expected(len(tokens))
            busy = 0
            for _ in range(asked):
                try:
                    reply = decode_reply(reader.receive(), FETCH_Q)
                except RequestError as error:
                    busy += error.code is ErrorCode.BUSY
                else:
                    place = msgspec.msgpack.decode(reply.uid) % 2
                    assert np.array_equal(as_rows(reply.result), right[:, place * size :][:, :size])
            assert busy == refused
            reader.ask("release_q", (lease.lease_id,))
            account_is_exact(daemon)
        worker.capture.shutdown()


def fetches(daemon: RunningDaemon, code: str | None = None) -> float:
    """Answers to `fetch_q` so far, all or those with one code."""
    return sum(
        count
        for name, count in daemon.metrics().items()
        if name.startswith("lmcache_qserver_requests_total")
        and 'operation="fetch_q"' in name
        and (code is None or f'code="{code}"' in name)
    )


def as_rows(chunk: memoryview) -> npt.NDArray[np.float32]:
    """`[layers, tokens, heads, head_dim]` of a whole chunk's bytes."""
    blocks = np.frombuffer(chunk, np.float32).reshape(-1, LAYERS, BLOCK, HEADS, HEAD_DIM)
    rows: npt.NDArray[np.float32] = blocks.transpose(1, 0, 2, 3, 4)
    return rows.reshape(LAYERS, -1, HEADS, HEAD_DIM)


def test_a_reader_that_dies_in_the_middle_gives_everything_back() -> None:
    """Its connection ends, and with it the answers that wait for it; its lease ends by its time."""
    size = 4096
    tokens = list(range(size))
    with running_daemon(allow_inline=True, chunk_size=size, lease_timeout_s=1.0) as daemon:
        worker = SmallWorker(daemon.url, ring_blocks=600, transport="inline")
        worker.prefill("a", tokens)
        worker.finish_step()
        worker.settle("a")
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            (layout,) = cache.layouts
        family = layout.family(layout.parts[0], "")
        query = ChunkQuery(family=family, chunk_hashes=tuple(chunk_hashes(tokens, size)))
        with BareClient(daemon.url, unread=1) as reader:
            reader.hello()
            lease = reader.ask("retrieve_q", query).result
            nbytes = lease.chunks[0].nbytes
            for number in range(60):
                payloads = (lease.lease_id, 0, 0, nbytes)
                reader.send(encode_request(encode(number), FETCH_Q, payloads))
            wait_until(lambda: fetches(daemon) == 60, "all are answered")
        account_is_exact(daemon)
        worker.capture.shutdown()
