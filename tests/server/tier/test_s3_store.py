"""`s3://` against moto's server keeps the rules of every store; and what a server can do to us."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from lmcache_qserver.tier import ChunkStore, Refused, TierError, Unavailable, open_store
from tests.server.s3_server import BUCKET, Admin
from tests.server.tier.conformance import (
    DEADLINE_S,
    MIB,
    NAME,
    StoreConformance,
    data_of,
    get,
    names,
    put,
)

TIMEOUT_S = 1.0


pytestmark = pytest.mark.s3


@pytest.mark.usefixtures("s3_environment")
class TestS3Store(StoreConformance):
    """A prefix of a bucket."""

    async def open(self) -> ChunkStore:
        return await open_store(f"s3://{BUCKET}/some/prefix", timeout_s=DEADLINE_S)

    async def test_a_prefix_is_a_place_of_its_own(self, store: ChunkStore) -> None:
        other = await open_store(f"s3://{BUCKET}/other", timeout_s=DEADLINE_S)
        await put(other, NAME, b"other")
        await put(store, NAME, b"store")
        assert await get(other, NAME, 5) == b"other"
        assert await names(other) == {NAME}
        await other.close(DEADLINE_S)


@pytest.mark.usefixtures("s3_environment")
async def test_a_bucket_that_does_not_exist_is_refused_at_opening() -> None:
    with pytest.raises(Refused, match="NoSuchBucket"):
        await open_store("s3://no-such-bucket/x", timeout_s=DEADLINE_S)


@pytest.mark.usefixtures("s3_environment")
async def test_a_bucket_that_goes_away_refuses(s3_admin: Admin) -> None:
    store = await open_store(f"s3://{BUCKET}/x", timeout_s=DEADLINE_S)
    s3_admin.delete_bucket()
    with pytest.raises(Refused, match="no such bucket"):
        await put(store, NAME, b"x")
    await store.close(DEADLINE_S)


class FakeServer:
    """Speaks as much HTTP as the test wants."""

    def __init__(self, answer: bytes | None, read_bytes: int | None = None) -> None:
        self.answer = answer
        self.read_bytes = read_bytes
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if self.answer is None:
                    await asyncio.sleep(DEADLINE_S)
                    return
                if self.read_bytes is not None:
                    await reader.readexactly(self.read_bytes)
                    return
                writer.write(self.answer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def running(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeServer]:
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.ensure_future(self.handle(reader, writer)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", self.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # aborted transports close in the loop's next turn


def answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


EMPTY_LIST = answer(
    "200 OK",
    "<ListBucketResult><Name>queries</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>",
)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("403 Forbidden", "InvalidAccessKeyId", "refused"),
        ("403 Forbidden", "SignatureDoesNotMatch", "refused"),
        ("403 Forbidden", "QuotaExceeded", "full"),
        ("401 Unauthorized", "AccessDenied", "refused"),
        ("400 Bad Request", "Whatever", "unavailable"),
        ("503 Slow Down", "SlowDown", "unavailable"),
        ("507 Insufficient Storage", "XMinioStorageFull", "full"),
    ],
)
async def test_what_a_server_answers_is_told_at_opening_and_by_a_put(
    status: str, code: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeServer(answer(status, f"<Error><Code>{code}</Code></Error>"))
    async with fake.running(monkeypatch):
        with pytest.raises(TierError) as told:
            await open_store("s3://queries/x", timeout_s=5.0)
        assert told.value.code == kind
        assert "very-secret" not in str(told.value)
        fake.answer, error_answer = EMPTY_LIST, fake.answer
        store = await open_store("s3://queries/x", timeout_s=5.0)
        fake.answer = error_answer
        with pytest.raises(TierError) as told:
            await put(store, NAME, b"x")
        assert told.value.code == kind
        assert await store.close(5.0)


async def test_a_frozen_server_is_given_up_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeServer(EMPTY_LIST)
    async with fake.running(monkeypatch):
        store = await open_store("s3://queries/x", timeout_s=TIMEOUT_S)
        fake.answer = None
        began = time.monotonic()
        putting = store.put(NAME, [memoryview(data_of(MIB))])
        getting = store.get_into(NAME, [memoryview(bytearray(MIB))])
        for transfer in (putting, getting):
            with pytest.raises(Unavailable):
                await transfer
        with pytest.raises(Unavailable):
            await store.head(NAME)
        with pytest.raises(Unavailable):
            await open_store("s3://queries/x", timeout_s=TIMEOUT_S)
        assert time.monotonic() - began < 10 * TIMEOUT_S
        # The library, too, gives up by itself, and lets go of the buffers.
        await asyncio.wait_for(putting.wait_until_over(), 10 * TIMEOUT_S)
        await asyncio.wait_for(getting.wait_until_over(), 10 * TIMEOUT_S)
        assert await store.close(DEADLINE_S)


async def test_a_server_that_dies_in_the_middle_of_a_put(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer(EMPTY_LIST)
    async with fake.running(monkeypatch):
        store = await open_store("s3://queries/x", timeout_s=5.0)
        fake.read_bytes = 100_000
        with pytest.raises(Unavailable):
            await put(store, NAME, data_of(16 * MIB))
        assert await store.close(DEADLINE_S)


async def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer(EMPTY_LIST)
    async with fake.running(monkeypatch):
        store = await open_store("s3://queries/x", timeout_s=5.0)
    with pytest.raises(Unavailable):
        await put(store, NAME, b"x")
    with pytest.raises(Unavailable):
        await open_store("s3://queries/x", timeout_s=5.0)
    assert await store.close(DEADLINE_S)
