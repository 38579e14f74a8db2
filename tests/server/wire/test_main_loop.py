"""The edge-triggered descriptor: what must be read although no wake-up comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from lmcache_qserver.testing.bare_client import BareClient
from lmcache_qserver.testing.daemon import wait_until
from lmcache_qserver.wire.counts import WireCounts
from lmcache_qserver.wire.main_loop import MESSAGES_PER_TURN, MainLoop


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
            lambda identity, frames: self.seen.append((identity, frames)),
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
