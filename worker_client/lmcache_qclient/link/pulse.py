"""When to ping and when to try again: the heartbeat's clockwork, without a clock.

HEALTHY ──lost(now)──▶ LOST ──restored(now)──▶ HEALTHY
  │ ping every interval_s   │ a try after 0.1, 0.2, 0.4 ... 2 s: failed(now)
"""

from __future__ import annotations

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 2.0


class Pulse:
    """See the head of this file. Time is `now`, seconds, monotonic.

    Args:
        interval_s: between two pings, seconds.
        now: the first ping is due one interval later.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        self.interval_s = interval_s
        self.healthy = True
        self._retry_s = FIRST_RETRY_S
        self._due = now + interval_s

    def wait_s(self, now: float) -> float:
        """Seconds until the next ping or try is due; 0 when it is."""
        return max(0.0, self._due - now)

    def beat_now(self, now: float) -> None:
        """A ping (or a try) is due at once."""
        self._due = now

    def answered(self, now: float) -> None:
        """The ping was answered."""
        self._due = now + self.interval_s

    def lost(self, now: float) -> None:
        """The server is gone; try soon."""
        self.healthy = False
        self._retry_s = FIRST_RETRY_S
        self._due = now + self._retry_s

    def failed(self, now: float) -> None:
        """A try to come back has failed; wait twice as long for the next."""
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self._due = now + self._retry_s

    def restored(self, now: float) -> None:
        """The server is back, and knows us."""
        self.healthy = True
        self._due = now + self.interval_s
