"""The real daemon, but that its copies can be made to pause, and that it looks for expired leases more often.

`python -m tests.faults.paced_daemon start ...`; the file named by `FAULTS_PAGE` holds the pause.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from lmcache_qserver.__main__ import main
from lmcache_qserver.cache_bypass import start_over

PAGE = "FAULTS_PAGE"
LEASE_SCAN_S = 0.1


def prepare() -> None:
    """Change what is changed here, before the daemon is built."""
    from lmcache_qserver import daemon
    from tests.faults.paced_crew import PacedCrew
    from tests.faults.page import Page

    page = Page(Path(os.environ[PAGE]))
    setattr(daemon, "Crew", partial(PacedCrew, page=page))  # noqa: B010 - a name that the module only uses
    daemon.LEASE_SCAN_S = LEASE_SCAN_S


if __name__ == "__main__":
    start_over()  # the daemon's first step: behind the imports it would mean all of them twice
    prepare()
    main()
