"""The ready file: whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcache_qserver.face import ready_file


def test_it_is_removed_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    ready_file.write(path, {"pid": os.getpid() + 1})
    ready_file.remove(path)
    assert path.exists()
    ready_file.write(path, {"pid": os.getpid()})
    ready_file.remove(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["/", ".", "folder", "no/such/folder"])
def test_a_path_that_can_not_be_a_file_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):  # noqa: PT011 - the kernel's words
        ready_file.write(Path(name), {})
    assert os.listdir(tmp_path) == ["folder"]
