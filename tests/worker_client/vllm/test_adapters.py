"""LoRA adapters: what an id, or a name and path, first stood for it stands for; what changed is not sure any more."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_qclient.identity.lora_files import lora_digest
from lmcache_qclient.vllm import adapters as module
from lmcache_qclient.vllm.adapters import Adapters
from lmcache_qprotocol.identity import LoraIdentity


def lora(name: str, path: object, lora_int_id: int = 1) -> SimpleNamespace:
    """A `LoRARequest`."""
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=lora_int_id)


def write(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "one")


def test_its_files_name_it_where_they_can_be_read(folder: Path) -> None:
    assert Adapters().identity(lora("a", folder)) == LoraIdentity(
        "a", str(folder), lora_digest(folder)
    )
    assert Adapters().identity(lora("a", "org/hub-id")) == LoraIdentity("a", "org/hub-id")


def test_c25_one_name_with_two_paths_are_two(folder: Path, tmp_path: Path) -> None:
    known = Adapters()
    other = write(tmp_path / "two", b"others")
    first = known.identity(lora("a", folder, 1))
    second = known.identity(lora("a", other, 2))
    assert first is not None
    assert second is not None
    assert first.digest != second.digest
    unread = {known.identity(lora("a", f"/nowhere/{number}", 3 + number)) for number in range(2)}
    assert unread == {LoraIdentity("a", "/nowhere/0"), LoraIdentity("a", "/nowhere/1")}


def test_its_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def counted(path: str) -> str:
        reads.append(path)
        return lora_digest(path)

    monkeypatch.setattr(module, "lora_digest", counted)
    known = Adapters()
    found = {known.identity(lora("a", folder, lora_int_id)) for lora_int_id in (1, 1, 2)}
    assert (len(found), reads) == (1, [str(folder)])


def test_files_written_over_are_not_sure_any_more(folder: Path) -> None:
    known = Adapters()
    request = lora("a", folder)
    assert known.identity(request) is not None
    assert not known.is_doubtful(request)
    write(folder, b"trained on")
    assert known.identity(request) is None
    assert known.is_doubtful(request)
    write(folder, b"weights")
    assert known.identity(request) is None, "whether the old ones were loaded again nobody knows"


def test_files_that_are_gone_or_could_never_be_read_change_nothing(folder: Path) -> None:
    known = Adapters()
    first = known.identity(lora("a", folder))
    shutil.rmtree(folder)
    assert known.identity(lora("a", folder)) == first
    unread = known.identity(lora("b", folder, 2))
    write(folder)
    assert known.identity(lora("b", folder, 2)) == unread == LoraIdentity("b", str(folder))


def test_another_adapter_under_a_used_id_leaves_neither_sure(folder: Path, tmp_path: Path) -> None:
    known = Adapters()
    first, second = lora("a", folder, 1), lora("b", write(tmp_path / "two", b"2"), 1)
    assert known.identity(first) is not None
    assert known.identity(second) is None
    assert known.is_doubtful(first)
    assert known.identity(first) is None


def test_one_that_is_being_written_is_never_sure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: str) -> str:
        os.utime(folder / "adapter_config.json", ns=(1, 1))
        return lora_digest(path)

    known = Adapters()
    monkeypatch.setattr(module, "lora_digest", half)
    assert known.identity(lora("a", folder)) is None
    monkeypatch.undo()
    assert known.identity(lora("a", folder)) is None, "vLLM may have loaded what was there before"


def test_equal_names_in_use_together_leave_neither_sure(folder: Path, tmp_path: Path) -> None:
    known = Adapters()
    first, second = lora("a", folder, 1), lora("a", write(tmp_path / "two", b"2"), 2)
    known.note_in_use(first, [first])
    assert known.identity(first) is not None
    known.note_in_use(second, [first, second])
    assert known.identity(second) is None
    assert known.is_doubtful(first)
    other = lora("b", folder, 3)
    known.note_in_use(other, [other, first])
    assert known.identity(other) is not None
