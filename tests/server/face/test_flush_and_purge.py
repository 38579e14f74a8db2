"""`lmcache-qserver flush` and `purge` against real daemons."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from lmcache_qserver.cli import cli
from lmcache_qserver.qstore.persist.read_counts import MISSES
from lmcache_qserver.qstore.persist.write_behind import ERRORS, LOST
from lmcache_qserver.status_report import NO_TIER
from lmcache_qserver.testing.daemon import running_daemon
from tests.server.wire_worker import CHUNK, MODEL, WireWorker, name_of, rows_of

NAMES = [name_of(tuple(range(first, first + CHUNK))) for first in (0, 100, 200)]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, arguments)
    return result.exit_code, result.output


def test_flush_waits_until_all_is_persisted(tmp_path: Path) -> None:
    with running_daemon(l2=f"file://{tmp_path}/l2", chunk_size=CHUNK) as daemon:
        with WireWorker(daemon) as worker:
            for seed, name in enumerate(NAMES):
                worker.store(name, rows_of(seed))
        assert run("flush", "--url", daemon.url) == (0, "everything that is stored is persisted\n")
        assert len(list((tmp_path / "l2").rglob("*.safetensors"))) == len(NAMES)
        assert daemon.status()["l2"]["written"] == len(NAMES)


def test_flush_says_when_nothing_persists() -> None:
    with running_daemon(l2="none") as daemon:
        code, output = run("flush", "--url", daemon.url)
    assert code == 1
    assert "no persistent tier" in output


def test_purge_reaches_every_tier_and_only_what_is_meant(tmp_path: Path) -> None:
    with (
        running_daemon(l2=f"file://{tmp_path}/l2", chunk_size=CHUNK) as daemon,
        WireWorker(daemon) as worker,
    ):
        for salt in ("", "a", "b"):
            worker.store(NAMES[0], rows_of(len(salt)), salt=salt)
        run("flush", "--url", daemon.url)
        code, output = run("purge", "--url", daemon.url, "--model", MODEL, "--salt", "a", "--yes")
        assert code == 0, output
        assert "1 objects dropped from memory, 1 deleted" in output
        assert worker.read(NAMES[0], salt="a") == "purged"
        assert worker.read(NAMES[0], salt="b") == rows_of(1)
        assert worker.read(NAMES[0]) == rows_of(0)
        code, output = run("purge", "--url", daemon.url, "--model", MODEL, "--no-salt", "--yes")
        assert "1 objects dropped from memory, 1 deleted" in output
        assert worker.read(NAMES[0], salt="b") == rows_of(1)
        code, output = run("purge", "--url", daemon.url, "--model", "another", "--yes")
        assert "0 objects dropped from memory, 0 deleted" in output
        code, output = run("purge", "--url", daemon.url, "--model", MODEL, "--yes")
        assert "1 objects dropped from memory, 1 deleted" in output
        assert not list((tmp_path / "l2").rglob("*.safetensors"))


def test_purge_asks_first() -> None:
    with running_daemon(l2="none", chunk_size=CHUNK) as daemon, WireWorker(daemon) as worker:
        worker.store(NAMES[0], rows_of(0))
        result = CliRunner().invoke(cli, ["purge", "--url", daemon.url, "--model", MODEL], "n\n")
        assert result.exit_code == 1
        assert worker.read(NAMES[0]) == rows_of(0)


def test_what_has_labels_has_all_of_them_where_there_is_no_tier() -> None:
    assert (tuple(NO_TIER.lost), tuple(NO_TIER.errors)) == (LOST, ERRORS)
    assert tuple(NO_TIER.missed) == MISSES
