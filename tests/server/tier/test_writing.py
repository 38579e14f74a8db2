"""Bytes into a file in steps, behind each of which the disk may begin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmcache_qserver.tier import writing
from tests.server.tier.conformance import data_of

STEP = 16384


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(place, length, flags) of what the disk was told to begin with, each as soon as the file was that long."""
    calls: list[tuple[int, int, int]] = []

    def begin(fd: int, at: object, nbytes: object, flags: object) -> int:
        call = (at.value, nbytes.value, flags.value)  # type: ignore[attr-defined]  # ctypes' numbers
        assert os.fstat(fd).st_size == call[0] + call[1]
        calls.append(call)
        return -1  # it does not matter

    monkeypatch.setattr(writing, "STEP_BYTES", STEP)
    monkeypatch.setattr(writing, "_sync_file_range", begin)
    return calls


def write(path: Path, parts: Sequence[object], direct: int = 0) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    writing.write_all(fd, [memoryview(part) for part in parts], direct)  # type: ignore[arg-type]  # buffers
    os.close(fd)


@pytest.mark.parametrize("most", [1000, 5000, 1 << 20])
@pytest.mark.parametrize(
    ("nbytes", "steps"),
    [
        (1, 0),
        (STEP - 4096, 0),
        (STEP - 4095, 1),
        (2 * STEP - 4096, 1),
        (3 * STEP, 3),
        (5 * STEP + 7, 5),
    ],
)
def test_each_step_but_the_last_begins_once_it_is_complete(
    begun: list[tuple[int, int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    steps: int,
    most: int,
) -> None:
    real = os.writev

    def short(fd: int, parts: Sequence[memoryview]) -> int:
        return real(fd, [parts[0][:most], *(parts[1:] if parts[0].nbytes <= most else [])])

    monkeypatch.setattr(os, "writev", short)
    head, data = data_of(4096), data_of(nbytes, 1)
    write(tmp_path / "file", [head, data])
    assert (tmp_path / "file").read_bytes() == head.tobytes() + data.tobytes()
    assert begun == [(step * STEP, STEP, 2) for step in range(steps)]


def test_many_small_parts(begun: list[tuple[int, int, int]], tmp_path: Path) -> None:
    data = data_of(2 * STEP + 100)
    write(tmp_path / "file", [data[index : index + 1] for index in range(data.nbytes)])
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert [at for at, _nbytes, _flags in begun] == [0, STEP]


def test_without_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "STEP_BYTES", STEP)
    monkeypatch.setattr(writing, "_sync_file_range", None)
    data = data_of(5 * STEP)
    write(tmp_path / "file", [data])
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_the_kernel_knows_the_call(tmp_path: Path) -> None:
    assert writing._sync_file_range is not None
    (tmp_path / "file").write_bytes(b"x")
    fd = os.open(tmp_path / "file", os.O_RDWR)
    writing._begin_writing(fd, 0)
    os.close(fd)
    assert writing._sync_file_range(-1, 0, 0, 2) == -1


def test_what_direct_leaves_goes_through_the_cache_in_steps_of_the_file(
    begun: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    data = data_of(4196 + 3 * STEP)  # the first page is aligned, what is behind it is not
    write(tmp_path / "file", [data[:4196], data[4196:]], os.O_DIRECT)
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert [at for at, _nbytes, _flags in begun] == [0, STEP, 2 * STEP]
