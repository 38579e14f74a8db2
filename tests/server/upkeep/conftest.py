"""The stores on which everything is tried."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmcache_qserver.tier import ChunkStore, open_store
from tests.server.tier.conformance import DEADLINE_S


@pytest.fixture(params=["file", "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ChunkStore]:
    """Empty."""
    url = f"file://{tmp_path}/l2" if request.param == "file" else "memory://"
    store = await open_store(url, timeout_s=DEADLINE_S)
    yield store
    assert await store.close(DEADLINE_S)
