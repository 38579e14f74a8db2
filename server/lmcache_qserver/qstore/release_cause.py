"""Why an instance goes: a closed set, one counter each."""

from __future__ import annotations

from enum import Enum


class ReleaseCause(str, Enum):
    """The cause that was there first counts."""

    UNREGISTERED = "unregistered"
    REPLACED = "replaced"
    """The same worker registered another ring under its id."""
    CLIENT_GONE = "client_gone"
    """Its lifeline closed, its process died, or its client said hello anew."""
    REAPED = "reaped"
    """It was silent for too long."""
    NOT_OPENED = "not_opened"
    """Its ring could not be opened: it was never LIVE."""
    DEVICE_LOST = "device_lost"
    """The process of its device has ended."""
    SHUTDOWN = "shutdown"

    @property
    def is_death(self) -> bool:
        """Nothing that is under way may be admitted any more; else what was asked for is still stored."""
        return self in (
            ReleaseCause.CLIENT_GONE,
            ReleaseCause.REAPED,
            ReleaseCause.NOT_OPENED,
            ReleaseCause.DEVICE_LOST,
        )
