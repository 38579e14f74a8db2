"""Work between steps: when no step has come for a while, somebody still has to store what ended last.

An engine inside its user's process runs no step after its last request has ended. So a thread of ours does then what
the next step would have done. It takes turns with the engine's thread:

    step_begins ──▶ IN A STEP ──step_ended──▶ BETWEEN STEPS ──idle_s later──▶ on_idle(), again after what it returns
         ▲                                          │
         └──────────────────────────────────────────┘

Invariant: `on_idle` runs only between steps, and `step_begins` returns only when it does not run: the engine waits at
most for one call of it, so a call does a small portion and asks to be called again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

IDLE_S = 0.5


class IdleWatch:
    """See the head of this file.

    Args:
        on_idle: a portion of work; returns seconds until the next one, or None when nothing is left until a step has
            come. What it raises is logged and ends the work until then.
        idle_s: between the last step's end and the first call.
    """

    def __init__(self, on_idle: Callable[[], float | None], idle_s: float = IDLE_S) -> None:
        self._on_idle = on_idle
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._in_step = False
        self._due: float | None = None  # of the next call, if the steps stop
        self._asleep = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def step_begins(self) -> None:
        """Called by the engine's thread before a step."""
        # Before it waits, so that the thread, which may get the lock again first, begins no other portion.
        self._in_step = True
        with self._changed:
            pass

    def step_ended(self) -> None:
        """Called by the engine's thread after a step."""
        with self._changed:
            self._in_step = False
            self._due = time.monotonic() + self._idle_s
            if self._asleep:
                self._changed.notify()
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run, name="lmcache-q-idle", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """`on_idle` is called no more; waits for the call that runs. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                if self._in_step or self._due is None:
                    self._asleep = True
                    self._changed.wait()
                    self._asleep = False
                    continue
                left = self._due - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._work()

    def _work(self) -> None:
        try:
            again = self._on_idle()
        except Exception:
            logger.exception("work between steps failed; it goes on after the next step")
            again = None
        self._due = None if again is None else time.monotonic() + again
