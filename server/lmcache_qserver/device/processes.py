"""The daemon's device processes: started with a device's first ring, watched, killed, and started again.

    (none) ──first ring──▶ STARTING ──Ready──▶ READY ──ends by itself, or is killed──▶ LOST
              ▲                └────Failed─────────────────────────────────────────────▲ │
              └──────────────── next ring ───────────────────────────────────────────────┘

All of it runs on the event loop, and nothing here waits: rings are handed over through sockets that hold them until the
process is there. A process is LOST from when its end is decided; `on_lost` comes when the kernel has taken it away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RingDescription
from lmcache_qserver.device.device_ring import DeviceRing
from lmcache_qserver.device.fork_server import ForkServer
from lmcache_qserver.device.messages import (
    Attach,
    Failed,
    decode_from_child,
    encode,
    receive_packet,
)
from lmcache_qserver.status_report import DeviceReport

logger = logging.getLogger(__name__)

MAX_PROCESSES = 32
"""At once; those that are being killed count."""


class DeviceProcess:
    """One device's process; only `DeviceProcesses` makes them.

    Attributes:
        name: as the process names its device; empty until it is ready.
        pid: 0 until it is ready.
        lost, why: see `device_ring.Process`.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        kind: str,
        uuid: bytes,
        loop: asyncio.AbstractEventLoop,
        on_gone: Callable[[DeviceProcess], None],
    ) -> None:
        self.kind, self.uuid = kind, uuid
        self.name, self.pid = "", 0
        self.lost, self.why = False, ""
        self._fork_server, self._loop, self._on_gone = fork_server, loop, on_gone
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.life, life = os.pipe()
        try:
            self._key = fork_server.start(kind, uuid, control, life)
        except OSError:
            self._control.close()
            os.close(self.life)
            raise
        finally:
            control.close()
            os.close(life)
        self._control.setblocking(False)
        loop.add_reader(self._control.fileno(), self._read)
        loop.add_reader(self.life, self._gone)

    def attach(self, ring: RingDescription) -> DeviceRing:
        """A ring of this device.

        Raises:
            OSError: the process does not take it.
        """
        assert ring.device is not None
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [encode(Attach())], [theirs.fileno()])
            life = os.dup(self.life)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        memory = ring.device
        return DeviceRing(self, ours, life, self.name or ring.kind, memory.nbytes, memory.handle)

    def kill(self) -> None:
        """Decide its end. Idempotent."""
        if not self.lost:
            logger.error("killing the process of device %s", self._label)
            self._lose()

    def close(self) -> None:
        """Dismiss it: it ends by itself, or with the fork server."""
        self.lost = True
        self._stop_reading()
        if self.life >= 0:
            self._loop.remove_reader(self.life)
            os.close(self.life)
            self.life = -1

    @property
    def _label(self) -> str:
        return self.name or self.uuid.hex()

    def _lose(self) -> None:
        self.lost = True
        with contextlib.suppress(OSError):  # the fork server is gone, and this one with it
            self._fork_server.kill(self._key)

    def _read(self) -> bool:
        """Hear what it says; False when there is nothing more to hear for now."""
        try:
            data, _ = receive_packet(self._control, 0)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # it left something unread; what it said comes behind this error
        except OSError:
            data = b""
        if not data:
            self._stop_reading()
            self._lose()  # in case that it only stumbled
            return False
        said = decode_from_child(data)
        if isinstance(said, Failed):
            self.why = f": {said.message}"
        else:
            self.name, self.pid = said.name, said.pid
            logger.info("device %s is served by process %d", self.name, self.pid)
        return True

    def _stop_reading(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()

    def _gone(self) -> None:
        while self._control.fileno() >= 0 and self._read():
            pass  # what it said last may be unread still
        self.close()
        logger.error("the process of device %s has ended%s", self._label, self.why)
        self._on_gone(self)


class DeviceProcesses:
    """See the head of this file.

    Args:
        fork_server: None: there are no devices here.
        kind: of rings that are served, besides those in host memory.
        on_lost: called on the loop when a process is gone: instances whose `ring.lost` is true have to go.
    """

    def __init__(
        self, fork_server: ForkServer | None, kind: str, on_lost: Callable[[], None]
    ) -> None:
        self.kinds = ("shm",) if fork_server is None else ("shm", kind)
        self._fork_server = fork_server
        self._on_lost = on_lost
        self._all: set[DeviceProcess] = set()
        self._current: dict[bytes, DeviceProcess] = {}

    def ring(self, description: RingDescription) -> DeviceRing:
        """A ring on a device; its process is started if need be. Never waits.

        Raises:
            RequestError: bad_payload, ring_refused or busy.
        """
        memory = description.device
        if memory is None:
            raise RequestError(
                ErrorCode.BAD_PAYLOAD,
                f"a ring of kind {description.kind} needs the handle of its memory in `device`",
            )
        try:
            return self._process(description.kind, memory.uuid).attach(description)
        except OSError as error:
            raise RequestError(
                ErrorCode.RING_REFUSED,
                f"the device's process can't be reached ({error}): try again",
            ) from None

    def report(self) -> list[DeviceReport]:
        """For /status."""
        return [
            DeviceReport(device=one.name, pid=one.pid, state=_state(one))
            for one in sorted(self._all, key=lambda one: (one.name, one.pid))
        ]

    def close(self) -> None:
        """End all processes, when no instance is left."""
        for process in tuple(self._all):
            process.close()
        self._all.clear()
        self._current.clear()
        if self._fork_server is not None:
            self._fork_server.close()

    def _process(self, kind: str, uuid: bytes) -> DeviceProcess:
        process = self._current.get(uuid)
        if process is not None and not process.lost:
            return process
        assert self._fork_server is not None
        if len(self._all) >= MAX_PROCESSES:
            raise RequestError(
                ErrorCode.BUSY, f"{MAX_PROCESSES} processes of devices are there already: try later"
            )
        loop = asyncio.get_running_loop()
        process = DeviceProcess(self._fork_server, kind, uuid, loop, self._gone)
        self._all.add(process)
        self._current[uuid] = process
        return process

    def _gone(self, process: DeviceProcess) -> None:
        self._all.discard(process)
        if self._current.get(process.uuid) is process:
            del self._current[process.uuid]
        self._on_lost()


def _state(process: DeviceProcess) -> str:
    if process.lost:
        return "lost"
    return "ready" if process.pid else "starting"
