"""A card, or a reason why there is none; and the real daemon with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.gpu.device_worker import CHUNK_SIZE

POOL_BYTES = 1 << 30


def why_not() -> str:
    """Why these tests can't run here; empty when they can."""
    try:
        import cuda.bindings  # noqa: F401 - asked for its presence only
    except ImportError:
        return "cuda-bindings is not installed (extra [cuda])"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a card, and say why."""
    reason = why_not()
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon that serves CUDA rings."""
    with running_daemon(devices="cuda", chunk_size=CHUNK_SIZE, pool_bytes=POOL_BYTES) as one:
        yield one
