"""`lmcache-qserver l2`: each command once as a process, then what it says and how it exits."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lmcache_qprotocol.keys import salt_digest
from lmcache_qserver.cli import cli
from lmcache_qserver.testing.daemon import environment
from lmcache_qserver.tier import open_store
from tests.server.tier.conformance import DEADLINE_S, names
from tests.server.upkeep.objects import FOREIGN, KEY, QUERY, Stored, fill, stored

PLAIN, TENANT, OTHER = stored(1), stored(2, salt="tenant"), stored(1, KEY)
ALL = (PLAIN, TENANT, OTHER)
IN_DATA = 8 * 4_200
NBYTES = len(PLAIN.content)
LIGHT = ("asyncio", "numpy", "obstore", "xxhash", "zmq")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with three objects and a foreign name."""
    put_into(tmp_path / "l2", [*ALL, Stored(FOREIGN, b"mine")])
    return tmp_path / "l2"


def put_into(folder: Path, objects: Iterable[Stored]) -> None:
    async def work() -> None:
        store = await open_store(f"file://{folder}")
        await fill(store, objects)
        await store.close(DEADLINE_S)

    asyncio.run(work())


def left_in(folder: Path) -> set[str]:
    async def work() -> set[str]:
        store = await open_store(f"file://{folder}", read_only=True)
        try:
            return await names(store)
        finally:
            await store.close(DEADLINE_S)

    return asyncio.run(work())


def invoke(folder: Path, *arguments: str, says: str | None = None) -> Result:
    """In this process; `says`: what is typed."""
    return CliRunner().invoke(cli, ["l2", *arguments, "--l2", f"file://{folder}"], input=says)


