"""From a forward pass's rows to a reader's tensor, through the real daemon; and what faults do on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from lmcache_qclient.qcache import connect
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from tests.e2e.small_worker import LAYERS, MODEL, SmallWorker, rows

CHUNK = 64
TOKENS = list(range(1000, 1000 + 3 * CHUNK + 10))


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon with small chunks."""
    with running_daemon(chunk_size=CHUNK) as running:
        yield running


def expected(tokens: int, layers: Sequence[int] = range(LAYERS)) -> torch.Tensor:
    """`[layers, tokens, heads, head_dim]`."""
    return torch.stack([rows(range(tokens), layer) for layer in layers])


def test_every_row_comes_back(daemon: RunningDaemon) -> None:
    worker = SmallWorker(daemon.url)
    worker.prefill("a", TOKENS)
    worker.finish_step()
    worker.settle("a")
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        found = cache.retrieve(TOKENS)
    assert torch.equal(found.tensor, expected(len(TOKENS)))
    assert found.missing == ()
    assert (worker.account.captured, worker.account.pending) == (len(TOKENS), 0)
    assert worker.account.lost == Counter()
    worker.capture.shutdown()
    coverage = daemon.status()["coverage"]
    assert (coverage["computed"], coverage["captured"]) == (len(TOKENS), len(TOKENS))


def test_two_features_of_one_worker(daemon: RunningDaemon) -> None:
    """Each has an instance, objects and an account of its own; the server that refuses one takes the other."""
    worker = SmallWorker(daemon.url, features=("transfer_query", "transfer_key"))
    assert daemon.status()["registered_q_ids"] == ["small-0", "small-0##key"]
    worker.prefill("a", TOKENS)
    worker.finish_step()
    worker.settle("a")
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        query, key = cache.retrieve(TOKENS), cache.retrieve(TOKENS, feature="key")
    assert torch.equal(query.tensor, expected(len(TOKENS)))
    assert torch.equal(key.tensor, -expected(len(TOKENS))[:, :, :1])
    assert [one["model_name"] for one in daemon.status()["models"]] == [
        "small##key",
        "small##query",
    ]
    assert worker.capture.ring is not None
    assert worker.capture.ring.num_free_blocks() == worker.capture.ring.num_blocks
    worker.capture.shutdown()
    coverage = daemon.status()["coverage"]
    assert set(coverage["features"]) == {"transfer_query", "transfer_key"}
    for account in coverage["features"].values():
        assert (account["computed"], account["captured"]) == (len(TOKENS), len(TOKENS))
    assert coverage["captured"] == 2 * len(TOKENS)


def test_without_tails_whole_chunks_come_back(daemon: RunningDaemon) -> None:
    worker = SmallWorker(daemon.url, tails=False)
    worker.prefill("a", TOKENS)
    worker.finish_step()
    worker.settle("a")
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        found = cache.retrieve(TOKENS)
    assert torch.equal(found.tensor, expected(3 * CHUNK))
    assert [(chunk.start, chunk.end, chunk.reason) for chunk in found.missing] == [
        (3 * CHUNK, len(TOKENS), MissReason.TOO_SHORT)
    ]
    assert (worker.account.captured, worker.account.pending) == (3 * CHUNK, 0)
    assert worker.account.lost == Counter({LossReason.TAIL_OFF: 10})
    worker.capture.shutdown()


def test_c35_one_token_more_than_a_chunk() -> None:
    tokens = list(range(257))
    with running_daemon(chunk_size=256) as daemon:
        worker = SmallWorker(daemon.url)
        worker.prefill("a", tokens)
        worker.finish_step()
        worker.settle("a")
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            found = cache.retrieve(tokens)
        worker.capture.shutdown()
    assert (found.num_tokens, found.missing) == (257, ())
    assert torch.equal(found.tensor, expected(257))


def test_c28_some_layers_and_the_same_prompt_again_from_the_prefix_cache(
    daemon: RunningDaemon,
) -> None:
    """The second time all but the last token comes from the engine's cache; the result is as long as the prompt."""
    layers = (1, 9, 17, 25)
    worker = SmallWorker(daemon.url, layers=layers)
    for number, cached in enumerate((0, 192)):
        worker.prefill(f"r{number}", TOKENS, cached=cached)
        worker.finish_step()
        worker.settle(f"r{number}")
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            found = cache.retrieve(TOKENS)
            assert torch.equal(found.tensor, expected(len(TOKENS), layers))
    assert worker.account.captured == len(TOKENS) + len(TOKENS) - 192
    worker.capture.shutdown()


def test_c29_batches_again_and_again_return_their_own(daemon: RunningDaemon) -> None:
    """Nothing of a call before shows in the next: lengths, chunks and tokens differ each time."""
    worker = SmallWorker(daemon.url)
    asked: list[list[int]] = []
    for call in range(3):
        batch = [
            list(range(9000 * call + 700 * n, 9000 * call + 700 * n + 70 + 50 * call + n))
            for n in range(3)
        ]
        for number, tokens in enumerate(batch):
            worker.prefill(f"r{number}", tokens)
            worker.finish_step()
        for number in range(len(batch)):
            worker.settle(f"r{number}")
        asked += batch
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            for tokens in asked:
                found = cache.retrieve(tokens)
                assert (found.num_tokens, found.missing) == (len(tokens), ())
                assert torch.equal(found.tensor, expected(len(tokens)))
    worker.capture.shutdown()


