"""Stores of a worker that its server can't reach: a thread of its own gathers ring blocks and uploads them.

    engine's thread ── submit ─▶ queue ─▶ sender's thread ── gathers rows, then stamps ─▶ future of the store's end

The engine's thread does nothing but put a store into the queue. Each store in the queue holds ring blocks, so the ring
bounds it. A store's future is done when the sender reads its blocks no more, whatever came of it.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.connection import Connection
from lmcache_qclient.link.upload import Bytes, Payload, Uploader
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RangeKey, StoreOutcome, StoreProof, StoreResult
from lmcache_qprotocol.reasons import LossReason

JOIN_S = 1.0

StoreFuture = concurrent.futures.Future[StoreResult]


class _Queued(NamedTuple):
    payload: Payload
    future: StoreFuture


class InlineSender:
    """Uploads stores in the order in which they are submitted. Its thread starts with the first.

    Args:
        connection: open; the sender never closes it.
        timeout_s: for every answer, seconds.
        is_healthy: whether the server is there; nothing is sent while it is not.
    """

    def __init__(
        self, connection: Connection, timeout_s: float, is_healthy: Callable[[], bool]
    ) -> None:
        self._uploader = Uploader(connection, timeout_s)
        self._is_healthy = is_healthy
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def submit(
        self,
        key: RangeKey,
        instance_id: int | str,
        proof: StoreProof,
        ring: QRingBuffer,
        blocks: Sequence[int],
    ) -> StoreFuture:
        """Queue a store; for the engine's thread, never waits.

        Args:
            blocks: that hold the rows of `key`; the caller's again when the future is done.

        Returns:
            A future as `RequestLink.submit` gives one.
        """
        future: StoreFuture = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        if self._closed or os.getpid() != self._pid:
            future.set_exception(ConnectionError("the sender of this worker has ended"))
            return future
        rows = RingRows(ring, blocks, key.start, key.end)
        payload = Payload(key, instance_id, proof, rows.gather, rows.stamps)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="lmcache-q-inline-sender", daemon=True
            )
            self._thread.start()
        self._queue.put(_Queued(payload, future))
        return future

    def close(self) -> None:
        """Send nothing more: what is queued fails. The store under way ends with its connection. Idempotent."""
        self._closed = True
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the thread a little; call it when the connection is closed."""
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._send(item)
            del item  # it would hold the ring while the thread waits

    def _send(self, item: _Queued) -> None:
        try:
            if self._closed or not self._is_healthy():
                raise ConnectionError("the server is not there")
            end = self._uploader.begin(item.payload)
        except Exception as error:  # noqa: BLE001 - it is the store's
            _fail(item.future, error)
            return
        if isinstance(end, StoreResult):
            item.future.set_result(end)
        else:
            end.add_done_callback(partial(_end, item.future))


class RingRows:
    """The rows and stamps of one store, where they lie in a ring in host memory.

    Args:
        blocks: in order of position; the first holds position `start`.
        start, end: absolute positions.
    """

    def __init__(self, ring: QRingBuffer, blocks: Sequence[int], start: int, end: int) -> None:
        assert ring.memory is not None
        memory = ring.memory.array
        block_bytes = ring.num_layers * ring.block_size * ring.hidden_dim * ring.dtype.itemsize
        self._rows = memory[: ring.num_blocks * block_bytes].reshape(ring.num_blocks, block_bytes)
        stamps = memory[ring.stamps_offset :].view(np.int64)[: ring.num_blocks * ring.block_size]
        self._stamps = stamps.reshape(ring.num_blocks, ring.block_size)
        self._blocks = tuple(blocks)
        skip = start % ring.block_size
        self._own = slice(skip, skip + end - start)

    def gather(self, offset: int, out: Bytes) -> None:
        """Copy bytes from `offset` of the blocks, one behind the other, into `out`. Other threads run meanwhile."""
        size = self._rows.shape[1]
        done = 0
        while done < len(out):
            index, begin = divmod(offset + done, size)
            count = min(len(out) - done, size - begin)
            row = self._rows[self._blocks[index]]
            np.copyto(out[done : done + count], row[begin : begin + count])
            done += count

    def stamps(self) -> npt.NDArray[np.int64]:
        """Of the store's rows, as they are now."""
        return self._stamps[list(self._blocks)].reshape(-1)[self._own]


def _end(future: StoreFuture, answer: concurrent.futures.Future[StoreResult]) -> None:
    error = answer.exception()
    if error is not None:
        _fail(future, error)
    else:
        future.set_result(answer.result())


def _fail(future: StoreFuture, error: BaseException) -> None:
    """An upload that the server has given up is a copy that failed, as the server counts it."""
    if isinstance(error, RequestError) and error.code is ErrorCode.UNKNOWN_UPLOAD:
        outcome = StoreOutcome(refused={LossReason.COPY_FAILED: 1}, message=error.message)
        future.set_result(StoreResult(b"", False, outcome))
    else:
        future.set_exception(error)
