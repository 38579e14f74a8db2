"""A file that is there exactly while the daemon is ready, for scripts and tests that wait for it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write(path: Path, content: dict[str, Any]) -> None:
    """Put the file in place in one step: whoever sees it sees all of it.

    Raises:
        OSError: the folder is missing, or not writable.
    """
    unfinished = path.parent / f".{path.name}.{os.getpid()}"
    try:
        unfinished.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def remove(path: Path) -> None:
    """Remove the file if it is ours: it holds our pid."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")).get("pid") == os.getpid():
            path.unlink()
