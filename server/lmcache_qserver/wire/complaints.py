"""A log that a peer can't flood: one line per interval, and how many were left out."""

from __future__ import annotations

import logging
from typing import Any


class Complaints:
    """Warnings about peers.

    Args:
        logger: where they go.
        interval_s: at most one line in this time.
        level: of the lines.
    """

    def __init__(
        self, logger: logging.Logger, interval_s: float = 10.0, level: int = logging.WARNING
    ) -> None:
        self._level = level
        self._logger = logger
        self._interval_s = interval_s
        self._next = float("-inf")
        self._left_out = 0

    def say(self, text: str, now: float, **more: Any) -> None:
        """Log the text, or count it as left out.

        Args:
            more: for the logger: `extra`, `exc_info`.
        """
        if now < self._next:
            self._left_out += 1
            return
        others = f" ({self._left_out} more like it were not logged)" if self._left_out else ""
        self._logger.log(self._level, "%s%s", text, others, **more)
        self._next = now + self._interval_s
        self._left_out = 0
