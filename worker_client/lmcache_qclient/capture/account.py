"""The worker's account: every computed token ends as captured, or lost under one reason.

computed = captured + sum(lost) + pending          at any time; pending = 0 once nothing is open or under way

It is kept for the worker as a whole, and for every request (`RequestTally`): a request that has ended and has nothing
pending is *whole*, *partial* or *none* by how much of it was captured, and is remembered for a while.
"""

from __future__ import annotations

from collections import Counter, deque

from lmcache_qprotocol.limits import MAX_NAME_CHARS, MAX_RECENT_REQUESTS
from lmcache_qprotocol.messages import RequestCounts, RequestCoverage, WorkerReport
from lmcache_qprotocol.reasons import LossReason


class Account:
    """Token counts since the worker started. Not thread-safe: its users take turns.

    Attributes:
        computed, captured, lost: tokens.
        recent: the requests that ended last, oldest first.
        waited_s: seconds that steps have waited for ring blocks.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.computed = 0
        self.captured = 0
        self.lost: Counter[LossReason] = Counter()
        self.recent: deque[RequestCoverage] = deque(maxlen=MAX_RECENT_REQUESTS)
        self._whole = self._partial = self._none = 0

    @property
    def pending(self) -> int:
        """Tokens in open chunks and in stores under way."""
        return self.computed - self.captured - self.lost.total()

    def request(self, request_id: str) -> RequestTally:
        """A tally for one request; what it counts is counted here, too."""
        return RequestTally(self, request_id)

    def lose_unknown(self, reason: LossReason, tokens: int) -> None:
        """Count tokens as computed and lost at once, of which it is not known whose they were."""
        self.computed += tokens
        self.lost[reason] += tokens

    def ended(self, tally: RequestTally) -> None:
        """A request is over, and each of its tokens has come to rest. Called by its tally."""
        if tally.captured == tally.computed:
            self._whole += 1
        elif tally.captured:
            self._partial += 1
        else:
            self._none += 1
        self.recent.append(
            RequestCoverage(
                request_id=tally.request_id[:MAX_NAME_CHARS],
                computed=tally.computed,
                captured=tally.captured,
                lost=_counts(tally.lost),
            )
        )

    def report(
        self, ring_blocks: int = 0, ring_used: int = 0, ring_high_water: int = 0
    ) -> WorkerReport:
        """A snapshot for the server."""
        return WorkerReport(
            computed=self.computed,
            captured=self.captured,
            lost=_counts(self.lost),
            pending=self.pending,
            ring_blocks=ring_blocks,
            ring_used=ring_used,
            ring_high_water=ring_high_water,
            requests=RequestCounts(whole=self._whole, partial=self._partial, none=self._none),
            recent=tuple(self.recent),
            waited_ms=round(self.waited_s * 1000),
        )


class RequestTally:
    """One request's part of the account; made by `Account.request`."""

    __slots__ = ("_account", "_over", "captured", "computed", "lost", "request_id")

    def __init__(self, account: Account, request_id: str) -> None:
        self.request_id = request_id
        self.computed = 0
        self.captured = 0
        self.lost: Counter[LossReason] = Counter()
        self._account = account
        self._over = False

    @property
    def pending(self) -> int:
        """Tokens in its open chunks and in its stores under way."""
        return self.computed - self.captured - self.lost.total()

    def compute(self, tokens: int) -> None:
        """Count `tokens` as computed."""
        self.computed += tokens
        self._account.computed += tokens

    def capture(self, tokens: int) -> None:
        """Count `tokens` as stored."""
        self.captured += tokens
        self._account.captured += tokens
        self._close()

    def lose(self, reason: LossReason, tokens: int) -> None:
        """Count `tokens` as not stored."""
        self.lost[reason] += tokens
        self._account.lost[reason] += tokens
        self._close()

    def end(self) -> None:
        """No further token of it will be computed. Once, when nothing is pending any more, the account hears of it."""
        self._over = True
        self._close()

    def _close(self) -> None:
        if self._over and self.computed and not self.pending:
            self._over = False
            self._account.ended(self)


def _counts(lost: Counter[LossReason]) -> dict[LossReason, int]:
    return {reason: count for reason, count in lost.items() if count}
