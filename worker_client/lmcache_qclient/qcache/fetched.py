"""Bytes of leased chunks that come in answers: the source of a reader that can't map the server's pool.

Some answers are asked for ahead, over the edges of chunks, so that the wire does not idle; what was asked for and not
read yet is bounded. A chunk is put together in a buffer, which is used again for the next one, and its rows go from
there where they belong.

The server answers only from a lease that holds, and keeps the bytes as they are until the last one has left. So an
answer proves its own bytes, whatever time it took.
"""

from __future__ import annotations

import concurrent.futures
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_qclient.link.connection import Connection
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qclient.qcache.copies import copy_all
from lmcache_qclient.qcache.source import ChunkRead
from lmcache_qprotocol.errors import ErrorCode, ProtocolError
from lmcache_qprotocol.operations import FETCH_Q

PART_BYTES = 2 << 20
"""A ping's answer waits behind the parts that are under way, so they are few and not long."""
PARTS_AHEAD = 4
ANY_OFFSET = 1 << 62


class _Part(NamedTuple):
    """Bytes [begin, end) of the chunk of a read."""

    read: ChunkRead
    begin: int
    end: int


class Fetched:
    """Reads leased chunks over a connection; for one thread at a time.

    Args:
        timeout_s: for every answer, seconds.
    """

    nbytes = ANY_OFFSET
    """Where a chunk lies in the server's pool is of no concern here."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._buffer: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def read(self, lease_id: int, reads: Sequence[ChunkRead], threads: int) -> None:
        """See `Source`."""
        parts = self._parts(reads)
        under_way: deque[tuple[_Part, ReplyFuture]] = deque()
        try:
            self._ask_ahead(lease_id, parts, under_way)
            while under_way:
                part, future = under_way.popleft()
                data = self._wait(future)
                self._ask_ahead(lease_id, parts, under_way)
                self._put(part, data)
                if part.end == part.read.chunk.nbytes:
                    self._finish(part.read, threads)
        finally:
            for _, future in under_way:
                self._connection.link.forget(future)

    def _parts(self, reads: Sequence[ChunkRead]) -> Iterator[_Part]:
        size = max(1, min(PART_BYTES, self._connection.hello.limits.bulk_bytes))
        for read in reads:
            for begin in range(0, read.chunk.nbytes, size):
                yield _Part(read, begin, min(begin + size, read.chunk.nbytes))

    def _ask_ahead(
        self,
        lease_id: int,
        parts: Iterator[_Part],
        under_way: deque[tuple[_Part, ReplyFuture]],
    ) -> None:
        while len(under_way) < PARTS_AHEAD and (part := next(parts, None)) is not None:
            payloads = (lease_id, part.read.place, part.begin, part.end - part.begin)
            under_way.append((part, self._connection.link.submit(FETCH_Q, payloads)))

    def _wait(self, future: ReplyFuture) -> memoryview:
        try:
            data: memoryview = future.result(self._timeout_s)
        except concurrent.futures.TimeoutError:
            if not self._connection.link.forget(future):
                return self._wait(future)  # the answer has come in this very moment
            raise ConnectionError(
                f"{self._connection.url} sent no bytes of a chunk within {self._timeout_s:g} s"
            ) from None
        return data

    def _put(self, part: _Part, data: memoryview) -> None:
        if len(data) != part.end - part.begin:
            raise ProtocolError(
                ErrorCode.BAD_PAYLOAD,
                f"the server sent {len(data)} bytes where {part.end - part.begin} were asked for",
            )
        if len(self._buffer) < part.read.chunk.nbytes:
            self._buffer = np.empty(part.read.chunk.nbytes, dtype=np.uint8)
        np.copyto(self._buffer[part.begin : part.end], np.frombuffer(data, dtype=np.uint8))

    def _finish(self, read: ChunkRead, threads: int) -> None:
        chunk_bytes = self._buffer[: read.chunk.nbytes]
        copy_all(read.copies(chunk_bytes), threads)
