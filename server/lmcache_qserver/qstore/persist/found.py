"""What the persistent tier has of a query: for a lookup, which brings nothing into the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.qstore.by_tokens import Candidate

Reasons = dict[ObjectKey, MissReason]


@dataclass(slots=True)
class Elsewhere:
    """Objects that are not in the pool.

    Attributes:
        keys: whole chunks that are there.
        candidates: by place in the query, objects that hold some of a partial chunk's rows.
        reasons: of whole chunks that are there, or may be, and can't be given.
        unavailable: places in the query for which the store did not answer, or was not asked after it had not.
    """

    keys: set[ObjectKey] = field(default_factory=set)
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    reasons: Reasons = field(default_factory=dict)
    unavailable: set[int] = field(default_factory=set)

    def reason(self, place: int, key: ObjectKey) -> MissReason | None:
        """Why a whole chunk can't be given; None: that is not the persistent tier's to say."""
        if place in self.unavailable:
            return MissReason.UNAVAILABLE
        return self.reasons.get(key)


NOWHERE_ELSE = Elsewhere()
