from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from lmcache_qprotocol.messages import WorkerReport
from lmcache_qserver.cli import cli
from lmcache_qserver.config import Config
from lmcache_qserver.pool.populating import Populating
from lmcache_qserver.testing.daemon import environment, running_daemon
from tests.server.face.wire_session import wire_session


def test_every_setting_has_an_option_and_an_environment_variable() -> None:
    text = CliRunner().invoke(cli, ["start", "--help"], terminal_width=200).output
    for item in fields(Config):
        assert f"--{item.name.replace('_', '-')}" in text
        assert f"LMCACHE_QSERVER_{item.name.upper()}" in text


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (["--pool-bytes", "lots"], {}, "pool_bytes"),
        (["--chunk-size", "0"], {}, "chunk_size"),
        (["--http-port", "x"], {}, "http_port"),
        (["--url", "tcp://0.0.0.0:1"], {}, "--allow-insecure-tcp"),
        (["--eviction", "fifo"], {}, "lru, none"),
        ([], {"LMCACHE_QSERVER_POOL_BYTES": "lots"}, "pool_bytes"),
        ([], {"LMCACHE_QSERVER_ALLOW_UID": "root"}, "allow_uid"),
        (["--no-such-option"], {}, "--no-such-option"),
    ],
)
def test_bad_settings_exit_with_2_and_say_which(
    arguments: list[str], env: dict[str, str], said: str
) -> None:
    result = CliRunner().invoke(cli, ["start", *arguments], env=env)
    assert result.exit_code == 2
    assert said in result.output


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def run(config: Config, populating: Populating) -> int:
        seen.append(config)
        assert populating.memory.nbytes == config.pool_bytes
        populating.stop()
        return 0

    monkeypatch.setattr("lmcache_qserver.daemon.run", run)
    env = {
        "LMCACHE_QSERVER_CHUNK_SIZE": "64",
        "LMCACHE_QSERVER_POOL_BYTES": "2GiB",
        "LMCACHE_QSERVER_ALLOW_UID": "1000,1001",
        "LMCACHE_QSERVER_ALLOW_INSECURE_TCP": "true",
        "LMCACHE_QSERVER_COPY_TIMEOUT_S": "2.5",
    }
    result = CliRunner().invoke(cli, ["start", "--chunk-size", "32"], env=env)
    assert result.exit_code == 0, result.output
    assert seen == [
        Config(
            chunk_size=32,
            pool_bytes=2 << 30,
            allow_uid=(1000, 1001),
            allow_insecure_tcp=True,
            copy_timeout_s=2.5,
        )
    ]


def test_status_of_a_running_daemon() -> None:
    with running_daemon() as daemon:
        result = CliRunner().invoke(cli, ["status", "--http-url", daemon.http_url])
        assert result.exit_code == 0, result.output
        for title in ("server", "pool", "stores", "instances", "models", "coverage", "rings"):
            assert re.search(rf"^{title} ", result.output, re.MULTILINE)
        assert daemon.url in result.output
        result = CliRunner().invoke(cli, ["status", "--http-url", daemon.http_url, "--json"])
        assert json.loads(result.output)["server"]["pid"] == daemon.pid


def test_status_tells_of_full_rings_and_engines_that_waited() -> None:
    with running_daemon(chunk_size=16) as daemon, wire_session(daemon) as session:
        report = WorkerReport(
            computed=0,
            captured=0,
            lost={},
            pending=0,
            ring_blocks=40,
            ring_used=7,
            ring_high_water=38,
            waited_ms=2_340,
        )
        session.report(report)
        result = CliRunner().invoke(cli, ["status", "--http-url", daemon.http_url])
    assert "7 of 40 blocks in use, 95 % of the fullest one ever" in result.output
    assert "engines waited 2.3 s" in result.output


def test_status_without_a_daemon_exits_with_1_and_says_what_to_do() -> None:
    result = CliRunner().invoke(cli, ["status", "--http-url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "lmcache-qserver start" in result.output
    assert "Traceback" not in result.output


def test_version_and_the_module_form() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_qserver", "--version"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(r"lmcache-qserver, version \S+\n", done.stdout)


@pytest.mark.parametrize("missing", ["click", "uvloop", "aiohttp", "prometheus_client"])
def test_without_the_server_extra_it_says_how_to_install_it(tmp_path: Path, missing: str) -> None:
    script = (
        "import sys; sys.modules[sys.argv[1]] = None; sys.argv[1:] = ['start', '--chunk-size', '16'];"
        "from lmcache_qserver.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, missing],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert 'pip install "lmcache-qserver[server]"' in done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr
