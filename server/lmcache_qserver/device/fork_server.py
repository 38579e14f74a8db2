"""The fork server: starts the processes of devices, kills them, and tells when they are gone.

A device's process writes into the pool, and the pool's seal (pool/memory.py) refuses every new writable mapping,
whoever asks: the only way to one is to inherit it by fork without exec. The daemon itself must not fork by then: it has
threads, and descriptors of everybody's memory. So this process is forked once, when there is nothing yet but the pool,
and forks the others.

    daemon ──socketpair──▶ fork server ──fork──▶ child (child.py)
       └─────────reads──── life pipe ◀──holds──┘

Nobody but the fork server holds the writing end of a child's life pipe, and it closes it when the kernel has taken the
child away: then, and not when the child's sockets close, no transfer of the device goes on into the pool.

Who outlives whom: the fork server ends when the daemon's end of its socket is closed; children end with it (they are
killed, or by PR_SET_PDEATHSIG), and when their own control socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lmcache_qserver.device.messages import (
    Kill,
    Start,
    decode_for_fork_server,
    encode,
    receive_packet,
)

PR_SET_PDEATHSIG = 1
END_S = 5.0

Child = Callable[[str, bytes, socket.socket, npt.NDArray[np.uint8]], None]
"""What a child does: kind, uuid, its control socket, the pool."""


class ForkServer:
    """The daemon's side. Make it before there are threads, on the main thread.

    Args:
        pool: the pool's memory, as the daemon writes it.

    Raises:
        OSError: the system has no process to give.
    """

    def __init__(self, pool: npt.NDArray[np.uint8]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemon = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = _fork()
        if not self.pid:
            _run(lambda: _serve(daemon, theirs, pool), close=ours)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._keys = 0

    def fileno(self) -> int:
        """Readable when the fork server has ended."""
        return self._socket.fileno()

    def start(self, kind: str, uuid: bytes, control: socket.socket, life: int) -> int:
        """Start a child; returns the key to kill it by. Never waits.

        Args:
            control: the child's end; it may be closed here afterwards.
            life: writing end of its life pipe; it has to be closed here afterwards.

        Raises:
            OSError: the fork server has ended, or is too busy.
        """
        self._keys += 1
        message = encode(Start(self._keys, kind, uuid))
        socket.send_fds(self._socket, [message], [control.fileno(), life])
        return self._keys

    def kill(self, key: int) -> None:
        """SIGKILL a child. Never waits.

        Raises:
            OSError: the fork server has ended, or is too busy.
        """
        self._socket.send(encode(Kill(key)))

    def close(self) -> None:
        """End it, and with it all children that are left. Waits a moment for it; blocks nobody for long."""
        self._socket.close()
        deadline = time.monotonic() + END_S
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(self.pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(0.005)


# --- the fork server's own process --------------------------------------------------------------------------------


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. NumPy's are the only ones, and nothing of them is used in a child.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run(work: Callable[[], None], close: socket.socket) -> None:
    """Do the work of a forked process, and end it: nothing of the parent's code may go on here."""
    code = 1
    try:
        close.close()
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - it ends here in any case
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _end_with(parent: int) -> None:
    """Be killed when the parent ends; and end now, if it has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _serve(daemon: int, connection: socket.socket, pool: npt.NDArray[np.uint8]) -> None:
    _end_with(daemon)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the daemon decides
    _Server(connection, pool).run()


class _Server:
    """The loop; one thread, no more."""

    def __init__(self, connection: socket.socket, pool: npt.NDArray[np.uint8]) -> None:
        self._connection = connection
        self._pool = pool
        self._pids: dict[int, int] = {}
        """Key → pid."""
        self._lives: dict[int, int] = {}
        """Pid → writing end of its life pipe."""
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        self._wake_end = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Until the daemon's end is closed."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap(os.WNOHANG)
            if self._connection.fileno() in ready and not self._take():
                break
        for pid in self._lives:
            os.kill(pid, signal.SIGKILL)
        self._reap(0)

    def _take(self) -> bool:
        """One packet; False at the end."""
        data, fds = receive_packet(self._connection)
        if not data:
            return False
        message = decode_for_fork_server(data)
        if isinstance(message, Kill):
            pid = self._pids.get(message.key)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)  # not reaped, so still the same process
        else:
            control, life = fds
            self._start(message, socket.socket(fileno=control), life)
        return True

    def _start(self, message: Start, control: socket.socket, life: int) -> None:
        server = os.getpid()
        try:
            pid = _fork()
        except OSError as error:
            print(f"lmcache-qserver: no process for a device: {error}", file=sys.stderr)
            control.close()
            os.close(life)
            return
        if not pid:
            _run(lambda: self._be_child(server, message, control, life), close=self._connection)
        control.close()
        self._pids[message.key] = pid
        self._lives[pid] = life

    def _be_child(self, server: int, message: Start, control: socket.socket, life: int) -> None:
        _end_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._wake.close()
        self._wake_end.close()
        for other in (life, *self._lives.values()):
            os.close(other)
        # Late: the fork server itself stays as small as it was.
        from lmcache_qserver.device.child import serve_device

        serve_device(message.kind, message.uuid, control, self._pool)

    def _reap(self, flags: int) -> None:
        while self._lives:
            pid, _ = os.waitpid(-1, flags)
            if not pid:
                return
            os.close(self._lives.pop(pid))
            self._pids = {key: other for key, other in self._pids.items() if other != pid}
