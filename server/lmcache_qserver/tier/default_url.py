"""Where the persistent tier lies when nothing is set: below the state folder of the service, or of the user."""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path

from lmcache_qserver.tier.errors import Refused

NAME = "lmcache-qserver"


def default_l2_url() -> str:
    """`file://` and `l2` below the first of these: $STATE_DIRECTORY (systemd's; the first if there are several),
    $XDG_STATE_HOME/lmcache-qserver, ~/.local/state/lmcache-qserver.

    Nothing is made. Whoever opens a store there for writing makes the parent first (`open_store` makes the last
    part only, so that a disk that is not mounted is not filled by mistake).

    Raises:
        Refused: this user has no home.
    """
    return "file://" + urllib.parse.quote(str(_state_folder() / "l2"))


def _state_folder() -> Path:
    if state := os.environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(state)
    home = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(home):  # others are to be ignored, says XDG
        return Path(home) / NAME
    try:
        return Path.home() / ".local" / "state" / NAME
    except RuntimeError:
        raise Refused("this user has no home: set --l2 to file:///PATH, or to none") from None
