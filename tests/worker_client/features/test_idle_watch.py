"""Work between steps: it comes when steps stop, never beside one, and again for as long as it asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lmcache_qclient.features.idle_watch import IdleWatch

PATIENCE_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


class Work:
    """What is done between steps: notes its calls, and what `waits` says of the next ones."""

    def __init__(self, *waits: float | None) -> None:
        self.waits = list(waits)
        self.calls = 0

    def __call__(self) -> float | None:
        self.calls += 1
        return self.waits.pop(0) if self.waits else None


def test_the_work_is_done_once_the_steps_have_stopped() -> None:
    work = Work()
    watch = IdleWatch(work, idle_s=0.02)
    for _ in range(3):
        watch.step_begins()
        watch.step_ended()
    wait_until(lambda: work.calls == 1)
    watch.step_begins()
    watch.step_ended()
    wait_until(lambda: work.calls == 2)
    watch.stop()


def test_it_is_called_again_as_it_asks() -> None:
    work = Work(0.0, 0.001, 0.0)
    watch = IdleWatch(work, idle_s=0.001)
    watch.step_ended()
    wait_until(lambda: work.calls == 4 and watch._asleep)
    watch.stop()


def test_no_work_before_the_time_is_over() -> None:
    work = Work()
    watch = IdleWatch(work, idle_s=3600.0)
    watch.step_begins()
    watch.step_ended()
    wait_until(lambda: watch._thread is not None and watch._thread.is_alive())
    watch.stop()
    assert watch._thread is not None
    watch._thread.join(PATIENCE_S)
    assert work.calls == 0


def test_a_step_waits_for_the_portion_that_runs_and_no_other_begins_in_it() -> None:
    running, may_end = threading.Event(), threading.Event()
    calls: list[str] = []

    def work() -> float | None:
        calls.append("begins")
        running.set()
        may_end.wait(PATIENCE_S)
        calls.append("ends")
        return 0.0

    watch = IdleWatch(work, idle_s=0.001)
    watch.step_ended()
    assert running.wait(PATIENCE_S)
    stepped = threading.Event()

    def engine() -> None:
        watch.step_begins()
        calls.append("step")
        stepped.set()

    thread = threading.Thread(target=engine)
    thread.start()
    assert not stepped.wait(0.05), "the step began beside the work"
    may_end.set()
    assert stepped.wait(PATIENCE_S)
    thread.join()
    seen = len(calls)
    wait_until(lambda: watch._asleep)
    assert calls[-1] == "step", "the work went on inside a step"
    assert seen == len(calls)
    watch.stop()


def test_work_that_fails_is_tried_again_after_the_next_step() -> None:
    calls = []

    def work() -> float | None:
        calls.append(1)
        raise RuntimeError("on purpose")

    watch = IdleWatch(work, idle_s=0.001)
    watch.step_ended()
    wait_until(lambda: watch._asleep)
    watch.step_ended()
    wait_until(lambda: len(calls) == 2)
    watch.stop()


def test_nothing_is_called_after_stop() -> None:
    work = Work(0.0)
    watch = IdleWatch(work, idle_s=0.0)
    watch.stop()
    watch.step_ended()
    assert watch._thread is None
    assert work.calls == 0
    watch.stop()