def process(
    folder: Path, *arguments: str, code: int = 0, **more: str
) -> tuple[list[dict[str, Any]], str]:
    """As a user runs it: (lines of JSON on standard output, standard error)."""
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_qserver", "l2", *arguments, "--json"],
        env=environment(LMCACHE_QSERVER_L2=f"file://{folder}", **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def flip(folder: Path, victim: Stored) -> None:
    (folder / victim.name).write_bytes(victim.flipped(IN_DATA).content)


# --- each as a process ---


def test_ls(folder: Path) -> None:
    records, _ = process(folder, "ls", "--long")
    assert {record["name"] for record in records} == {each.name for each in ALL} | {FOREIGN}
    flip(folder, PLAIN)
    records, _ = process(folder, "ls", "--long")  # the header is whole
    (folder / PLAIN.name).write_bytes(b"x" * 5000)
    records, _ = process(folder, "ls", "--long", "--model", QUERY, code=1)
    errors = {record["name"]: record.get("error") for record in records}
    assert errors == {PLAIN.name: "corrupt", TENANT.name: None}


def test_du(folder: Path) -> None:
    *families, total = process(folder, "du")[0]
    assert sorted(family["model_name"] for family in families) == [KEY, QUERY]
    assert (total["kind"], total["objects"], total["foreign"]) == ("total", 3, 1)
    assert total["bytes"] == 3 * NBYTES


def test_verify(folder: Path) -> None:
    foreign, total = process(folder, "verify")[0]
    assert (foreign["verdict"], foreign["name"]) == ("foreign", FOREIGN)
    assert (total["verdicts"], total["bytes"]) == ({"whole": 3, "foreign": 1}, 3 * NBYTES)
    flip(folder, PLAIN)
    bad, total = process(folder, "verify", "--quarantine", "--model", "org/model", code=1)[0]
    assert (bad["verdict"], bad["name"], bad["moved"]) == ("corrupt", PLAIN.name, True)
    assert total["verdicts"] == {"corrupt": 1, "whole": 2}
    *_, total = process(folder, "verify")[0]
    assert total["verdicts"] == {"whole": 2, "foreign": 1}


def test_gc(folder: Path) -> None:
    *gone, total = process(folder, "gc", "--max-bytes", str(2 * NBYTES), "--dry-run")[0]
    assert (len(gone), total["objects"], total["kept_objects"]) == (1, 1, 2)
    assert len(left_in(folder)) == 4
    *gone, total = process(folder, "gc", "--max-bytes", str(2 * NBYTES))[0]
    assert left_in(folder) == {each.name for each in ALL} - {gone[0]["name"]} | {FOREIGN}


def test_purge(folder: Path) -> None:
    _, told = process(folder, "purge", "--model", "org/model", code=1)  # nobody says yes
    assert "would go" in told
    assert len(left_in(folder)) == 4
    records, told = process(folder, "purge", "--model", "org/model", "--salt", "tenant", "--yes")
    assert records == [
        {
            "kind": "total",
            "models": {QUERY: 1},
            "objects": 1,
            "bytes": NBYTES,
            "foreign": 0,
            "quarantined": 0,
            "quarantined_bytes": 0,
        }
    ]
    assert "lmcache-qserver purge" in told
    assert left_in(folder) == {PLAIN.name, OTHER.name, FOREIGN}


# --- what they say, and how they exit ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gc"], "--older-than"),
        (["gc", "--older-than", "soon"], "30d"),
        (["gc", "--max-bytes", "lots"], "4GiB"),
        (["gc", "--max-bytes", "-1"], "4GiB"),
        (["purge", "--yes"], "--model"),
        (["purge", "--yes", "--model", ""], "name"),
        (["purge", "--yes", "--model", "m", "--salt", "x", "--no-salt"], "exclude"),
        (["ls", "--salt", "x", "--salt-digest", "0" * 32], "exclude"),
        (["ls", "--salt-digest", "x"], "32 hex"),
        (["ls", "--l2", "none"], "no store"),
        (["ls", "--l2", "http://x/y"], "file, s3"),
        (["ls", "--l2", "file:///no/such/folder"], "does not exist"),
        (["gc", "--max-bytes", "0", "--l2", "file:///no/such/folder"], "does not exist"),
        (["ls", "--l2", "file:///proc/version"], "Not a directory"),
    ],
)
def test_what_can_not_be_done_exits_with_2_and_says_why(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["l2", *arguments])
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_where_it_looks_when_nothing_is_set(tmp_path: Path) -> None:
    put_into(tmp_path / "l2", [PLAIN])
    result = CliRunner().invoke(
        cli, ["l2", "ls"], env={"STATE_DIRECTORY": str(tmp_path), "LMCACHE_QSERVER_L2": None}
    )
    assert result.exit_code == 0, result.output
    assert QUERY in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["ls", "--long"],
        ["du"],
        ["verify"],
        ["gc", "--dry-run", "--max-bytes", "0", "--older-than", "1s"],
    ],
)
def test_who_only_looks_changes_nothing(folder: Path, arguments: list[str]) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1_000_000, 2_000_000))
    (folder / ".tmp" / "1-dead").write_bytes(b"half")

    def traces() -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for path in folder.rglob("*"):
            status = path.lstat()
            found[str(path)] = (status.st_mtime_ns, status.st_ctime_ns)
            if path.is_file():
                found[str(path)] += (status.st_atime_ns,)
        return found

    before = traces()
    assert invoke(folder, *arguments).exit_code == 0
    assert traces() == before


def test_verify_with_quarantine_marks_nothing_as_used(folder: Path) -> None:
    os.utime(folder / PLAIN.name, (1_000_000, 2_000_000))
    assert invoke(folder, "verify", "--quarantine").exit_code == 0
    assert (folder / PLAIN.name).stat().st_atime == 1_000_000


def test_ls_for_people(folder: Path) -> None:
    lines = invoke(folder, "ls", "--salt", "tenant").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["model", QUERY]
    assert salt_digest("tenant") in lines[1]
    same = invoke(folder, "ls", "--salt-digest", salt_digest("tenant")).stdout.splitlines()
    assert same == lines
    assert len(invoke(folder, "ls", "--no-salt", "--model", "org/model").stdout.splitlines()) == 3
    assert invoke(folder, "ls", "--model", "nobody").stdout == ""
    assert "not ours: 1" in invoke(folder, "ls").stderr


