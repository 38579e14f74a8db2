"""One ledger, several accounts: what the ledger counts is true of all features, what becomes of a store of one."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_qclient.capture.account import Account, RequestTally
from lmcache_qprotocol.reasons import LossReason


class Accounts:
    """What the ledger takes for its account.

    Args:
        each: one account a feature.
    """

    def __init__(self, each: Sequence[Account]) -> None:
        self.each = tuple(each)

    def request(self, request_id: str) -> Tallies:
        """See `Account`."""
        return Tallies(request_id, tuple(account.request(request_id) for account in self.each))

    def lose_unknown(self, reason: LossReason, tokens: int) -> None:
        """See `Account`."""
        for account in self.each:
            account.lose_unknown(reason, tokens)


class Tallies:
    """One request's tallies, one a feature; made by `Accounts.request`."""

    __slots__ = ("each", "request_id")

    def __init__(self, request_id: str, each: tuple[RequestTally, ...]) -> None:
        self.request_id = request_id
        self.each = each

    def compute(self, tokens: int) -> None:
        """See `RequestTally`."""
        for tally in self.each:
            tally.compute(tokens)

    def capture(self, tokens: int) -> None:
        """See `RequestTally`."""
        for tally in self.each:
            tally.capture(tokens)

    def lose(self, reason: LossReason, tokens: int) -> None:
        """See `RequestTally`."""
        for tally in self.each:
            tally.lose(reason, tokens)

    def end(self) -> None:
        """See `RequestTally`."""
        for tally in self.each:
            tally.end()
