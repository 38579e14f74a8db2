from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=16, allow_inline=True) as running:
        yield running
