"""The real engine, the real daemon, the real SDK; every row against transformers, every token in the account."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
MODEL = ".cache/smollm2-135m"
TRANSFER = "lmcache.mp.transfer_intermediate_tensors"
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
Reference = Callable[[list[int]], Any]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Queries by transformers, `[layers, tokens, heads, head_dim]`."""
    from demo.model import prepare
    from demo.reference import reference_queries

    prepare(ROOT / MODEL)
    return lambda token_ids: reference_queries(ROOT / MODEL, token_ids)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon with the default chunk size."""
    with running_daemon(pool_bytes=512 << 20) as running:
        yield running


def job(daemon: RunningDaemon | None, folder: Path, **changes: Any) -> dict[str, Any]:
    """A job for tests/e2e/engine_process.py."""
    extra: dict[str, Any] = {TRANSFER: True, "lmcache.q.heartbeat_s": 0.5}
    if daemon is not None:
        extra["lmcache.q.server_url"] = daemon.url
    return {
        "model": MODEL,
        "extra": extra,
        "llm": {"max_num_batched_tokens": 2048, "max_num_seqs": 8},
        "batches": [],
        "max_tokens": 4,
        "out": str(folder / "out.json"),
        **changes,
    }


def start(the_job: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """Start the engine's process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.engine_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(the_job))
    process.stdin.close()
    process.stdin = None
    return process


def run(the_job: dict[str, Any], **environment: str) -> tuple[dict[str, Any], str]:
    """Run a job to its end: what it wrote, and its log."""
    process = start(the_job, **environment)
    log, _ = process.communicate(timeout=400)
    assert process.returncode == 0, log[-6000:]
    return json.loads(Path(the_job["out"]).read_text()), log


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of real text that no other seed shares a chunk with.

    Random ids would do for attribution, but not for the tolerance: a few of their rows are so ill-conditioned that two
    right fp32 computations differ by 1e-4.
    """
    text = real_text()
    first = seed * 131 % (len(text) - length)
    return text[first : first + length]


@functools.cache
def real_text() -> list[int]:
    """The demo's prompts, one after the other."""
    from transformers import AutoTokenizer

    from demo.model import prepare
    from demo.prompts import tokenize

    tokenizer = AutoTokenizer.from_pretrained(str(prepare(ROOT / MODEL)), local_files_only=True)
    return [token for ids in tokenize(tokenizer).values() for token in ids]


def check_rows(daemon: RunningDaemon, report: dict[str, Any], reference: Reference) -> None:
    """Every stored row of every request equals the reference, and none that should be there is missing."""
    from demo.reference import max_relative_row_error
    from demo.verify import expected_retrieval
    from lmcache_qclient.qcache import connect

    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        for request in report["requests"]:
            tokens = request["token_ids"]
            found = cache.retrieve(tokens)
            assert found.num_tokens == expected_retrieval(tokens, report["requests"])
            assert found.num_tokens
            right = reference(tokens)[:, : found.num_tokens]
            assert max_relative_row_error(found.tensor, right) <= 5e-5


def check_account(daemon: RunningDaemon, report: dict[str, Any]) -> None:
    """computed = captured + lost, as the scheduler counted and as the lengths say."""
    from demo.verify import expected_capture

    coverage = daemon.status()["coverage"]
    captured = sum(expected_capture(request) for request in report["requests"])
    lost = {reason: count for reason, count in coverage["lost"].items() if count}
    assert coverage["computed"] == report["computed"]
    assert (coverage["captured"], coverage["pending"]) == (captured, 0)
    assert (captured, lost) == (report["computed"], {})


def test_prompts_in_one_step_by_registered_name(
    daemon: RunningDaemon, reference: Reference, tmp_path: Path
) -> None:
    batch = [prompt(257, 1), prompt(600, 2), prompt(256, 3), prompt(255, 4)]
    report, log = run(job(daemon, tmp_path, batches=[batch], by_name=True), **IN_PROCESS)
    check_rows(daemon, report, reference)
    check_account(daemon, report)
    assert "query ring:" in log, "the ring's size is printed at start"


