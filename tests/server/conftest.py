"""The S3 server of the tests, and an empty bucket on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.s3_server import ENVIRONMENT, Admin, running_server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    with running_server(tmp_path_factory.mktemp("moto")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def s3_admin(s3_server: str) -> Admin:
    """Its owner."""
    return Admin(s3_server)


@pytest.fixture
def s3_environment(s3_admin: Admin, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket, and the environment that leads to it; the server's URL."""
    s3_admin.make_bucket()
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_admin.endpoint}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield s3_admin.endpoint
    s3_admin.delete_bucket()
