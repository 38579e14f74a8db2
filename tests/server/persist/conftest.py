"""A module with a store behind it that the test controls."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.persist.controlled_store import TierWorld


@pytest.fixture
async def world() -> AsyncIterator[TierWorld]:
    """Room for 16 chunks; a reader may hold 4."""
    one = TierWorld()
    yield one
    await one.close()
