"""The real daemon as a subprocess on free ports, for tests, the demo and the benchmarks.

with running_daemon(pool_bytes=64 << 20) as daemon:
    ... daemon.url, daemon.status() ...
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmcache_qprotocol
import lmcache_qserver

DEADLINE_S = 30.0
DEFAULTS: dict[str, Any] = {
    "url": "tcp://127.0.0.1:0",
    "http_port": 0,
    "pool_bytes": 64 << 20,
    "l2": "none",
    "drain_timeout_s": 5.0,
}


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of the condition.

    Raises:
        AssertionError: it did not become true in time.
    """
    end = time.monotonic() + deadline_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)


@dataclass
class RunningDaemon:
    """A daemon that is ready.

    Attributes:
        url, http_url, lifeline, boot_id: as in its ready file.
        folder: temporary; holds the log, the ready file and the lifeline's socket.
        start_s: seconds from exec to ready.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    url: str
    http_url: str
    lifeline: str
    boot_id: bytes
    start_s: float

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def get(self, path: str) -> str:
        """Body of an HTTP answer; raises `urllib.error.HTTPError` for other than 2xx."""
        with urllib.request.urlopen(self.http_url + path, timeout=DEADLINE_S) as reply:
            body: bytes = reply.read()
        return body.decode()

    def status(self) -> dict[str, Any]:
        """/status, decoded."""
        report: dict[str, Any] = json.loads(self.get("/status"))
        return report

    def metrics(self) -> dict[str, float]:
        """/metrics: series as written (`name{label="value"}`) → value."""
        lines = [
            line for line in self.get("/metrics").splitlines() if line and not line.startswith("#")
        ]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def log(self) -> str:
        """What it has logged so far."""
        return log_path(self.folder).read_text(errors="replace")

    def open_files(self, name: str = "") -> int:
        """Number of its file descriptors, or of those with this in their name, e.g. "memfd:" or "pidfd"."""
        count = 0
        for entry in os.scandir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += name in os.readlink(entry.path)
        return count

    def resident_bytes(self) -> int:
        """Its resident memory, the pool's pages included."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def log_path(folder: Path) -> Path:
    """Where a daemon's standard error goes."""
    return folder / "daemon.log"


def command(module: str = "lmcache_qserver", **settings: Any) -> list[str]:
    """argv of `lmcache-qserver start` with these settings (names of `Config`).

    Args:
        module: what is run; a test may wrap the daemon's main in one of its own.
    """
    argv = [sys.executable, "-m", module, "start"]
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            argv += [f"--{option}", text]
    return argv


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with our packages importable and none of the daemon's own settings."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_QSERVER_")
    }
    kept.pop("NOTIFY_SOCKET", None)
    roots = [
        str(Path(package.__file__ or "").parents[1])
        for package in (lmcache_qprotocol, lmcache_qserver)
    ]
    before = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    return {**kept, "PYTHONPATH": os.pathsep.join([*roots, *before]), **more}


def start_daemon(
    folder: Path,
    env: dict[str, str] | None = None,
    module: str = "lmcache_qserver",
    **overrides: Any,
) -> RunningDaemon:
    """Start a daemon and wait until it is ready; the caller stops it.

    Args:
        module: see `command`.

    Raises:
        AssertionError: it ended, or was not ready in time; its log is in the message.
    """
    settings = {
        **DEFAULTS,
        "lifeline": folder / "lifeline.sock",
        "ready_file": folder / "ready.json",
        **overrides,
    }
    ready = Path(settings["ready_file"])
    began = time.monotonic()
    with log_path(folder).open("wb") as output:
        process = subprocess.Popen(
            command(module, **settings),
            env=environment(**(env or {})),
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, "the daemon is ready")
        assert process.poll() is None, "the daemon ended"
        found = json.loads(ready.read_text())
    except (AssertionError, OSError, ValueError, KeyError) as error:
        process.kill()
        process.wait()
        raise AssertionError(
            f"{error}; its log:\n{log_path(folder).read_text(errors='replace')}"
        ) from None
    return RunningDaemon(
        process=process,
        folder=folder,
        url=found["url"],
        http_url=found["http_url"],
        lifeline=found["lifeline"],
        boot_id=bytes.fromhex(found["boot_id"]),
        start_s=time.monotonic() - began,
    )


def stop_daemon(daemon: RunningDaemon) -> int:
    """SIGTERM; the exit code, or -9 if it did not end in time."""
    daemon.process.terminate()
    try:
        return daemon.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        daemon.process.kill()
        return daemon.process.wait()


@contextlib.contextmanager
def running_daemon(env: dict[str, str] | None = None, **overrides: Any) -> Iterator[RunningDaemon]:
    """A daemon that is ready; it is stopped at the end and must exit with 0 (unless the test ended it itself).

    Args:
        env: environment variables besides this process's own.
        overrides: settings by name of `Config`, e.g. `chunk_size=16`.
    """
    with tempfile.TemporaryDirectory(prefix="qserver-") as folder:
        daemon = start_daemon(Path(folder), env, **overrides)
        try:
            yield daemon
        except BaseException:
            print(daemon.log(), file=sys.stderr)
            stop_daemon(daemon)
            raise
        if daemon.process.poll() is None:
            code = stop_daemon(daemon)
            assert code == 0, f"the daemon exited with {code}; its log:\n{daemon.log()}"
