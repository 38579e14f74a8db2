"""A server of a few lines, whose answers a test scripts: ROUTER and lifeline in one thread."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from lmcache_qprotocol.codec import Request, decode_request, encode_error, encode_result
from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.lifeline import (
    MAX_PACKET_BYTES,
    Accepted,
    Attach,
    Attached,
    Packet,
    Refused,
    decode_packet,
    encode_packet,
)
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import PROTOCOL_VERSION, HelloReply, ReplyMeta
from tests.worker_client.link.memory import sealed_memory


class Silence(Exception):
    """Raised by an answer that does not come."""


Answer = Callable[[Request], Any]


class FakeServer:
    """Runs until `stop`.

    Args:
        url: the port of an earlier one, to follow it.
        lifeline: path of the Unix socket; None for none.

    Attributes:
        answers: what to do per operation's name; returns the result, or raises RequestError or Silence.
        requests: what came, (name, payloads).
        held: raw replies that `hold` kept back.
    """

    def __init__(self, url: str = "tcp://127.0.0.1:*", lifeline: Path | None = None) -> None:
        self.boot_id = os.urandom(16)
        self.limits = Limits()
        self.answers: dict[str, Answer] = {
            "hello": lambda request: self._hello(),
            "ping": lambda request: True,
            "noop": lambda request: "OK",
            "get_chunk_size": lambda request: 256,
        }
        self.packet_answer: Callable[[Packet], Packet] = lambda packet: Accepted()
        self.requests: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.held: deque[list[bytes]] = deque()
        self.holding = False
        self.lifelines: list[socket.socket] = []
        self.offered: deque[int] = deque()
        self.pool_fd = sealed_memory(4096)
        self._greeted: set[bytes] = set()
        self._lifeline_path = lifeline
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(url)
        self.url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._listener: socket.socket | None = None
        if lifeline is not None:
            lifeline.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(str(lifeline))
            self._listener.listen()
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # --- for the test ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Vanish, as a killed process does."""
        if self._thread.is_alive():
            self._ours.send(b"q")
            self._thread.join()
        self._ours.close()
        self._theirs.close()

    def release_held(self) -> None:
        """Send the replies that were kept back, late."""
        self._ours.send(b"r")

    def hang_up(self) -> None:
        """Close all lifelines."""
        self._ours.send(b"h")

    # --- its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._theirs, zmq.POLLIN)
        if self._listener is not None:
            poller.register(self._listener, zmq.POLLIN)
        running = True
        while running:
            ready = dict(poller.poll())
            for item in ready:
                if item is self._router:
                    self._serve_request(self._router.recv_multipart())
                elif item == self._theirs.fileno():
                    running = self._obey(self._theirs.recv(1), poller)
                elif self._listener is not None and item == self._listener.fileno():
                    lifeline, _ = self._listener.accept()
                    self.lifelines.append(lifeline)
                    poller.register(lifeline, zmq.POLLIN)
                else:
                    self._serve_packet(item, poller)
        self._close_all()

    def _obey(self, command: bytes, poller: zmq.Poller) -> bool:
        if command == b"r":
            while self.held:
                self._router.send_multipart(self.held.popleft())
        if command == b"h":
            for lifeline in self.lifelines:
                poller.unregister(lifeline)
                lifeline.close()
            self.lifelines.clear()
        return command != b"q"

    def _close_all(self) -> None:
        for lifeline in self.lifelines:
            lifeline.close()
        if self._listener is not None:
            self._listener.close()
        for fd in self.offered:
            os.close(fd)
        os.close(self.pool_fd)
        self._router.close()
        self._context.term()

    def _hello(self) -> HelloReply:
        return HelloReply(
            protocol_version=PROTOCOL_VERSION,
            boot_id=self.boot_id,
            session=os.urandom(16),
            features=("transfer_query",),
            chunk_size=256,
            limits=self.limits,
            lifeline="" if self._lifeline_path is None else str(self._lifeline_path),
        )

    def _serve_request(self, message: list[bytes]) -> None:
        identity, *frames = message
        request = decode_request(frames)
        name = request.operation.name
        self.requests.append((name, request.payloads))
        if name == "hello":
            self._greeted.add(identity)
        meta = ReplyMeta(self.boot_id) if identity in self._greeted else None
        try:
            result = self.answers[name](request)
            reply = [*map(bytes, encode_result(request.uid, request.op_frame, result, meta))]
        except Silence:
            return
        except RequestError as error:
            failed = ReplyMeta(self.boot_id, error.code, error.message)
            reply = [*encode_error(request.uid, request.op_frame, failed)]
        if self.holding:
            self.held.append([identity, *reply])
        else:
            self._router.send_multipart([identity, *reply])

    def _serve_packet(self, fd: int, poller: zmq.Poller) -> None:
        lifeline = next(item for item in self.lifelines if item.fileno() == fd)
        data, fds, _, _ = socket.recv_fds(lifeline, MAX_PACKET_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        self.offered.extend(fds)
        if not data:
            poller.unregister(lifeline)
            self.lifelines.remove(lifeline)
            lifeline.close()
            return
        packet = decode_packet(data)
        answer = self.packet_answer(packet)
        if isinstance(packet, Attach) and not isinstance(answer, Refused):
            attached = encode_packet(Attached(pool_bytes=4096))
            socket.send_fds(lifeline, [attached], [self.pool_fd])
        else:
            lifeline.send(encode_packet(answer))
