"""Fixtures of the store's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.server.qstore.world import World


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    """A store with room for 16 chunks."""
    one = World()
    yield one
    await one.close()
