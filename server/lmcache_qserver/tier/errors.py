"""What can go wrong in the persistent tier: one small tree, the same for every kind of store.

    TierError
    ├── NotThere        no object has this name
    ├── Corrupt         there is one, and it is not what it should be: too short, too long, torn, flipped, another's
    ├── Refused         the store says no and will say so again: rights, credentials, no such folder or bucket
    ├── Full            no room: disk, quota
    └── Unavailable     may pass by itself: time-outs, connections, I/O errors, a store that is closing

An object that exists already is no error: a put answers `already_there`.

`code` is stable, messages are for people. A message may hold an object's name (salts are digests there), never a
credential.
"""

from __future__ import annotations

from typing import ClassVar


class TierError(Exception):
    """Base of all errors of the tier."""

    code: ClassVar[str]


class NotThere(TierError):
    """No object has this name."""

    code = "not_there"


class Corrupt(TierError):
    """An object is there and is not what its name promises."""

    code = "corrupt"


class Refused(TierError):
    """A person has to act: trying again is of no use."""

    code = "refused"


class Full(TierError):
    """No room; what had been written of the object is gone again."""

    code = "full"


class Unavailable(TierError):
    """Not now. Whether a put has happened is unknown; putting again is safe."""

    code = "unavailable"