def test_c32_445_chunks_of_one_client_read_in_one_request() -> None:
    """107,000 tokens in one retrieve; every store is answered, and no ring block stays behind."""
    tokens = list(range(445 * 256))
    with running_daemon(chunk_size=256, pool_bytes=256 << 20) as daemon:
        worker = SmallWorker(daemon.url, ring_blocks=445 * 16)
        worker.prefill("a", tokens)
        worker.finish_step()
        worker.settle("a")
        assert (worker.account.captured, worker.account.pending) == (len(tokens), 0)
        ring = worker.capture.ring
        assert ring is not None
        assert ring.num_free_blocks() == ring.num_blocks
        assert daemon.metrics()['lmcache_mp_store_chunks_total{outcome="stored"}'] == 445
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            found = cache.retrieve(tokens[:107_000])
        worker.capture.shutdown()
    assert (found.num_tokens, found.missing) == (107_000, ())
    assert torch.equal(found.tensor, expected(107_000))


def test_a_short_question_after_a_long_cached_system_prompt() -> None:
    """1,000 tokens in the engine's prefix cache up to block 62: the question's rows begin inside chunk 3."""
    system = list(range(1000))
    questions = [[*system, *range(base, base + 21)] for base in (5000, 6000)]
    with running_daemon(chunk_size=256) as daemon:
        worker = SmallWorker(daemon.url, ring_blocks=128)
        worker.prefill("system", system)
        worker.finish_step()
        worker.settle("system")
        for number, tokens in enumerate(questions):
            worker.prefill(f"q{number}", tokens, cached=992)
            worker.finish_step()
            worker.settle(f"q{number}")
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            for tokens in questions:
                assert cache.lookup(tokens).num_tokens == len(tokens)
                found = cache.retrieve(tokens)
                assert (found.num_tokens, found.missing) == (len(tokens), ())
                assert torch.equal(found.tensor, expected(len(tokens)))
            other = cache.retrieve([*questions[0][:1010], 1, 2])
            assert torch.equal(other.tensor, expected(1010))
            assert [(miss.start, miss.end) for miss in other.missing] == [(1010, 1012)]
        assert worker.account.lost == Counter()
        worker.capture.shutdown()


def test_a_flipped_stamp_is_refused_counted_and_a_miss_with_that_reason(
    daemon: RunningDaemon,
) -> None:
    worker = SmallWorker(daemon.url)
    worker.prefill("a", TOKENS)
    ring, ledger = worker.capture.ring, worker.capture.ledger
    assert ring is not None
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
    assert worker.account.captured == 2 * CHUNK + 10
    assert daemon.metrics()['lmcache_mp_store_refused_chunks_total{reason="stamp_mismatch"}'] == 1
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        found = cache.retrieve(TOKENS)
    assert torch.equal(found.tensor, expected(CHUNK))
    assert found.missing[0].reason is MissReason.STAMP_MISMATCH
    assert (found.missing[0].start, found.missing[0].end) == (CHUNK, 2 * CHUNK)
    assert ring.num_free_blocks() == ring.num_blocks
    worker.capture.shutdown()


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked child"])
def test_a_killed_worker_leaves_nothing(daemon: RunningDaemon, fork: bool) -> None:
    names_before = set(os.listdir("/dev/shm"))
    files_before = daemon.open_files()
    command = [sys.executable, "-m", "tests.e2e.small_worker", daemon.url, *["fork"] * fork]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            name = process.stdout.readline().strip()
            assert daemon.status()["registered_q_ids"] == [name]
            assert daemon.open_files() > files_before
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda: daemon.status()["registered_q_ids"] == [], "the ring is gone", 1.0)
            wait_until(
                lambda: daemon.open_files("memfd:lmcache-q-ring") == 0, "its memory is gone", 1.0
            )
            # A forked child keeps the dead worker's TCP connection open until ZeroMQ's heartbeat finds nobody there.
            wait_until(lambda: daemon.open_files() <= files_before, "no descriptor is left", 30.0)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    ours = {name for name in set(os.listdir("/dev/shm")) - names_before if "lmcache" in name}
    assert not ours


def test_a_restarted_server_is_found_again_and_blocks_come_back() -> None:
    with running_daemon(chunk_size=CHUNK) as first:
        url, lifeline = first.url, first.lifeline
        worker = SmallWorker(url)
        worker.prefill("a", TOKENS)
        worker.finish_step()
        worker.settle("a")
        first.process.kill()
        first.process.wait()
        heartbeat = worker.adapter._heartbeat
        wait_until(lambda: not heartbeat.healthy, "the loss is noticed", 5.0)
        worker.prefill("b", TOKENS)
        worker.finish_step()
        worker.settle("b")
        assert worker.account.lost[LossReason.SERVER_UNAVAILABLE] == len(TOKENS)
    http_port = int(first.http_url.rsplit(":", 1)[1])
    with running_daemon(
        chunk_size=CHUNK, url=url, lifeline=lifeline, http_port=http_port
    ) as second:
        wait_until(lambda: heartbeat.healthy, "the server is found again")
        worker.prefill("c", TOKENS)
        worker.finish_step()
        worker.settle("c")
        with connect(second.url, second.http_url, MODEL) as cache:
            assert torch.equal(cache.retrieve(TOKENS).tensor, expected(len(TOKENS)))
        assert worker.account.captured == 2 * len(TOKENS)
        assert worker.account.pending == 0
        ring = worker.capture.ring
        assert ring is not None
        assert ring.num_free_blocks() == ring.num_blocks
        worker.capture.shutdown()
