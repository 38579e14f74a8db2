"""An adapter's digest: of the files that make its tensors, and of nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from lmcache_qclient.identity import lora_files
from lmcache_qclient.identity.lora_files import LORA_CONTEXT, lora_digest, lora_signature
from tests.protocol.plain_msgpack import pack

CONFIG, WEIGHTS = b'{"r": 8}', b"weights"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return folder


def test_it_is_what_the_protocol_says(adapter: Path) -> None:
    files = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}
    hashed = pack([[name, blake3(content).digest()] for name, content in files.items()])
    right = blake3(hashed, derive_key_context="lmcache-qserver 2026-11 lora files v1").hexdigest()
    assert LORA_CONTEXT == "lmcache-qserver 2026-11 lora files v1"
    assert lora_digest(adapter) == lora_digest(str(adapter)) == f"blake3:{right}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", b'{"r": 9}'),
        ("adapter_model.safetensors", b"weightt"),
        ("adapter_model.safetensors", b""),
        ("adapter_model.bin", WEIGHTS),
        ("new_embeddings.safetensors", b"e"),
    ],
)
def test_all_that_makes_tensors_counts(adapter: Path, name: str, content: bytes) -> None:
    before = lora_digest(adapter), lora_signature(adapter)
    (adapter / name).write_bytes(content)
    assert lora_digest(adapter) != before[0]
    assert lora_signature(adapter) != before[1]


def test_place_name_and_other_files_do_not(adapter: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(adapter, tmp_path / "elsewhere")
    (moved / "README.md").write_text("trained on ...")
    assert lora_digest(moved) == lora_digest(adapter)
    assert lora_signature(moved) != lora_signature(adapter)


def test_the_home_folder_is_found(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(adapter.parent))
    assert lora_digest("~/adapter") == lora_digest(adapter)


@pytest.mark.parametrize("gone", ["adapter_config.json", "adapter_model.safetensors", ""])
def test_what_is_no_adapter_has_none(adapter: Path, gone: str) -> None:
    if gone:
        (adapter / gone).unlink()
    path = adapter if gone else adapter / "nothing"
    for ask in (lora_digest, lora_signature):
        with pytest.raises(OSError, match="no LoRA adapter"):
            ask(path)


def test_one_that_is_being_written_has_none(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lora_signature(adapter)
    signatures = iter([first, (*first, ("new_embeddings.bin", 1, 1, 1, 1, 1))])
    monkeypatch.setattr(lora_files, "lora_signature", lambda path: next(signatures))
    with pytest.raises(OSError, match="being written"):
        lora_digest(adapter)


def test_a_file_written_over_in_the_same_length_shows(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    before, stat = lora_signature(adapter), weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert lora_signature(adapter) != before


def test_other_weights_of_equal_size_and_time_under_the_same_name_show(adapter: Path) -> None:
    """As `cp -p` from a reproducible archive leaves them."""
    weights = adapter / "adapter_model.safetensors"
    before, stat = lora_signature(adapter), weights.stat()
    weights.write_bytes(weights.read_bytes()[::-1])
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_mtime_ns == stat.st_mtime_ns
    assert lora_signature(adapter) != before
