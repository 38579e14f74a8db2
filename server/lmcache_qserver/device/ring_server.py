"""One ring in the device's process: requests come over its socket, one at a time, and each is answered."""

from __future__ import annotations

import socket

import numpy as np

from lmcache_qprotocol.errors import RequestError
from lmcache_qserver.copying.chunk_copy import ChunkCopy
from lmcache_qserver.copying.ring_geometry import RingGeometry
from lmcache_qserver.device.api import Bytes, DeviceApi, DeviceError
from lmcache_qserver.device.messages import (
    Copied,
    CopyChunks,
    Failed,
    Opened,
    OpenRing,
    PooledChunk,
    Reply,
    decode_request,
    receive_message,
    send_message,
)
from lmcache_qserver.device.ring_copy import RingCopy


def serve_ring(api: DeviceApi, connection: socket.socket, pool: Bytes) -> None:
    """Answer until the other end is closed, then give everything back, then close this end.

    Raises:
        DeviceError: the device context is lost: end the process, without closing anything.
    """
    api.enter_thread()
    server = _RingServer(api, pool)
    while (data := receive_message(connection)) is not None:
        request = decode_request(data)
        try:
            reply = server.open(request) if isinstance(request, OpenRing) else server.copy(request)
        except RequestError as error:
            reply = Failed(error.message, error.code)
        except DeviceError as error:
            if error.sticky:
                raise
            reply = Failed(str(error))
        send_message(connection, reply)
    server.close()
    connection.close()


class _RingServer:
    def __init__(self, api: DeviceApi, pool: Bytes) -> None:
        self._api = api
        self._pool = pool
        self._ring: RingCopy | None = None
        self._block_bytes = 0

    def open(self, request: OpenRing) -> Reply:
        geometry = RingGeometry(
            request.num_blocks, request.block_bytes, request.block_size, request.stamps_offset
        )
        self._block_bytes = geometry.block_bytes
        self._ring = RingCopy(self._api, geometry, request.nbytes, request.handle)
        self._ring.open()
        return Opened(self._api.name)

    def copy(self, request: CopyChunks) -> Reply:
        assert self._ring is not None, "the lane opens a ring first"
        fault = self._ring.copy([self._chunk(chunk) for chunk in request.chunks], request.event)
        if fault is None:
            return Copied(None)
        return Copied((fault.chunk, fault.row, fault.expected, fault.found))

    def close(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _chunk(self, chunk: PooledChunk) -> ChunkCopy:
        block_ids = tuple(np.frombuffer(chunk.block_ids, np.int32).tolist())
        nbytes = len(block_ids) * self._block_bytes
        return ChunkCopy(
            block_ids,
            chunk.first_stamp,
            self._pool[chunk.offset : chunk.offset + nbytes],
            skip=chunk.skip,
            rows=chunk.rows,
            layers=chunk.layers,
            offset=chunk.offset,
        )
