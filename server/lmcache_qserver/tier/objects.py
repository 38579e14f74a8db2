"""`s3://`, `gs://`, `az://`, `memory://`: objects in an object store that many machines share, through obstore.

What its settings are for (each was a fault before it was a setting):

    mode="create"           the store itself refuses a second object of one name (If-None-Match: *)
    use_multipart=False     one request, so one object or none; nothing half uploaded lies hidden in the bucket
    time-outs, retries      its defaults wait three minutes for a server that does not answer
    16 MiB ranges           several at a time make a large get 40 % faster
    unsigned payload        over TLS only: hashing the body a second time proves nothing there; without TLS it does
    never cancelled         a put that was cancelled went on reading from a buffer that was somebody else's by then
    release, then over      an answer does not mean that the library has let go of the buffer (a retry, a body still
                            under way): it is the caller's again when `memoryview.release()` succeeds

obstore's futures are not tasks: nothing but us could cancel them, and we shield them.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import os
import re
import urllib.parse
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from lmcache_qserver.tier.chunk_store import (
    ChunkStore,
    Entry,
    Observe,
    PutOutcome,
    byte_views,
    check_name,
    check_prefix,
    is_name,
    kept_name,
)
from lmcache_qserver.tier.errors import Corrupt, Full, NotThere, Refused, TierError, Unavailable
from lmcache_qserver.tier.threads import Threads
from lmcache_qserver.tier.transfer import Transfer

logger = logging.getLogger(__name__)

RANGE_BYTES = 16 << 20
REQUESTS = 8
"""Puts and ranges under way at a time."""
COPY_THREADS = 2
MAX_RETRIES = 2
CONNECT_TIMEOUT_S = 5.0
PAGE_ENTRIES = 1000
FIRST_RELEASE_PAUSE_S = 0.001
LONGEST_RELEASE_PAUSE_S = 1.0

IN_ORDER = ("s3:", "gs:", "memory:")
"""Stores that list names in the order of their bytes, from any name on; others are listed by folders."""

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Where the environment may name an S3 server that is not Amazon's; the first that is set counts."""

_REFUSED = (
    PermissionDeniedError,
    UnauthenticatedError,
    NotSupportedError,
    InvalidPathError,
    UnknownConfigurationKeyError,
    NotImplementedError,
    ValueError,
)
_SAYS_NO = (
    "status code: 401",  # obstore gives listing no kinds of its own
    "status code: 403",
    "NoSuchBucket",
    "ContainerNotFound",
    "The specified bucket does not exist",
)
_NO_ROOM = ("QuotaExceeded", "StorageFull", "507 Insufficient Storage")


