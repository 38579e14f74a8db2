"""Why a chunk is not there: a bounded memory, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.reasons import MissReason

REASONS_KEPT = 65_536


class Misses:
    """Last known reason per key.

    Args:
        kept: keys remembered at most.
    """

    def __init__(self, kept: int = REASONS_KEPT) -> None:
        self._kept = kept
        self._reasons: OrderedDict[ObjectKey, MissReason] = OrderedDict()

    def note(self, key: ObjectKey, reason: MissReason) -> None:
        """This is why the key is not there."""
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._kept:
            self._reasons.popitem(last=False)

    def forget(self, key: ObjectKey) -> None:
        """The key is there now."""
        self._reasons.pop(key, None)

    def reason(self, key: ObjectKey) -> MissReason:
        """NOT_STORED when nothing is known."""
        return self._reasons.get(key, MissReason.NOT_STORED)
