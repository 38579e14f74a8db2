from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.server.fuzz.bystander import Bystander


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=16, pool_bytes="16MiB") as running:
        yield running


@pytest.fixture
def bystander(daemon: RunningDaemon) -> Iterator[Bystander]:
    made = Bystander(daemon)
    yield made
    made.close()
