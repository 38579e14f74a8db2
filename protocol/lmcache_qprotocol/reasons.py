"""Why a computed token was not stored, and why a chunk is missing: two closed sets.

Every computed token ends in exactly one place: stored, or counted under one `LossReason`.
"""

from __future__ import annotations

from enum import Enum


class LossReason(str, Enum):
    """One counter each, on the worker and in `/status`."""

    RING_FULL = "ring_full"
    """No free ring block when the token was computed."""
    UNMATCHED = "unmatched"
    """The token's KV slot is not among the step's rows, or is there twice."""
    PREEMPTED = "preempted"
    RECOMPUTED = "recomputed"
    """Computed again after its row had been captured already."""
    REJECTED_DRAFT = "rejected_draft"
    DISCARDED_AFTER_FINISH = "discarded_after_finish"
    TAIL_OFF = "tail_off"
    """Part of a chunk that was never whole, while pieces are switched off."""
    NOT_SELECTED = "not_selected"
    SERVER_UNAVAILABLE = "server_unavailable"
    POOL_FULL = "pool_full"
    COPY_FAILED = "copy_failed"
    STAMP_MISMATCH = "stamp_mismatch"
    """The server found a row that was not written by the chunk it was stored for."""
    LAYER_MISSING = "layer_missing"
    """A layer's hook did not run in a step."""
    CAPTURE_DISABLED = "capture_disabled"


class MissReason(str, Enum):
    """Why a retrieve does not have a chunk."""

    NOT_STORED = "not_stored"
    """Never offered to this server (or so long ago that it has forgotten)."""
    EVICTED = "evicted"
    BEING_STORED = "being_stored"
    POOL_FULL = "pool_full"
    COPY_FAILED = "copy_failed"
    STAMP_MISMATCH = "stamp_mismatch"
    TOO_SHORT = "too_short"
    """The asked tokens end before the chunk does, and no piece holds these rows."""
    CORRUPT = "corrupt"
    """Its bytes had changed, in memory or in the persistent tier, when they were verified."""
    UNAVAILABLE = "unavailable"
    """The persistent tier could not be asked, or did not give it: it may be there."""
    EXPIRED = "expired"
    """It was older than this server keeps objects."""
    PURGED = "purged"