def test_verify_for_people(folder: Path) -> None:
    flip(folder, PLAIN)
    result = invoke(folder, "verify")
    assert result.exit_code == 1
    assert f"corrupt  {PLAIN.name}" in result.stdout
    assert "have changed since they were written" in result.stdout
    assert "2 objects whole, 1 corrupt, 1 names not ours" in result.stdout
    assert "GB/s" in result.stdout


def test_gc_for_people(folder: Path) -> None:
    os.utime(folder / OTHER.name, (1_000_000, 2_000_000))
    result = invoke(folder, "gc", "--older-than", "30d", "--dry-run")
    assert f"expired  {OTHER.name}" in result.stdout
    assert "1 objects would go" in result.stdout
    result = invoke(folder, "gc", "--older-than", "30d")
    assert "1 objects deleted" in result.stdout
    assert "names not ours, left alone" in result.stdout
    assert left_in(folder) == {PLAIN.name, TENANT.name, FOREIGN}


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 1), ("n\n", 1, 4), ("", 1, 4)])
def test_a_purge_is_confirmed(folder: Path, answer: str, code: int, left: int) -> None:
    result = invoke(folder, "purge", "--model", "org/model", says=answer)
    assert result.exit_code == code
    assert f"{QUERY}: 2 objects" in result.output
    assert len(left_in(folder)) == left


@pytest.mark.parametrize(
    "arguments",
    [["gc", "--max-bytes", "0"], ["purge", "--model", "m", "--yes"], ["verify", "--quarantine"]],
)
def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, arguments: list[str]) -> None:
    result = invoke(tmp_path / "typo", *arguments)
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert os.listdir(tmp_path) == []


def test_a_purge_of_nothing_asks_nothing(folder: Path) -> None:
    result = invoke(folder, "purge", "--model", "nobody")
    assert result.exit_code == 0
    assert "0 objects deleted" in result.output


def test_a_purge_reaches_what_is_in_quarantine_and_tells_so(folder: Path) -> None:
    flip(folder, PLAIN)
    assert invoke(folder, "verify", "--quarantine").exit_code == 1
    assert invoke(folder, "purge", "--model", QUERY).exit_code == 1  # nobody says yes
    result = invoke(folder, "purge", "--model", QUERY, "--no-salt", says="y\n")
    assert "0 objects would go, 0 B; 1 in quarantine would go" in result.output
    assert "0 objects deleted, 0 B; 1 in quarantine deleted" in result.output
    assert left_in(folder) == {TENANT.name, OTHER.name, FOREIGN}


def test_gc_tells_what_goes_from_quarantine_apart(folder: Path) -> None:
    flip(folder, PLAIN)
    assert invoke(folder, "verify", "--quarantine").exit_code == 1
    (kept,) = left_in(folder) - {TENANT.name, OTHER.name, FOREIGN}
    result = invoke(folder, "gc", "--max-bytes", "0", "--dry-run")
    assert "2 objects would go" in result.output
    assert "quarantine" not in result.output
    result = invoke(folder, "gc", "--older-than", "0s")
    assert f"quarantined  {kept}" in result.output
    assert "2 objects deleted" in result.output
    assert "1 in quarantine deleted" in result.output
    assert left_in(folder) == {FOREIGN}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_store_of_another_user_can_be_looked_at_and_not_changed(folder: Path) -> None:
    os.chown(folder, 12345, 12345)
    assert invoke(folder, "ls").exit_code == 0
    result = invoke(folder, "gc", "--max-bytes", "0")
    assert result.exit_code == 2
    assert "belongs to user 12345" in result.output
    assert len(left_in(folder)) == 4


def test_help_stays_light() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, lmcache_qserver.cli; print([name for name in sys.argv[1:] if name in sys.modules])",
            *LIGHT,
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