def test_chunked_prefill_and_prefix_hits(
    daemon: RunningDaemon, reference: Reference, tmp_path: Path
) -> None:
    shared = prompt(400, 5)
    first = [shared + prompt(300, 6), prompt(701, 7), prompt(513, 8)]
    second = [shared + prompt(450, 9), first[1]]
    llm = {"max_num_batched_tokens": 150, "max_num_seqs": 3}
    report, _ = run(job(daemon, tmp_path, batches=[first, second], llm=llm), **IN_PROCESS)
    assert [request["cached_tokens"] for request in report["requests"]] == [0, 0, 0, 384, 640]
    check_rows(daemon, report, reference)
    check_account(daemon, report)


def test_engine_and_worker_in_processes_of_their_own(
    daemon: RunningDaemon, reference: Reference, tmp_path: Path
) -> None:
    the_job = job(daemon, tmp_path, batches=[[prompt(530, 10)]])
    report, _ = run(the_job, VLLM_CPU_OMP_THREADS_BIND="nobind")
    check_rows(daemon, report, reference)
    # The scheduler is in another process here, so the lengths alone say what was computed: all but the last token.
    computed = sum(len(request["token_ids"]) - 1 for request in report["requests"])
    check_account(daemon, {**report, "computed": computed})
    assert daemon.status()["registered_q_ids"] == []


def test_an_engine_in_its_users_process_stores_the_last_tokens_while_it_idles(
    daemon: RunningDaemon, reference: Reference, tmp_path: Path
) -> None:
    """No step runs after the last request has ended: half a second later all of it is there, and the account closed."""
    the_job = job(daemon, tmp_path, batches=[[prompt(270, 15), prompt(20, 16)]], pause=True)
    the_job["extra"]["lmcache.q.heartbeat_s"] = 60
    process = start(the_job, **IN_PROCESS)
    try:
        wait_until(Path(the_job["out"]).exists, "the engine has run", 200)
        report = json.loads(Path(the_job["out"]).read_text())
        wait_until(
            lambda: daemon.status()["coverage"]["captured"] == report["computed"], "all is told", 5
        )
        check_rows(daemon, report, reference)
        check_account(daemon, report)
        coverage = daemon.status()["coverage"]
        assert coverage["requests"] == {"whole": 2, "partial": 0, "none": 0}
        (recent,) = coverage["recent_requests"].values()
        assert sorted(one["captured"] for one in recent) == [23, 273]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_killed_engine_leaves_nothing(daemon: RunningDaemon, tmp_path: Path) -> None:
    names = set(os.listdir("/dev/shm"))
    the_job = job(daemon, tmp_path, batches=[[prompt(300, 11)]], pause=True)
    process = start(the_job, **IN_PROCESS)
    try:
        wait_until(Path(the_job["out"]).exists, "the engine has run", 200)
        assert len(daemon.status()["registered_q_ids"]) == 1
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: daemon.status()["registered_q_ids"] == [], "the ring is gone", 1.0)
        wait_until(lambda: daemon.open_files("memfd:lmcache-q-ring") == 0, "its memory is", 1.0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    ours = {name for name in set(os.listdir("/dev/shm")) - names if "lmcache" in name}
    assert not ours


def test_switched_off_nothing_is_built(daemon: RunningDaemon, tmp_path: Path) -> None:
    extra = {TRANSFER: False, "lmcache.q.server_url": daemon.url}
    _, log = run(job(daemon, tmp_path, batches=[[prompt(300, 12)]], extra=extra), **IN_PROCESS)
    assert "query ring:" not in log
    assert daemon.status()["coverage"]["computed"] == 0


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({TRANSFER: True, "lmcache.q.layer": "0"}, "lmcache.q.ring_depth"),
        ({TRANSFER: True, "lmcache.q.server_url": "tcp://127.0.0.1:9"}, "lmcache-qserver start"),
    ],
    ids=["unknown switch lists the known ones", "no server says what to start"],
)
def test_a_wrong_start_is_refused(extra: dict[str, Any], said: str, tmp_path: Path) -> None:
    extra = {**extra, "lmcache.q.connect_timeout_s": 1}
    process = start(job(None, tmp_path, extra=extra), **IN_PROCESS)
    log, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert said in log
