"""The life of the real daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.bare_client import BareClient, BareLifeline, register_small_ring
from lmcache_qserver.testing.daemon import (
    command,
    environment,
    log_path,
    running_daemon,
    start_daemon,
    stop_daemon,
    wait_until,
)


def test_start_stop_and_nothing_is_left(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path, pool_bytes="256MiB")
    print(f"ready after {daemon.start_s:.2f} s, {daemon.resident_bytes() / 2**20:.0f} MiB resident")
    ready = json.loads((tmp_path / "ready.json").read_text())
    assert ready["pid"] == daemon.pid
    assert sorted(ready) == ["boot_id", "http_url", "lifeline", "pid", "url"]
    assert Path(daemon.lifeline).is_socket()
    assert daemon.resident_bytes() > 256 << 20, "the pool is populated"
    assert stop_daemon(daemon) == 0, daemon.log()
    assert os.listdir(tmp_path) == [log_path(tmp_path).name]
    assert "Traceback" not in daemon.log()


def test_sigint_stops_it_too(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.process.wait(20) == 0
    assert "Traceback" not in daemon.log()


def test_it_stops_while_the_pool_is_being_populated(tmp_path: Path) -> None:
    output = (tmp_path / "log").open("wb")
    settings: dict[str, Any] = {"url": "tcp://127.0.0.1:0", "http_port": 0, "pool_bytes": "1GiB"}
    with subprocess.Popen(
        command(**settings, lifeline=tmp_path / "x.sock", ready_file=tmp_path / "ready.json"),
        env=environment(),
        stderr=output,
    ) as process:
        wait_until((tmp_path / "x.sock").exists, "the lifeline is there")
        process.terminate()
        assert process.wait(20) == 0
    output.close()
    assert os.listdir(tmp_path) == ["log"]
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_it_stops_with_a_worker_connected(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path, chunk_size=16)
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        lifeline.attach(client.hello().session)
        register_small_ring(client, lifeline, 1, 16)
        assert stop_daemon(daemon) == 0, daemon.log()
        assert lifeline.socket.recv(1) == b""
    assert "Traceback" not in daemon.log()


def test_a_daemon_that_was_killed_does_not_hinder_the_next(tmp_path: Path) -> None:
    daemon = start_daemon(tmp_path)
    daemon.process.kill()
    daemon.process.wait()
    (tmp_path / "ready.json").unlink()
    assert Path(daemon.lifeline).exists()
    assert stop_daemon(start_daemon(tmp_path)) == 0


@pytest.mark.parametrize("taken", ["url", "http_port", "lifeline"])
def test_an_address_in_use_is_a_clear_error(tmp_path: Path, taken: str) -> None:
    with running_daemon() as first:
        settings = {
            "url": "tcp://127.0.0.1:0",
            "http_port": "0",
            "pool_bytes": "1MiB",
            "lifeline": str(tmp_path / "second.sock"),
            "ready_file": str(tmp_path / "ready.json"),
        }
        settings[taken] = {
            "url": first.url,
            "http_port": first.http_url.rpartition(":")[2],
            "lifeline": first.lifeline,
        }[taken]
        done = subprocess.run(
            command(**settings),
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "--" + taken.replace("_", "-") in done.stderr
        assert first.get("/readyz") == "ok\n"
        assert Path(first.lifeline).exists()
    assert os.listdir(tmp_path) == []


def test_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        name = f"qserver-test-{os.getpid()}"
        systemd.bind(f"\0{name}")
        systemd.settimeout(20)
        with running_daemon(env={"NOTIFY_SOCKET": f"@{name}"}) as daemon:
            assert systemd.recv(100) == b"READY=1"
            daemon.process.terminate()
            assert systemd.recv(100) == b"STOPPING=1"
            assert daemon.process.wait(20) == 0


def test_json_logs() -> None:
    with running_daemon(log_format="json") as daemon:
        wait_until(lambda: "ready after" in daemon.log(), "the daemon has said so")
        lines = [json.loads(line) for line in daemon.log().splitlines()]
        assert all(set(line) >= {"time", "level", "logger", "message"} for line in lines)


def test_a_silent_worker_is_reaped() -> None:
    with (
        running_daemon(chunk_size=16, registration_grace_s=0.2, reap_timeout_s=0.2) as daemon,
        BareClient(daemon.url) as client,
        BareLifeline(daemon.lifeline) as lifeline,
    ):
        lifeline.attach(client.hello().session)
        register_small_ring(client, lifeline, 1, 16)
        wait_until(lambda: not daemon.status()["registered_q_ids"], "the worker is reaped")
        assert client.ask("ping", 1).result is False


def test_the_pages(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        assert "/metrics" in daemon.get("/")
        assert daemon.get("/livez") == "ok\n"
        assert daemon.get("/readyz") == daemon.get("/health") == "ok\n"
        assert "version" in json.loads(daemon.get("/version"))
        status = daemon.status()
        assert status["version"] == 1
        assert status["server"]["boot_id"] == daemon.boot_id.hex()
        assert status["server"]["url"] == daemon.url
        assert status["pool"]["free_bytes"] == status["pool"]["capacity_bytes"], (
            "the canary gives its page back"
        )
        for path, code in (("/config", 404), ("/status/../../etc/passwd", 404)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                daemon.get(path)
            assert caught.value.code == code
            caught.value.close()


def test_garbage_at_the_http_port_leaves_no_tracebacks() -> None:
    with running_daemon() as daemon:
        port = int(daemon.http_url.rpartition(":")[2])
        for garbage in (
            b"GET /status HTTP/9.9\r\n\r\n",
            b"\0" * 100,
            b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(garbage)
                assert connection.recv(12).startswith(b"HTTP/1.")
        assert daemon.get("/livez") == "ok\n"
        assert "Traceback" not in daemon.log()
