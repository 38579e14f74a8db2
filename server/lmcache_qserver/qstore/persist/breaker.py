"""Whether something that keeps failing is tried again now.

    CLOSED ── `threshold` failures in a row ──▶ OPEN ── the pause is over: one attempt ─┬─ works ──▶ CLOSED
                                                 ▲                                      └─ fails ─┐
                                                 └───────────── twice the pause ──────────────────┘

Pure: time is an argument, seconds, monotonic.
"""

from __future__ import annotations

THRESHOLD = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """See the head of this file.

    Args:
        threshold: failures in a row that open it.
        first_pause_s, longest_pause_s: how long it stays open.
    """

    def __init__(
        self,
        threshold: int = THRESHOLD,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._failures = 0
        self._pause_s = first_pause_s
        self._retry_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has failed too often and not worked since."""
        return self._retry_at is not None

    def allows(self, now: float) -> bool:
        """Whether to try now. While open: once a pause, for whoever asks first."""
        if self._retry_at is None:
            return True
        if now < self._retry_at:
            return False
        self._retry_at = now + self._pause_s
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until `allows` may be True."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - now)

    def worked(self) -> None:
        """An attempt has worked."""
        self._failures = 0
        self._pause_s = self._first_pause_s
        self._retry_at = None

    def failed(self, now: float) -> None:
        """An attempt has failed for a reason that concerns others, too."""
        self._failures += 1
        if self._failures < self._threshold:
            return
        if self._retry_at is not None:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        self._retry_at = now + self._pause_s
