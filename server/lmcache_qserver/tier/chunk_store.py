"""What every kind of persistent store does, and the rules that all of them keep.

    put        create only. A name that exists is success without writing: `already_there`. What is under a name never
               changes, so who read it once need not look again. When a put is answered `written` or `already_there` the
               object survives whatever the store survives: for files a power cut. Nobody looks whether what is there is
               whole: who finds a Corrupt object deletes it or puts it aside, and then it can be put again.
    get_into   the object's bytes into given buffers, to the byte: a different length is Corrupt, and then (as after any
               error) the buffers' contents mean nothing.
    head       length, age and last use, or None.
    delete     what is not there is deleted already. What is being read stays readable, or the read fails as NotThere or
               Corrupt; it never mixes.
    quarantine a broken object leaves its name and is kept for a person to look at; the name can be put again. It is
               kept below QUARANTINE in folders like those that it came from, so whoever deletes by folders finds it.
    list       as it goes, a page at a time. An object that comes or goes meanwhile may be in or not.
               list_beginning: the same for what lies side by side in one large folder.
    folders    one level of names, without the objects below.
    close      takes no more work and waits for what is under way, a bounded time.

    Buffers    put and get_into return a `Transfer` (transfer.py): whoever is cancelled stops waiting, the transfer goes
               on, and the buffers stay the store's until it is over.
    Time       every operation ends by itself: retries and time-outs are finite everywhere.
    Errors     errors.py, nothing else. ValueError is a bug of the caller: a bad name, no bytes.
    Names      segments of [A-Za-z0-9._=~-] with / between, none empty or beginning with a dot (those are the stores'
               own). Nobody makes one by hand: paths.py does. Checked again here, because a name becomes a path.
    Sharing    many stores, in many processes, on many machines, work over one place without knowing of each other.

Event loop only.
"""

from __future__ import annotations

import abc
import builtins
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lmcache_qserver.tier.transfer import Transfer

MAX_NAME_CHARS = 900
"""S3 allows 1024 bytes, the store's own prefix included."""
MAX_SEGMENT_CHARS = 200
"""File systems allow 255."""
QUARANTINE = "quarantine"
"""The folder of what was put aside; no name of ours begins so."""
_NAME = re.compile(
    rf"(?:[A-Za-z0-9_=~-][A-Za-z0-9._=~-]{{0,{MAX_SEGMENT_CHARS - 1}}}(?:/(?!$)|$))+"
)


Observe = Callable[[memoryview], None]
"""Looks at bytes as they arrive."""


class PutOutcome(str, Enum):
    """How a put succeeded."""

    WRITTEN = "written"
    ALREADY_THERE = "already_there"


@dataclass(frozen=True, slots=True)
class Entry:
    """An object, from outside.

    Attributes:
        nbytes: its length.
        modified: when it was put, seconds since the epoch, by the store's clock.
        used: when it was last read from its beginning or put, as far as the store knows. Object stores know of no
            reading: there it is `modified`.
    """

    name: str
    nbytes: int
    modified: float
    used: float


class ChunkStore(abc.ABC):
    """One place for objects; see this file's head. Get one by `open_store`.

    Attributes:
        url: where it is, for people; holds no credentials.
    """

    url: str

    @abc.abstractmethod
    def put(self, name: str, parts: Sequence[memoryview]) -> Transfer[PutOutcome]:
        """Store the parts, one behind the other, as one object.

        Args:
            parts: of bytes, contiguous; unchanged until the transfer is over.

        Raises:
            ValueError: a bad name, or no bytes at all.
        """

    @abc.abstractmethod
    def get_into(
        self,
        name: str,
        targets: Sequence[memoryview],
        offset: int = 0,
        to_end: bool = True,
        observe: Observe | None = None,
    ) -> Transfer[None]:
        """Fill the targets, one after the other, from the object's byte `offset` on.

        Args:
            targets: of bytes, contiguous, writable; the store's until the transfer is over.
            to_end: the object must end where the targets do; else it may be longer.
            observe: called in a thread of the store's, before the outcome, with what has arrived: every byte once, in
                order, of one target at a time. It keeps none of it. A TierError that it raises is the outcome.

        Raises:
            ValueError: a bad name, or no room at all.
        """

    @abc.abstractmethod
    async def head(self, name: str) -> Entry | None:
        """The object from outside; None if there is none."""

    @abc.abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; on an error some may be left, and deleting again is safe."""

    @abc.abstractmethod
    async def quarantine(self, name: str) -> None:
        """Take an object away from its name and keep it, under `kept_name`, for a person to look at.

        Nothing happens if it is not there. Listing the root shows it there, listing another folder does not. Files
        keep their times; in an object store it is as old as its quarantine is long.

        Raises:
            ValueError: the name is bad, or too long to be kept; none of paths.py is.
        """

    async def quarantined(self) -> tuple[int, int]:
        """(objects, bytes) in quarantine."""
        count = nbytes = 0
        async for entry in self.list(QUARANTINE):
            count += 1
            nbytes += entry.nbytes
        return count, nbytes

    @abc.abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[Entry]:
        """All objects below a prefix of whole segments, in no order."""

    async def list_beginning(self, start: str) -> AsyncIterator[Entry]:
        """All objects whose names begin so and go on, inside a segment, too; in no order.

        Where names are listed in order this costs no more than what it finds.
        """
        async for entry in self.list(start.rpartition("/")[0]):
            if entry.name.startswith(start) and entry.name != start:
                yield entry

    @abc.abstractmethod
    async def folders(self, prefix: str = "") -> builtins.list[str]:
        """The names directly below a prefix of whole segments that have objects below them, sorted.

        Whole names, from the root: `folders("v1")` has "v1/MODEL". Of files an empty folder (its objects are deleted)
        may be in or not.
        """

    @abc.abstractmethod
    async def close(self, timeout_s: float) -> bool:
        """Take no more work and wait for what is under way. False: something still is, and its buffers are in use."""


def check_name(name: str) -> str:
    """The name.

    Raises:
        ValueError: no store may see it.
    """
    if not is_name(name):
        raise ValueError(f"{name!r} is no name of an object")
    return name


def is_name(name: str) -> bool:
    """Whether a store may see it."""
    return len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name) is not None


def check_prefix(prefix: str) -> str:
    """A name, or nothing."""
    return check_name(prefix) if prefix else prefix


def kept_name(name: str) -> str:
    """Under which an object is kept in quarantine: QUARANTINE/its folder/TOKEN-its last segment.

    Another token each time, so nothing takes another's place. A last segment that gets too long loses its end.

    Raises:
        ValueError: that is too long for a name.
    """
    folder, slash, last = check_name(name).rpartition("/")
    segment = f"{secrets.token_hex(8)}-{last}"[:MAX_SEGMENT_CHARS]
    return check_name(f"{QUARANTINE}/{folder}{slash}{segment}")


def name_before(kept: str) -> str:
    """The name that an object had before it was kept under this one, as far as that tells."""
    folder, slash, segment = kept.removeprefix(f"{QUARANTINE}/").rpartition("/")
    return f"{folder}{slash}{segment.partition('-')[2]}"


def byte_views(buffers: Sequence[Any], writable: bool = False) -> list[memoryview]:
    """Views of our own over the buffers, as bytes; empty ones left out.

    Raises:
        ValueError: there are no bytes, or a view is not contiguous or not writable.
    """
    views = []
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.c_contiguous or (writable and view.readonly):
            raise ValueError("a buffer is not contiguous, or not writable")
        if view.nbytes:
            views.append(view.cast("B"))
    if not views:
        raise ValueError("an object has at least one byte")
    return views
