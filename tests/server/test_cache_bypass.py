"""The daemon starts itself over once, and leaves what the user has set."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.cache_bypass import THRESHOLD, TUNABLES, start_over, with_threshold
from lmcache_qserver.testing.daemon import running_daemon


def test_the_threshold_is_added_once() -> None:
    first = with_threshold({"HOME": "/"})
    assert first == {"HOME": "/", TUNABLES: f"{THRESHOLD}=0x80000"}
    assert with_threshold(first) is None


def test_other_tunables_and_the_users_threshold_stay() -> None:
    found = with_threshold({TUNABLES: "glibc.malloc.check=1"})
    assert found is not None
    assert found[TUNABLES] == f"glibc.malloc.check=1:{THRESHOLD}=0x80000"
    assert with_threshold({TUNABLES: f"{THRESHOLD}=0x100000"}) is None


def test_a_system_that_forbids_it_is_told_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)

    def forbid(*_: Any) -> Any:
        raise PermissionError("no")

    start_over(forbid)
    assert "through the caches" in capsys.readouterr().err


def test_it_is_started_over_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-X", "utf8", "-m", "lmcache_qserver", "start"]
    )
    calls: list[Any] = []
    start_over(lambda *call: calls.append(call))  # type: ignore[arg-type]  # returns, unlike execve
    ((program, arguments, environment),) = calls
    assert program == sys.executable
    assert arguments == [sys.executable, "-X", "utf8", "-m", "lmcache_qserver", "start"]
    assert THRESHOLD in environment[TUNABLES]


def test_the_daemon_runs_with_it() -> None:
    kept = {} if TUNABLES not in os.environ else {TUNABLES: ""}
    with running_daemon(env=kept) as daemon:
        environment = Path(f"/proc/{daemon.pid}/environ").read_bytes()
        assert f"{THRESHOLD}=0x80000".encode() in environment
