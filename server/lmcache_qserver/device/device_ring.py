"""A ring on a device, as the daemon's lanes see it: a RingSource whose work another process does.

    lane's thread ──socket──▶ ring's thread in the device's process

The lane asks and waits, so its order is the ring's. When the process ends, the lane waits until the kernel has taken it
away: until then transfers may go on into the pool, and the lane's job may not be over.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lmcache_qprotocol.errors import RequestError
from lmcache_qserver.copying.chunk_copy import ChunkCopy, StampFault
from lmcache_qserver.copying.ring_geometry import RingGeometry
from lmcache_qserver.device.api import DeviceError
from lmcache_qserver.device.messages import (
    Copied,
    CopyChunks,
    Failed,
    Opened,
    OpenRing,
    PooledChunk,
    Reply,
    Request,
    decode_reply,
    receive_message,
    send_message,
)


class Process(Protocol):
    """The device's process, as far as a ring needs it.

    Attributes:
        lost: it has ended, or is being killed.
        why: what it said before it ended.
    """

    lost: bool
    why: str

    def kill(self) -> None:
        """Kill it; its rings are lost. On the loop."""


class DeviceRing:
    """See the head of this file.

    Args:
        process: its device's.
        connection: the lane's end, blocking; this object closes it.
        life: reading end of the process's life pipe; this object closes it.
        kind: of the ring, names the device until it is known.
        nbytes, handle: of the ring's memory.
    """

    def __init__(
        self,
        process: Process,
        connection: socket.socket,
        life: int,
        kind: str,
        nbytes: int,
        handle: bytes,
    ) -> None:
        self.claimed = False
        self.nbytes = nbytes
        self.device = kind
        self._process = process
        self._connection = connection
        self._life = life
        self._handle = handle

    @property
    def closed(self) -> bool:
        """See `RingSource`."""
        return self._life < 0

    @property
    def lost(self) -> bool:
        """See `RingSource`."""
        return self._process.lost

    def abort(self) -> None:
        """Kill the device's process: nothing else ends a copy that hangs."""
        self._process.kill()

    def open(self, geometry: RingGeometry) -> None:
        """See `RingSource`.

        Raises:
            DeviceError: the device, or its process, does not work.
        """
        geometry.check(self.nbytes)
        reply = self._ask(
            OpenRing(
                geometry.num_blocks,
                geometry.block_bytes,
                geometry.block_size,
                geometry.stamps_offset,
                self.nbytes,
                self._handle,
            )
        )
        assert isinstance(reply, Opened)
        self.device = reply.device

    def copy(self, chunks: Sequence[ChunkCopy], event: bytes) -> StampFault | None:
        """See `RingSource`.

        Raises:
            DeviceError: the device, or its process, does not work; nothing is being copied any more.
        """
        pooled = [
            PooledChunk(
                np.array(chunk.block_ids, np.int32).tobytes(),
                chunk.first_stamp,
                chunk.offset,
                chunk.skip,
                chunk.rows,
                chunk.layers,
            )
            for chunk in chunks
        ]
        reply = self._ask(CopyChunks(pooled, event))
        assert isinstance(reply, Copied)
        return None if reply.fault is None else StampFault(*reply.fault)

    def close(self) -> None:
        """See `RingSource`; returns when the other side has given everything back, or is gone."""
        if self.closed:
            return
        if self.claimed:
            try:
                self._connection.shutdown(socket.SHUT_WR)
                while self._connection.recv(1 << 12):
                    pass  # an answer that nobody has waited for
            except OSError:
                pass  # it is gone, and all that it had with it
        self._connection.close()
        life, self._life = self._life, -1
        os.close(life)

    def _ask(self, request: Request) -> Reply:
        try:
            send_message(self._connection, request)
            data = receive_message(self._connection)
        except OSError:
            data = None
        if data is None:
            self._wait_until_gone()
            raise DeviceError(
                f"the process of the device has ended{self._process.why}", sticky=True
            )
        reply = decode_reply(data)
        if isinstance(reply, Failed):
            if reply.code is not None:
                raise RequestError(reply.code, reply.message)
            raise DeviceError(reply.message)
        return reply

    def _wait_until_gone(self) -> None:
        poll = select.poll()
        poll.register(self._life, select.POLLIN)  # and hang-up, which is what comes
        poll.poll()
