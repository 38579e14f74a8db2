"""rtt_vs_raw: a ping's round trip against a bare ZeroMQ echo, by the same plain DEALER, in alternation. p50."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe

import zmq

from benchmarks.samples import interleaved
from lmcache_qprotocol.codec import encode, encode_request
from lmcache_qprotocol.operations import PING
from lmcache_qserver.testing.daemon import RunningDaemon


def _echo(pipe: Pipe) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        frames = socket.recv_multipart()
        socket.send_multipart(frames)


@contextlib.contextmanager
def _echo_port() -> Iterator[int]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_echo, args=(theirs,), daemon=True
    )
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def measure(server: RunningDaemon, rounds: int = 4000) -> dict[str, float]:
    """p50 of both in microseconds, and ours divided by theirs."""
    context = zmq.Context()
    with (
        _echo_port() as port,
        context.socket(zmq.DEALER) as ours,
        context.socket(zmq.DEALER) as raw,
    ):
        ours.connect(server.url)
        raw.connect(f"tcp://127.0.0.1:{port}")
        frames = encode_request(encode(1), PING, [None])

        def trip(socket: zmq.Socket[bytes]) -> None:
            socket.send_multipart(frames)
            socket.recv_multipart()

        for _ in range(200):
            trip(ours)
            trip(raw)
        pairs = interleaved(lambda _: trip(ours), lambda _: trip(raw), rounds)
    context.destroy(linger=0)
    ping_s = statistics.median(pair[0] for pair in pairs)
    raw_s = statistics.median(pair[1] for pair in pairs)
    return {"ping_us": ping_s * 1e6, "raw_us": raw_s * 1e6, "ratio": ping_s / raw_s}
