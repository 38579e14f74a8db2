"""loop_lag: how long the daemon's event loop lets a message wait, seen from outside.

A ping is answered on the loop at once, so the time that it takes beyond that of an idle loop's echo is the loop's lag.
The idle loop is uvloop in a process of its own, which answers the same messages over the same kind of socket; both are
asked in turns, under the same load:

    copies          two workers store 16 MiB chunks without a pause, which keeps both processors busy
    registrations   64 rings of 256 MiB each are registered, one after the other; nobody touches their pages
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import cast

import torch
import uvloop
import zmq

from benchmarks.samples import seconds
from benchmarks.worker import BLOCK, CHUNK, worker
from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.connection import Connection
from lmcache_qprotocol.codec import encode, encode_request
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.operations import PING
from lmcache_qserver.testing.daemon import RunningDaemon

RINGS = 64
RING_BYTES = 256 << 20


async def _echo(pipe: Pipe) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                socket.send_multipart(socket.recv_multipart(zmq.NOBLOCK), zmq.NOBLOCK)

    asyncio.get_running_loop().add_reader(cast(int, socket.getsockopt(zmq.FD)), answer)
    pipe.send(port)
    await asyncio.Event().wait()


def _echo_process(pipe: Pipe) -> None:
    uvloop.run(_echo(pipe))


def _worker_process(pipe: Pipe, url: str, number: int) -> None:
    with worker(url, 16, f"lag-{number}") as ours:
        pipe.send(None)
        index = 0
        while not pipe.poll():
            ours.store(ours.prepare(index))
            ours.settle()
            index += 1


@contextlib.contextmanager
def _process(target: Callable[..., None], *args: object) -> Iterator[tuple[Pipe, object]]:
    """A process that has said that it is ready, and what it said."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield ours, ours.recv()
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        process.join(2)
        process.terminate()
        process.join()


class Pings:
    """Round trips to the daemon and to the idle loop, in turns, on a thread of its own."""

    def __init__(self, url: str, port: object) -> None:
        self._urls = (url, f"tcp://127.0.0.1:{port}")
        self._stop = threading.Event()
        self.ours: list[float] = []
        self.idle: list[float] = []

    def __enter__(self) -> Pings:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        sockets = [context.socket(zmq.DEALER) for _ in self._urls]
        for socket, url in zip(sockets, self._urls, strict=True):
            socket.connect(url)
        frames = encode_request(encode(1), PING, [None])

        def trip(socket: zmq.Socket[bytes]) -> None:
            socket.send_multipart(frames)
            socket.recv_multipart()

        for socket in sockets:
            trip(socket)
        while not self._stop.wait(0.001):
            self.ours.append(seconds(lambda: trip(sockets[0])))
            self.idle.append(seconds(lambda: trip(sockets[1])))
        context.destroy(linger=0)

    def figures(self) -> dict[str, float]:
        """Milliseconds."""
        return {
            "p99_ms": _percentile(self.ours, 99),
            "idle_p99_ms": _percentile(self.idle, 99),
            "p99_above_idle_ms": _percentile(self.ours, 99) - _percentile(self.idle, 99),
            "max_ms": 1000 * max(self.ours),
            "idle_max_ms": 1000 * max(self.idle),
            "pings": float(len(self.ours)),
        }


def _percentile(times: list[float], percent: int) -> float:
    return 1000 * statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


def while_copying(server: RunningDaemon, duration_s: float) -> dict[str, float]:
    """Lag while two workers store without a pause."""
    with (
        _process(_echo_process) as (_, port),
        _process(_worker_process, server.url, 0),
        _process(_worker_process, server.url, 1),
        Pings(server.url, port) as pings,
    ):
        threading.Event().wait(duration_s)
    return pings.figures()


def while_registering(server: RunningDaemon) -> dict[str, float]:
    """Lag while 64 rings of 256 MiB are registered, and the seconds that it takes."""
    layout = Layout(
        feature="transfer_query",
        layer_ids=(0,),
        first_head=0,
        num_heads=32,
        total_heads=32,
        head_dim=128,
        dtype="bfloat16",
    )
    blocks = RING_BYTES // (BLOCK * layout.token_bytes)
    rings = [QRingBuffer(1, blocks, BLOCK, layout.hidden_dim, torch.bfloat16) for _ in range(RINGS)]
    adapters = []

    def register_all() -> None:
        for number, ring in enumerate(rings):
            adapter = QRingBufferAdapter(
                Connection.open(server.url, client="benchmark"),
                instance_id=f"many-{number}",
                model_name="many",
                world_size=1,
                rank=0,
                account=Account(),
            )
            adapter.establish_transfer_context(BLOCK)
            adapter.register_q_ring(ring, layout)
            adapters.append(adapter)

    with _process(_echo_process) as (_, port), Pings(server.url, port) as pings:
        taken = seconds(register_all)
    for adapter in adapters:
        adapter.shutdown_q_ring()
    for ring in rings:
        ring.close()
    assert CHUNK % BLOCK == 0
    return {"seconds": taken, **pings.figures()}
