"""A worker or reader process of a run, as the driver sees it.

They are forked from a process that has imported all they need (multiprocessing's fork server): a new one takes
milliseconds, where importing torch takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.page import Page

ANSWER_S = 30.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.faults.worker", "tests.faults.reader"])


class Actor:
    """One process, which serves commands in order.

    Args:
        main: its function; called with its end of the pipe, the page's path, and `arguments`.
    """

    def __init__(self, main: Callable[..., None], page_path: Path, *arguments: Any) -> None:
        self.page = Page(page_path)
        self.page.clear()
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=main, args=(theirs, page_path, *arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self.waiting = 1
        """Answers that have not been taken."""
        self.first = self.answer()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, *command: Any) -> None:
        """Send a command; `answer` is the rest."""
        self._pipe.send(command)
        self.waiting += 1

    def answer(self) -> Any:
        """The next answer.

        Raises:
            AssertionError: it does not come in time.
        """
        assert self._pipe.poll(ANSWER_S), f"process {self.pid} does not answer"
        self.waiting -= 1
        return self._pipe.recv()

    def ask(self, *command: Any) -> Any:
        """A command and its answer."""
        self.begin(*command)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after SIGKILL, wait until it is dead."""
        os.kill(self.pid, number)
        if number is signal.SIGKILL:
            self.process.join(ANSWER_S)
            assert self.process.exitcode is not None, f"process {self.pid} survives SIGKILL"

    def close(self) -> None:
        """End it, gracefully if it lives."""
        self._pipe.close()
        if self.process.exitcode is None:
            self.process.join(ANSWER_S)
            if self.process.exitcode is None:
                self.process.kill()
                self.process.join()
        self.process.close()
        self.page.close()
