"""The probe tells how late it is woken, goes on, and stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from lmcache_qserver.face.loop_lag import LoopLag
from lmcache_qserver.testing.daemon import running_daemon, wait_until


class ManualLoop:
    """Timers that the test fires."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = 0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self.timers.append((delay_s, callback))
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def test_each_wake_up_is_compared_with_when_it_was_due() -> None:
    loop, now, seen = ManualLoop(), [100.0], list[float]()
    lag = LoopLag(cast(asyncio.AbstractEventLoop, loop), lambda: now[0], seen.append, 0.5)
    lag.start()
    for woken in (100.5, 101.25, 101.7):
        now[0] = woken
        delay_s, look = loop.timers[-1]
        assert delay_s == 0.5
        look()
    assert [round(one, 9) for one in seen] == [0.0, 0.25, 0.0], "never late by less than nothing"
    lag.stop()
    lag.stop()
    assert loop.cancelled == 1


async def test_a_blocked_loop_is_seen() -> None:
    loop = asyncio.get_running_loop()
    seen: asyncio.Queue[float] = asyncio.Queue()
    lag = LoopLag(loop, time.monotonic, seen.put_nowait, 0.01)
    lag.start()
    time.sleep(0.1)  # noqa: ASYNC251 - the fault that is to be seen
    late_s = await asyncio.wait_for(seen.get(), 10)
    lag.stop()
    assert 0.08 < late_s < 5


def test_the_daemon_looks() -> None:
    with running_daemon() as daemon:
        count = "lmcache_qserver_loop_lag_seconds_count"
        wait_until(lambda: daemon.metrics()[count] >= 3, "it looks again and again")
