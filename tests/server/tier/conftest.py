"""The S3 server of the tests: moto's, a process on loopback."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_qserver.testing.daemon import wait_until

BUCKET = "queries"
SCRIPT = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
with open(sys.argv[1] + ".new", "w") as file:
    file.write("http://%s:%d" % server.get_host_and_port())
import os
os.rename(sys.argv[1] + ".new", sys.argv[1])
sys.stdin.read()  # until the tests are gone
"""


def request(url: str, method: str) -> None:
    """Ask moto for something."""
    asked = urllib.request.Request(url, method=method, headers={"Content-Length": "0"})
    with urllib.request.urlopen(asked, timeout=30):
        pass


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    address: Path = tmp_path_factory.mktemp("moto") / "address"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: address.exists() or process.poll() is not None, "moto's address")
        assert process.poll() is None, "moto did not start"
        yield address.read_text()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def s3_environment(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket, and the environment that leads to it; the server's URL."""
    request(f"{s3_server}/{BUCKET}", "PUT")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield s3_server
    request(f"{s3_server}/moto-api/reset", "POST")
