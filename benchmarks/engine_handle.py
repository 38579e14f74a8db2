"""A child process that runs batches: this side of benchmarks/engine.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cores import engine_core
from benchmarks.load import Load

ONE_PROCESS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
END_S = 60.0


@dataclass(frozen=True)
class Batch:
    """What one batch took.

    Attributes:
        seconds: wall time.
        cpu_seconds: of all threads of the engine's process.
        computed: tokens that vLLM's scheduler has scheduled.
        steps: engine steps with at least one token.
        account: the worker's report at its end; empty without capture.
        hooks: by hook, [calls, seconds]; empty without `profile`.
    """

    seconds: float
    cpu_seconds: float
    computed: int
    steps: int
    account: dict[str, Any]
    hooks: dict[str, list[float]]


class EngineHandle:
    """An engine; made by `running_engine`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._stock = False
        self.computed = 0
        """Tokens of all its batches with capture, by vLLM's scheduler."""
        self.account: dict[str, Any] = {}
        """The worker's report at the end of the last batch."""

    def begin(self, load: Load, seed: int, *, stock: bool = False) -> None:
        """Start a batch, without capture if `stock`; `end` waits for it."""
        self._stock = stock
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(load.message(seed, stock)) + "\n")
        self.process.stdin.flush()

    def end(self) -> Batch:
        """What the batch took.

        Raises:
            RuntimeError: the engine has died.
        """
        batch = Batch(**self.answer())
        self.computed += 0 if self._stock else batch.computed
        self.account = batch.account
        return batch

    def run(self, load: Load, seed: int, *, stock: bool = False) -> Batch:
        """A batch from begin to end.

        Raises:
            RuntimeError: the engine has died, or the scheduler has computed other than the load says.
        """
        self.begin(load, seed, stock=stock)
        batch = self.end()
        if batch.computed != load.computed:
            raise RuntimeError(f"{batch.computed} tokens were computed, not {load.computed}")
        return batch

    def answer(self) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine has ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_seconds(self) -> float:
        """What all its threads have taken so far, from outside."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running_engine(
    model: Path,
    *,
    dtype: str,
    server_url: str = "",
    heartbeat_s: float = 0.0,
    profile: bool = False,
    log: Path | None = None,
) -> Iterator[EngineHandle]:
    """A warm engine on its own core; it is stopped in the end, and leaves the server in order.

    Args:
        dtype: of weights and queries.
        server_url: capture goes there; "" captures nothing.
        heartbeat_s: between two pings; 0 for the default.
        profile: time our hooks.
        log: file for what it prints; None to drop it.
    """
    argv = [sys.executable, "-m", "benchmarks.engine", "--model", str(model), "--dtype", dtype]
    argv += ["--core", str(engine_core()), "--server-url", server_url]
    argv += ["--heartbeat-s", str(heartbeat_s), *(["--profile"] if profile else [])]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("w")) if log is not None else subprocess.DEVNULL
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, **ONE_PROCESS},
        )
        try:
            handle = EngineHandle(process)
            handle.answer()
            yield handle
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
