"""Why a chunk is not there: a bounded memory, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.reasons import MissReason

REASONS_KEPT = 65_536
CHARS_KEPT = 1 << 24
"""Characters of the salts and names in them: a peer could send 65,536 long ones."""


class Misses:
    """Last known reason per key.

    Args:
        kept: keys remembered at most.
        chars_kept: characters in them at most.
    """

    def __init__(self, kept: int = REASONS_KEPT, chars_kept: int = CHARS_KEPT) -> None:
        self._kept = kept
        self._chars_kept = chars_kept
        self._chars = 0
        self._reasons: OrderedDict[ObjectKey, MissReason] = OrderedDict()

    def note(self, key: ObjectKey, reason: MissReason) -> None:
        """This is why the key is not there."""
        self.forget(key)
        self._reasons[key] = reason
        self._chars += _chars(key)
        while len(self._reasons) > self._kept or self._chars > self._chars_kept:
            self._chars -= _chars(self._reasons.popitem(last=False)[0])

    def forget(self, key: ObjectKey) -> None:
        """The key is there now."""
        if self._reasons.pop(key, None) is not None:
            self._chars -= _chars(key)

    def reason(self, key: ObjectKey) -> MissReason:
        """NOT_STORED when nothing is known."""
        return self._reasons.get(key, MissReason.NOT_STORED)


def _chars(key: ObjectKey) -> int:
    return len(key.family.model_name) + len(key.family.cache_salt)
