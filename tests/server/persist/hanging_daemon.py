"""The real daemon, but that its files hang while another file is there, as files of a dead network mount do.

`python -m tests.server.persist.hanging_daemon start ...`; the environment variable `L2_HANGS` names that file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from lmcache_qserver.__main__ import main
from lmcache_qserver.cache_bypass import start_over

HANGS = "L2_HANGS"
METHODS = ("put", "get_into", "head", "folders", "delete", "quarantine")


def hanging(method: Callable[..., Any], path: str) -> Callable[..., Any]:
    """Begins when the file is gone; in a thread."""

    @wraps(method)
    def wait_first(*args: Any) -> Any:
        while os.path.exists(path):
            time.sleep(0.005)
        return method(*args)

    return wait_first


def prepare() -> None:
    """Change what is changed here, before the daemon is built."""
    from lmcache_qserver.tier.disk import Disk

    for name in METHODS:
        setattr(Disk, name, hanging(getattr(Disk, name), os.environ[HANGS]))


if __name__ == "__main__":
    start_over()  # the daemon's first step: behind the imports it would mean all of them twice
    prepare()
    main()
