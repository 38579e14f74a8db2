"""The demo's model for tests marked `vllm` (run in .venv-vllm): made once, in the checkout's .cache."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    pytest.importorskip("transformers")
    from demo.model import ModelUnavailable, prepare

    try:
        return prepare(ROOT / ".cache" / "smollm2-135m")
    except ModelUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