class ObjectStore(ChunkStore):
    """Get one by `open_store`.

    Args:
        url: for people.
        store: one of obstore's.
        timeout_s: longest time until a transfer is answered.
    """

    def __init__(self, url: str, store: Any, timeout_s: float) -> None:
        self.url = url
        self._store = store
        self._timeout_s = timeout_s
        self._keeps_buffers = url.startswith("memory:")
        self._lists_in_order = url.startswith(IN_ORDER)
        self._requests = asyncio.Semaphore(REQUESTS)
        self._copying = Threads("l2-copies", COPY_THREADS, timeout_s)
        self._under_way: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def open(cls, url: str, *, timeout_s: float) -> ObjectStore:
        """Build the store and ask it for one name.

        Raises:
            TierError: no such bucket, no rights, wrong credentials, no answer.
        """
        with _told(url):
            store = cls(url, _build(url, timeout_s), timeout_s)
        try:
            await asyncio.wait_for(store._look(), timeout_s)
        except asyncio.TimeoutError:
            await store.close(0.0)
            raise Unavailable(f"{url}: no answer in {timeout_s:g} s") from None
        except BaseException:
            await store.close(0.0)
            raise
        return store

    def put(self, name: str, parts: Sequence[memoryview]) -> Transfer[PutOutcome]:
        """See `ChunkStore`."""
        check_name(name)
        views = byte_views(parts)
        # obstore's own memory keeps what it is given, not a copy of it, and never lets go.
        payload = b"".join(views) if self._keeps_buffers else views
        transfer: Transfer[PutOutcome] = Transfer()
        self._start(transfer, self._put(name, payload, views, transfer))
        return transfer

    def get_into(
        self,
        name: str,
        targets: Sequence[memoryview],
        offset: int = 0,
        to_end: bool = True,
        observe: Observe | None = None,
    ) -> Transfer[None]:
        """See `ChunkStore`."""
        check_name(name)
        views = byte_views(targets, writable=True)
        transfer: Transfer[None] = Transfer()
        self._start(transfer, self._get(name, views, offset, to_end, observe, transfer))
        return transfer

    async def head(self, name: str) -> Entry | None:
        """See `ChunkStore`."""
        check_name(name)
        try:
            with _told(name):
                meta = await obstore.head_async(self._store, name)
        except NotThere:
            return None
        return _entry(meta)

    async def delete(self, names: Sequence[str]) -> None:
        """See `ChunkStore`."""
        checked = [check_name(name) for name in names]
        for first in range(0, len(checked), PAGE_ENTRIES):
            with contextlib.suppress(NotThere), _told(checked[first]):
                await obstore.delete_async(self._store, checked[first : first + PAGE_ENTRIES])

    async def quarantine(self, name: str) -> None:
        """See `ChunkStore`."""
        kept = kept_name(name)
        with contextlib.suppress(NotThere), _told(name):
            # A copy and then a delete: who fails between them leaves both, and the next try makes another copy.
            await obstore.rename_async(self._store, name, kept)

    async def folders(self, prefix: str = "") -> builtins.list[str]:
        """See `ChunkStore`."""
        with _told(check_prefix(prefix) or self.url):
            found = await obstore.list_with_delimiter_async(self._store, prefix or None)
        return sorted(filter(is_name, found["common_prefixes"]))

    async def list(self, prefix: str = "") -> AsyncIterator[Entry]:
        """See `ChunkStore`."""
        with _told(check_prefix(prefix) or self.url):
            pages = obstore.list(self._store, prefix or None, chunk_size=PAGE_ENTRIES)
            async for page in pages:
                for meta in page:
                    if is_name(meta["path"]):
                        yield _entry(meta)

    async def list_beginning(self, start: str) -> AsyncIterator[Entry]:
        """See `ChunkStore`. Begins behind all names that are less, and ends with the first that is more."""
        if not self._lists_in_order:
            async for entry in super().list_beginning(start):
                yield entry
            return
        folder = check_prefix(start.rpartition("/")[0])
        with _told(folder or self.url):
            pages = obstore.list(self._store, folder or None, offset=start, chunk_size=PAGE_ENTRIES)
            async for page in pages:
                for meta in page:
                    if not meta["path"].startswith(start):
                        return
                    if is_name(meta["path"]):
                        yield _entry(meta)

    async def close(self, timeout_s: float) -> bool:
        """See `ChunkStore`."""
        self._closed = True
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=timeout_s)
        drained = not self._under_way
        return await self._copying.close(timeout_s if drained else 0.0) and drained

    # --- a transfer's life ---

    def _start(self, transfer: Transfer[Any], work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            transfer.fail(Unavailable(f"{self.url} is closed"))
            transfer.end()
            return
        loop = asyncio.get_running_loop()
        late = Unavailable(f"{self.url}: not done after {self._timeout_s:g} s")
        timer = loop.call_later(self._timeout_s, transfer.fail, late)
        task = loop.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(lambda _task: timer.cancel())
        task.add_done_callback(self._under_way.discard)

    async def _put(
        self,
        name: str,
        payload: bytes | Sequence[memoryview],
        views: Sequence[memoryview],
        transfer: Transfer[PutOutcome],
    ) -> None:
        try:
            async with self._requests:
                transfer.succeed(await self._put_once(name, payload))
        except asyncio.CancelledError:
            raise  # the loop ends; the library may go on, so it is never over
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            transfer.fail(_unexpected(error))
        await _let_go(views)
        transfer.end()

    async def _put_once(self, name: str, payload: bytes | Sequence[memoryview]) -> PutOutcome:
        try:
            with _told(name, missing=Refused):
                try:
                    await asyncio.shield(
                        asyncio.ensure_future(
                            obstore.put_async(
                                self._store, name, payload, mode="create", use_multipart=False
                            )
                        )
                    )
                except (AlreadyExistsError, PreconditionError):
                    return PutOutcome.ALREADY_THERE
        except Refused as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise Refused(f"{self.url}: no such bucket or container") from None
            raise
        return PutOutcome.WRITTEN

    async def _get(
        self,
        name: str,
        targets: Sequence[memoryview],
        offset: int,
        to_end: bool,
        observe: Observe | None,
        transfer: Transfer[None],
    ) -> None:
        total = sum(target.nbytes for target in targets)
        size = offset + total if to_end else None
        ranges = [
            (offset + first, min(first + RANGE_BYTES, total) + offset)
            for first in range(0, total, RANGE_BYTES)
        ]
        done = await asyncio.gather(
            *(self._get_range(name, part, size, targets, offset) for part in ranges),
            return_exceptions=True,
        )
        errors = [_unexpected(item) for item in done if item is not None]
        error = await self._explain(name, errors, offset + total)
        if error is None and observe is not None:
            error = await self._show(targets, observe)
        if error is None:
            transfer.succeed(None)
        else:
            transfer.fail(error)
        await _let_go(targets)
        transfer.end()

    async def _get_range(
        self,
        name: str,
        part: tuple[int, int],
        size: int | None,
        targets: Sequence[memoryview],
        offset: int,
    ) -> None:
        """One range of the object into its place in the targets.

        Args:
            size: what the object must have; None for no less than the range needs.
        """
        async with self._requests:
            with _told(name):
                answer = await asyncio.shield(
                    asyncio.ensure_future(
                        obstore.get_async(self._store, name, options={"range": part})
                    )
                )
                found = answer.meta["size"]
                if found != size if size is not None else found < part[1]:
                    raise Corrupt(f"{name} has {found} bytes instead of {size or part[1]}")
                received = await asyncio.shield(asyncio.ensure_future(answer.buffer_async()))
            if len(received) != part[1] - part[0]:
                raise Corrupt(f"{name}: {len(received)} bytes came instead of {part[1] - part[0]}")
            copying = self._copying.submit(partial(_scatter, received, targets, part[0] - offset))
            await copying.wait_until_over()
            await copying

    async def _explain(
        self, name: str, errors: Sequence[BaseException], least: int
    ) -> BaseException | None:
        """The one error to tell of several. A range behind the object's end is a generic error of most servers."""
        for kind in (Corrupt, NotThere, Refused):
            for error in errors:
                if isinstance(error, kind):
                    return error
        if not errors:
            return None
        with contextlib.suppress(TierError):
            entry = await self.head(name)
            if entry is not None and entry.nbytes < least:
                return Corrupt(f"{name} has {entry.nbytes} bytes, fewer than {least}")
        return errors[0]

    async def _show(self, targets: Sequence[memoryview], observe: Observe) -> BaseException | None:
        """Let the observer see what has arrived; returns what it raises."""
        showing = self._copying.submit(partial(_show_each, targets, observe))
        await showing.wait_until_over()
        try:
            await showing
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's
            return _unexpected(error)
        return None

    async def _look(self) -> None:
        async for _ in self.list():
            return


def _build(url: str, timeout_s: float) -> Any:
    """obstore's store for the URL; whatever else it needs is in the environment."""
    if url.startswith("memory:"):
        return from_url("memory:///")
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
        },
        "retry_config": {
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=timeout_s),
        },
    }
    if url.startswith("s3:"):
        endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")
        plain = urllib.parse.urlsplit(endpoint).scheme == "http"
        if plain:
            options["client_options"]["allow_http"] = True
        options["config"] = {"unsigned_payload": not plain}
        if endpoint:
            options["config"]["endpoint"] = endpoint
    return from_url(url, **options)


