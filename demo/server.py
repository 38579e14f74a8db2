"""A query server for the demo and the benchmarks: the real daemon, as a process of its own, on free ports."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Server:
    """A running daemon: process id, ZeroMQ address, HTTP address."""

    pid: int
    url: str
    http_url: str

    def status(self) -> dict[str, Any]:
        """`/status`."""
        status: dict[str, Any] = json.loads(self._get("/status"))
        return status

    def metrics(self) -> dict[str, float]:
        """`/metrics`, one entry per series."""
        lines = self._get("/metrics").decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {series: float(value) for series, value in samples}

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.http_url + path, timeout=10) as response:
            body: bytes = response.read()
            return body


@contextlib.contextmanager
def running_server(*options: str, timeout_s: float = 30.0) -> Iterator[Server]:
    """Start the daemon, wait until it is ready, stop it afterwards.

    Args:
        options: more options of `lmcache-qserver start`.
        timeout_s: seconds until it must be ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        command = [
            sys.executable,
            "-m",
            "lmcache_qserver",
            "start",
            "--url",
            "tcp://127.0.0.1:0",
            "--http-port",
            "0",
        ]
        command += [
            "--lifeline",
            str(Path(folder, "lifeline.sock")),
            "--ready-file",
            str(ready),
            *options,
        ]
        process = subprocess.Popen(command)
        try:
            deadline = time.monotonic() + timeout_s
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        "the query server did not become ready; its messages are above"
                    )
                time.sleep(0.02)
            found = json.loads(ready.read_text())
            yield Server(process.pid, found["url"], found["http_url"])
        finally:
            process.terminate()
            process.wait(timeout=30)
