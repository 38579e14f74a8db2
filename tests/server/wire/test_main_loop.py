"""The edge-triggered descriptor: what must be read although no wake-up comes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from lmcache_qserver.testing.bare_client import BareClient
from lmcache_qserver.testing.daemon import wait_until
from lmcache_qserver.wire.counts import WireCounts
from lmcache_qserver.wire.main_loop import BYTES_PER_TURN, MESSAGES_PER_TURN, MainLoop


class DeafLoop:
    """An event loop that never sees a descriptor become readable: only what is scheduled runs."""

    def __init__(self) -> None:
        self._scheduled: list[Callable[[], None]] = []

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        pass

    def remove_reader(self, fd: int) -> None:
        pass

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._scheduled.append(callback)

    def run_scheduled(self) -> None:
        scheduled, self._scheduled = self._scheduled, []
        for callback in scheduled:
            callback()


class Bench:
    def __init__(self) -> None:
        self.loop = DeafLoop()
        self.counts = WireCounts()
        self.seen: list[tuple[bytes, list[bytes]]] = []
        self.main_loop = MainLoop(
            cast(asyncio.AbstractEventLoop, self.loop),
            lambda identity, frames: self.seen.append((identity, [*map(bytes, frames)])),
            self.counts,
            max_frame_bytes=1 << 20,
            clock=time.monotonic,
        )
        self.client = BareClient(self.main_loop.bind("tcp://127.0.0.1:*"))

    def __enter__(self) -> Bench:
        self.main_loop.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.client.socket.close()
        self.main_loop.close()

    def first_message(self) -> bytes:
        """The client's routing identity; afterwards nothing is scheduled."""
        self.client.send([b"first"])
        wait_until(self._read_once, "the first message is there")
        self.loop.run_scheduled()
        self.loop.run_scheduled()
        return self.seen[0][0]

    def _read_once(self) -> bool:
        self.main_loop._read()
        return bool(self.seen)


def test_sending_looks_for_messages_whose_wake_up_it_has_consumed() -> None:
    with Bench() as bench:
        identity = bench.first_message()
        bench.client.send([b"second"])

        def answer_and_run() -> bool:
            bench.main_loop.send(identity, [b"answer"])
            bench.loop.run_scheduled()
            return len(bench.seen) == 2

        wait_until(answer_and_run, "the second message is read", deadline_s=5)


def test_a_turn_is_bounded_and_schedules_the_next() -> None:
    with Bench() as bench:
        bench.first_message()
        for _ in range(3 * MESSAGES_PER_TURN):
            bench.client.send([b"more"])
        turns = 0
        bench.main_loop._read()
        while len(bench.seen) < 1 + 3 * MESSAGES_PER_TURN:
            before = len(bench.seen)
            bench.loop.run_scheduled()
            if len(bench.seen) == before:
                bench.main_loop._read()  # the wake-up of messages that were still on their way
            assert len(bench.seen) - before <= MESSAGES_PER_TURN
            turns += 1
        assert turns >= 2


def test_an_answer_to_somebody_who_is_not_there_is_counted() -> None:
    with Bench() as bench:
        bench.first_message()
        bench.main_loop.send(b"nobody", [b"answer"])
        assert bench.counts.undeliverable == 1


def test_a_turn_ends_after_a_large_message() -> None:
    with Bench() as bench:
        bench.first_message()
        for _ in range(4):
            bench.client.send([b"x" * (BYTES_PER_TURN // 2)] * 2)
        while len(bench.seen) < 5:
            before = len(bench.seen)
            bench.main_loop._read()
            assert len(bench.seen) <= before + 1
            if len(bench.seen) > before:
                assert bench.loop._scheduled, "nobody would wake us for the rest"


def test_what_is_not_read_stays_with_its_sender() -> None:
    """Else one client that sends faster than we decode fills our memory."""
    bench = Bench()
    try:
        bench.client.socket.setsockopt(zmq.SNDHWM, 1)
        bench.client.socket.setsockopt(zmq.SNDTIMEO, 200)
        sent = 0
        with contextlib.suppress(zmq.Again):
            while sent < 400:
                bench.client.send([b"x" * (64 << 10)])
                sent += 1
        assert sent < 400, "megabytes stand in the sockets' own buffers, and few here"
    finally:
        bench.client.socket.close()
        bench.main_loop.close()


def test_answers_to_a_client_that_does_not_read_are_dropped_and_counted() -> None:
    """Else they fill our memory; a client's own limit of unanswered requests keeps an honest one far below."""
    with Bench() as bench:
        identity = bench.first_message()
        answer = [b"uid", b"op", b"x" * 4096]
        # The client's own queue takes 1,000, the sockets' buffers some megabytes more.
        for _ in range(12_000):
            bench.main_loop.send(identity, answer)
        assert bench.counts.undeliverable > 0


def test_binding_ipc_leaves_files_and_living_sockets_alone(tmp_path: Path) -> None:
    """ZeroMQ alone would remove either."""
    (tmp_path / "file").write_text("precious")
    first, second = Bench(), Bench()
    try:
        with pytest.raises(OSError, match="no socket"):
            second.main_loop.bind(f"ipc://{tmp_path}/file")
        assert (tmp_path / "file").read_text() == "precious"
        first.main_loop.bind(f"ipc://{tmp_path}/x.sock")
        with pytest.raises(OSError, match=r"another process answers.*--url"):
            second.main_loop.bind(f"ipc://{tmp_path}/x.sock")
    finally:
        for bench in (first, second):
            bench.client.socket.close()
            bench.main_loop.close()


def test_binding_ipc_replaces_a_stale_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "x.sock"))
    with Bench() as bench:
        bench.main_loop.bind(f"ipc://{tmp_path}/x.sock")
        with BareClient(f"ipc://{tmp_path}/x.sock") as client:
            client.send([b"hello"])
            wait_until(bench._read_once, "the message is there")