def _entry(meta: Any) -> Entry:
    modified = meta["last_modified"].timestamp()
    return Entry(meta["path"], meta["size"], modified, used=modified)


def _scatter(received: Any, targets: Sequence[memoryview], place: int) -> None:
    """Copy to byte `place` of the targets on; the GIL is free meanwhile."""
    source = np.frombuffer(received, np.uint8)
    for target in targets:
        if place < target.nbytes:
            count = min(target.nbytes - place, source.nbytes)
            np.copyto(np.frombuffer(target, np.uint8)[place : place + count], source[:count])
            source = source[count:]
            place = 0
        else:
            place -= target.nbytes
        if not source.nbytes:
            return


def _show_each(targets: Sequence[memoryview], observe: Observe) -> None:
    for target in targets:
        observe(target)


def _unexpected(error: BaseException) -> BaseException:
    """The error; one that is none of the tier's is a fault of ours or the library's, and is logged."""
    if not isinstance(error, TierError):
        logger.error("an object store failed", exc_info=error)
    return error


async def _let_go(views: Sequence[memoryview]) -> None:
    """Until nobody else holds on to the views."""
    pause = FIRST_RELEASE_PAUSE_S
    for view in views:
        while True:
            try:
                view.release()
                break
            except BufferError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RELEASE_PAUSE_S)


@contextlib.contextmanager
def _told(what: str, missing: type[TierError] = NotThere) -> Iterator[None]:
    """obstore's errors become errors of the tier."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing(f"{what}: {_line(error)}") from error
    except (BaseError, NotImplementedError, ValueError, OSError) as error:
        if isinstance(error, (AlreadyExistsError, PreconditionError)):
            raise
        line = _line(error)
        if any(word in str(error) for word in _NO_ROOM):
            raise Full(f"{what}: {line}") from None
        if isinstance(error, _REFUSED) or any(word in str(error) for word in _SAYS_NO):
            raise Refused(f"{what}: {line}") from None
        raise Unavailable(f"{what}: {line}") from None


def _line(error: BaseException) -> str:
    """An error in one line, without what stands behind a URL's ? (signatures, tokens)."""
    text = " ".join(str(error).partition("Debug source")[0].split())
    return re.sub(r"\?[^\s>]+", "?...", text)[:300]
