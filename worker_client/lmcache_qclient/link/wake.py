"""A descriptor that one thread polls and any other sets off."""

from __future__ import annotations

import contextlib
import os
import threading


class Wake:
    """An eventfd. `set` does not wait for anybody and may be called from any thread, after `close` too."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.Lock()
        """A descriptor's number is given to others once it is closed: nobody may write to it then."""

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it unreadable again; look for work *after* this, so that no wake-up is lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor; the polling thread has ended by then."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
