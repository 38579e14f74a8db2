"""The paced daemon by itself, for tests of one fault."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_qserver.testing.daemon import (
    RunningDaemon,
    environment,
    start_daemon,
    stop_daemon,
)
from tests.faults.paced_daemon import PAGE
from tests.faults.page import Page
from tests.faults.pattern import CHUNK

ROOT = Path(__file__).parents[2]


def start_paced_daemon(folder: Path, **settings: Any) -> RunningDaemon:
    """Start it; its page is `server.page` in the folder."""
    roots = os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])
    return start_daemon(
        folder,
        env={PAGE: str(folder / "server.page"), "PYTHONPATH": roots},
        module="tests.faults.paced_daemon",
        chunk_size=CHUNK,
        **settings,
    )


@contextlib.contextmanager
def paced_daemon(
    folder: Path, pause_s: float = 0.0, **settings: Any
) -> Iterator[tuple[RunningDaemon, Page]]:
    """Run it, and kill it at the end if it has not been stopped; with its page.

    Args:
        pause_s: see `Page`.
    """
    page = Page(folder / "server.page")
    page.pause_s = pause_s
    daemon = start_paced_daemon(folder, **settings)
    try:
        yield daemon, page
    finally:
        page.pause_s = 0.0
        if daemon.process.poll() is None:
            stop_daemon(daemon)
        page.close()
