"""A device's process: its main thread takes rings in, and each ring is served by a thread of its own.

It fails as a whole. A lost device context, or a fault of this program, ends the process: the fork server tells the
daemon when it is really gone, and everything that it had mapped, pinned or queued goes with it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import numpy as np
import numpy.typing as npt

from lmcache_qserver.device.api import DeviceApi, DeviceError
from lmcache_qserver.device.messages import Failed, Ready, encode, receive_packet
from lmcache_qserver.device.ring_server import serve_ring

KINDS = ("cuda", "sim")
SIM_IDLE_S = 0.0005


def serve_device(
    kind: str, uuid: bytes, control: socket.socket, pool: npt.NDArray[np.uint8]
) -> None:
    """Serve the rings of one device until the daemon closes the control socket.

    Args:
        kind: of `KINDS`.
        uuid: of the device.
        pool: the pool's memory, writable.
    """
    try:
        api = make_api(kind, uuid)
        api.enter_thread()
        api.register_host(pool)
    except Exception as error:  # noqa: BLE001 - whatever it is, the daemon tells the worker
        control.send(encode(Failed(f"{type(error).__name__}: {error}"[:1024])))
        return
    control.send(encode(Ready(api.name, os.getpid())))
    while (packet := receive_packet(control, 1)).data:
        connection = socket.socket(fileno=packet.fds[0])
        threading.Thread(target=_serve, args=(api, connection, pool), daemon=True).start()
    os._exit(0)  # threads may be waiting for the device; nobody waits for them


def make_api(kind: str, uuid: bytes) -> DeviceApi:
    """The device's API in this process.

    Raises:
        DeviceError: there is no such device, or the package that talks to it is not installed.
    """
    if kind == "cuda":
        try:
            from lmcache_qserver.device.cuda_api import CudaApi
        except ImportError as error:
            raise DeviceError(
                f'the server needs cuda-bindings ({error}): pip install "lmcache-qserver[cuda]"'
            ) from None
        return CudaApi(uuid)
    from lmcache_qserver.device.sim_api import SimDevice
    from lmcache_qserver.device.sim_handles import resolve

    return SimDevice(int.from_bytes(uuid, "big"), resolve, idle=lambda: time.sleep(SIM_IDLE_S))


def _serve(api: DeviceApi, connection: socket.socket, pool: npt.NDArray[np.uint8]) -> None:
    try:
        serve_ring(api, connection, pool)
    except BaseException:  # noqa: BLE001 - a socket that closes with the process alive would mean "all is given back"
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(70)
