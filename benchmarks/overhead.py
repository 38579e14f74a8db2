"""capture_overhead: prefill tokens per second with capture divided by without, in interleaved pairs.

Two engines run side by side, one with capture and one without, and take turns: each pair gets the same batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engine import PROMPT_TOKENS, PROMPTS, fast_dtype
from benchmarks.samples import bootstrap_interval, speed_ratio
from lmcache_qserver.testing.daemon import RunningDaemon


class Engine:
    """A child process that runs batches."""

    def __init__(self, model: Path, *server_url: str) -> None:
        one_thread = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine", str(model), *server_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **one_thread},
        )

    def batch(self, number: int) -> float:
        """Seconds of one batch."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the engine has ended with code {self.process.wait()}")
        seconds: float = json.loads(answer)["seconds"]
        return seconds


@contextlib.contextmanager
def running_engine(model: Path, *server_url: str) -> Iterator[Engine]:
    """An engine that is stopped in the end."""
    engine = Engine(model, *server_url)
    try:
        yield engine
    finally:
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        try:
            engine.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            engine.process.kill()


def measure(server: RunningDaemon, model: Path, pairs: int) -> dict[str, float | str]:
    """The ratio with its 95 % interval, and tokens per second of both."""
    times = []
    with running_engine(model) as without, running_engine(model, server.url) as capturing:
        for engine in (without, capturing):
            engine.batch(0)
        for number in range(1, pairs + 1):
            order = (capturing, without) if number % 2 else (without, capturing)
            taken = {engine: engine.batch(number) for engine in order}
            times.append((taken[capturing], taken[without]))
    low, high = bootstrap_interval(times)
    tokens = PROMPTS * PROMPT_TOKENS * len(times)
    return {
        "ratio": speed_ratio(times),
        "low": low,
        "high": high,
        "pairs": len(times),
        "dtype": fast_dtype(),
        "with_tokens_s": tokens / sum(pair[0] for pair in times),
        "without_tokens_s": tokens / sum(pair[1] for pair in times),
    }
