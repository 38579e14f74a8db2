"""A proxy on loopback in front of a server: counts its requests, freezes it, cuts it off.

passing   ─ freeze ─▶ frozen: connections are accepted, what clients send is taken, nothing is answered
          ─ cut_put ─▶ passing until the next PUT; of that some bytes reach the server, then it is cut off
cut off   every connection is reset, and every new one
any       ─ pass_on ─▶ passing; what was held back goes on its way
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import urllib.parse
from collections.abc import Iterator

BUFFER_BYTES = 1 << 20
CUT_BYTES = 2000
"""Of a put that is cut: its head, and some of its body."""
_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.1\r\n")
_RESET = struct.pack("ii", 1, 0)


class TcpProxy:
    """Get one by `running_proxy`.

    Attributes:
        url: where it listens.
        requests: "METHOD target" of each, in the order in which they came.
    """

    def __init__(self, target: str) -> None:
        host = urllib.parse.urlsplit(target)
        assert host.hostname is not None
        assert host.port is not None
        self._target = (host.hostname, host.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[str] = []
        self._sockets: set[socket.socket] = set()
        self._passing = threading.Event()
        self._passing.set()
        self._cuts_put = False
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Answer nothing any more."""
        self._passing.clear()

    def cut_put(self) -> None:
        """Cut the server off in the middle of the next put."""
        self._cuts_put = True

    def cut_off(self) -> None:
        """Reset every connection, and every new one."""
        self._is_cut = True
        for one in tuple(self._sockets):
            _reset(one)

    def pass_on(self) -> None:
        """Be no more than a proxy."""
        self._cuts_put = self._is_cut = False
        self._passing.set()

    @property
    def is_cut(self) -> bool:
        """Whether the server is cut off."""
        return self._is_cut

    def count(self, method: str) -> int:
        """Requests with this method so far."""
        return sum(request.startswith(f"{method} ") for request in self.requests)

    def close(self) -> None:
        """End all of it; what was held back never arrives."""
        self.cut_off()
        self._passing.set()
        # A thread that waits in accept() is woken by this, not by close().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            self._sockets |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(
                    target=self._pump, args=(source, sink, source is client), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(BUFFER_BYTES):
                # Clients send a request when the one before is answered: each begins a read of ours.
                if is_client and (request := _REQUEST.match(data)):
                    self.requests.append(f"{request[1].decode()} {request[2].decode()}")
                    if self._cuts_put and request[1] == b"PUT":
                        sink.sendall(data[:CUT_BYTES])
                        self.cut_off()
                        return
                self._passing.wait()
                if self._is_cut:
                    break
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        if not is_client:
            for one in (source, sink):
                self._sockets.discard(one)
                one.close()


@contextlib.contextmanager
def running_proxy(target: str) -> Iterator[TcpProxy]:
    """A proxy in front of the server at this URL."""
    proxy = TcpProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        one.shutdown(socket.SHUT_RDWR)
    one.close()
