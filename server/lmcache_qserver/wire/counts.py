"""What the wire has seen, as plain numbers; face/metrics.py shows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_qprotocol.errors import ErrorCode
from lmcache_qprotocol.operations import OPERATIONS

OK = "ok"
UNDECODED = "undecoded"
"""Operation label of a request whose operation can't be told."""


def _all_zero() -> dict[tuple[str, str], int]:
    operations = [operation.name for operation in OPERATIONS] + [UNDECODED]
    codes = [OK] + [code.value for code in ErrorCode]
    return {(operation, code): 0 for operation in operations for code in codes}


@dataclass
class WireCounts:
    """Counters since the start.

    Attributes:
        requests: by operation and outcome ("ok" or an error code); every pair is there from the start.
        unanswerable: messages without the two frames that an answer echoes.
        silenced: failures that a legacy client could not be told of.
        undeliverable: answers whose client had gone, or did not read.
        lifeline_refused_peers: connections of users that may not connect, or beyond the limit.
        lifeline_refused_packets: packets that could not be served.
    """

    requests: dict[tuple[str, str], int] = field(default_factory=_all_zero)
    unanswerable: int = 0
    silenced: int = 0
    undeliverable: int = 0
    lifeline_refused_peers: int = 0
    lifeline_refused_packets: int = 0
