"""The S3 server of the tests: moto's, a process on loopback, or the one that the environment names.

    QSERVER_S3_ENDPOINT=http://HOST:PORT AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... python -m pytest ...

runs them against another, for example Ceph's. It needs a bucket `queries` to make, fill and delete: never point it at a
server that has one already.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache_qserver.testing.daemon import wait_until

BUCKET = "queries"
ENDPOINT = os.environ.get("QSERVER_S3_ENDPOINT", "")
"""Of a server that is there already; empty: moto's is started."""
SECRET = os.environ.get("AWS_SECRET_ACCESS_KEY", "") if ENDPOINT else "SK"
"""Of whom the tests run as."""
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", "") if ENDPOINT else "AK",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
}
NO_SIGNATURES_AFTER = "inf"
"""Requests that moto lets through before it looks at credentials, unless told otherwise."""
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


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """Its URL.

    Args:
        folder: empty; for what moto tells of itself.
    """
    if ENDPOINT:
        yield ENDPOINT
        return
    address = folder / "address"
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


class Admin:
    """What a server's owner can do, by a client that is none of ours."""

    def __init__(self, endpoint: str) -> None:
        import boto3  # type: ignore[import-untyped]  # comes with moto

        self.endpoint = endpoint
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=ENVIRONMENT["AWS_REGION"],
            aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=SECRET,
        )

    def make_bucket(self) -> None:
        """The tests' bucket, empty."""
        self._client.create_bucket(Bucket=BUCKET)

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Bytes by name of what is in the bucket."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}

    def delete_bucket(self) -> None:
        """The bucket and what is in it; nothing if it is gone."""
        if not ENDPOINT:
            self._ask_moto("reset")
            return
        with contextlib.suppress(self._client.exceptions.NoSuchBucket):
            for name in self.objects():
                self._client.delete_object(Bucket=BUCKET, Key=name)
            self._client.delete_bucket(Bucket=BUCKET)

    @contextmanager
    def rejecting(self) -> Iterator[None]:
        """Credentials count; moto looks at none unless it is told to."""
        if ENDPOINT:
            yield
            return
        self._ask_moto("reset-auth", "0")
        try:
            yield
        finally:
            self._ask_moto("reset-auth", NO_SIGNATURES_AFTER)

    def _ask_moto(self, what: str, body: str = "") -> None:
        asked = urllib.request.Request(
            f"{self.endpoint}/moto-api/{what}",
            body.encode(),
            {"Content-Type": "text/plain"},
            method="POST",
        )
        with urllib.request.urlopen(asked, timeout=30):
            pass
