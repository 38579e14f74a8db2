"""A lane keeps order, ends in bounded time, and never says `over` while its thread is at work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.copying import Lane, LaneClosed, LaneHung, LaneTimeout

DEADLINE_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


class Held:
    """Work that waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.go.wait(DEADLINE_S)
        return "held"


async def test_order_is_kept_and_results_come_back() -> None:
    lane = Lane("lane-order")
    seen: list[int] = []

    def work(number: int) -> int:
        seen.append(number)
        return number * 2

    results = await asyncio.gather(
        *(lane.run(work, number, timeout_s=DEADLINE_S) for number in range(50))
    )
    assert seen == list(range(50))
    assert results == [number * 2 for number in range(50)]
    assert await lane.close(lambda: None, DEADLINE_S)


async def test_an_exception_is_the_callers_and_carries_no_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lane = Lane("lane-error")

    def work() -> None:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer")  # noqa: B904 - the context is what is looked at

    job = lane.submit(work, timeout_s=DEADLINE_S)
    await asyncio.wait({job.outcome})
    error = job.outcome.exception()
    assert isinstance(error, ValueError)
    assert error.__traceback__ is None
    assert error.__context__ is None
    assert "outer" in caplog.text, "the trace is in the log"
    assert await lane.run(lambda: 7, timeout_s=DEADLINE_S) == 7
    await lane.close(lambda: None, DEADLINE_S)


async def test_an_expected_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    lane = Lane("lane-refusal")

    def work() -> None:
        raise RequestError(ErrorCode.RING_REFUSED, "no")

    with pytest.raises(RequestError):
        await lane.run(work, timeout_s=DEADLINE_S)
    assert not caplog.records
    await lane.close(lambda: None, DEADLINE_S)


async def test_a_hung_job_times_out_and_is_over_only_when_it_returns() -> None:
    lane, held, never = Lane("lane-hung"), Held(), Held()
    job = lane.submit(held, timeout_s=0.05)
    behind = lane.submit(never, timeout_s=0.05)
    with pytest.raises(LaneTimeout):
        await job.outcome
    assert lane.hung
    assert not job.over.done()
    with pytest.raises(LaneHung):
        await behind.outcome
    assert behind.over.done(), "it was never begun, so its memory is free at once"
    with pytest.raises(LaneHung):
        lane.submit(held, timeout_s=0.05)
    held.go.set()
    await asyncio.wait_for(job.over, DEADLINE_S)
    assert not lane.hung
    assert not never.entered.is_set()
    assert await lane.run(lambda: "works again", timeout_s=DEADLINE_S) == "works again"
    await lane.close(lambda: None, DEADLINE_S)


async def test_a_jobs_time_begins_when_its_turn_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def record(delay: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return call_later(delay, *args, **more)

    monkeypatch.setattr(loop, "call_later", record)
    lane, first = Lane("lane-queue"), Held()
    slow = lane.submit(first, timeout_s=111.0)
    quick = lane.submit(lambda: "quick", timeout_s=222.0)
    assert timers == [111.0]
    first.go.set()
    assert await slow.outcome == "held"
    assert await quick.outcome == "quick"
    assert timers == [111.0, 222.0]
    await lane.close(lambda: None, DEADLINE_S)


async def test_a_job_that_hangs_behind_another_times_out_too() -> None:
    lane, first, second = Lane("lane-second"), Held(), Held()
    done = lane.submit(first, timeout_s=DEADLINE_S)
    job = lane.submit(second, timeout_s=0.05)
    first.go.set()
    assert await done.outcome == "held"
    with pytest.raises(LaneTimeout):
        await asyncio.wait_for(asyncio.shield(job.outcome), DEADLINE_S)
    second.go.set()
    await lane.close(lambda: None, DEADLINE_S)


async def test_another_lane_is_unaffected_by_a_hung_one() -> None:
    hung, other, held = Lane("lane-a"), Lane("lane-b"), Held()
    job = hung.submit(held, timeout_s=0.05)
    with pytest.raises(LaneTimeout):
        await job.outcome
    assert await other.run(lambda: 1, timeout_s=DEADLINE_S) == 1
    held.go.set()
    await hung.close(lambda: None, DEADLINE_S)
    await other.close(lambda: None, DEADLINE_S)


async def test_closing_does_what_is_queued_then_the_last_job_then_ends_the_thread() -> None:
    lane, seen = Lane("lane-close"), list[str]()
    for name in "abc":
        lane.submit(seen.append, name, timeout_s=DEADLINE_S)
    assert await lane.close(lambda: seen.append("last"), DEADLINE_S)
    assert seen == ["a", "b", "c", "last"]
    with pytest.raises(LaneClosed):
        lane.submit(seen.append, "d", timeout_s=1.0)
    await until(lambda: "lane-close" not in {thread.name for thread in threading.enumerate()})


async def test_cancelling_spares_the_running_and_the_last_job() -> None:
    lane, held, seen = Lane("lane-cancel"), Held(), list[str]()
    running = lane.submit(held, timeout_s=DEADLINE_S)
    await until(held.entered.is_set)
    waiting = lane.submit(seen.append, "waiting", timeout_s=DEADLINE_S)
    closing = asyncio.ensure_future(lane.close(lambda: seen.append("last"), DEADLINE_S))
    await asyncio.sleep(0)
    lane.cancel_waiting()
    with pytest.raises(LaneClosed):
        await waiting.outcome
    held.go.set()
    assert await running.outcome == "held"
    assert await closing
    assert seen == ["last"]


async def test_closing_a_lane_that_hangs_returns_false_and_the_last_job_still_comes() -> None:
    lane, held, seen = Lane("lane-late"), Held(), list[str]()
    job = lane.submit(held, timeout_s=0.05)
    closing = asyncio.ensure_future(lane.close(lambda: seen.append("last"), 0.2))
    assert not await closing
    assert lane.hung
    assert seen == []
    held.go.set()
    await asyncio.wait_for(lane.ended, DEADLINE_S)
    assert job.over.done()
    assert seen == ["last"]


async def test_a_caller_that_is_cancelled_does_not_disturb_the_lane() -> None:
    lane, held = Lane("lane-caller"), Held()
    task = asyncio.ensure_future(lane.run(held, timeout_s=DEADLINE_S))
    await until(held.entered.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.go.set()
    assert await lane.run(lambda: 3, timeout_s=DEADLINE_S) == 3
    await lane.close(lambda: None, DEADLINE_S)
