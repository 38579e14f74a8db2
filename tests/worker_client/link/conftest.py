"""Fixtures of the link's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker_client.link.fake_server import FakeServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    """A fake server with a lifeline."""
    fake = FakeServer(lifeline=tmp_path / "lifeline.sock")
    yield fake
    fake.stop()
