"""Which objects of a store are meant: of one model, of one salt, or all."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import lru_cache

from lmcache_qprotocol.keys import FEATURE_SUFFIX
from lmcache_qprotocol.limits import MAX_NAME_CHARS
from lmcache_qserver.tier import ChunkStore, Entry
from lmcache_qserver.tier.chunk_store import QUARANTINE, name_before
from lmcache_qserver.tier.paths import NO_SALT, VERSION, Address, parse_name, quote, unquote

FEATURE_MARK = "##"
NAMES_REMEMBERED = 1024
"""Of models that `means` has decided; one may have 512 characters."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is meant; nothing set means everything.

    Attributes:
        model_name: as the engine knows it: all of its features; with a feature's suffix (`M##query`): that one.
        salt: digest of the salt (`salt_digest`), as in `Address`; empty for objects without one.

    Raises:
        ValueError: no model has such a name, or no salt such a digest.
    """

    model_name: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if self.model_name is not None:
            self.model_name.encode()  # arguments that are no UTF-8 fail here
            if not 1 <= len(self.model_name) <= MAX_NAME_CHARS:
                raise ValueError(f"a model's name has 1 to {MAX_NAME_CHARS} characters")
        if self.salt and re.fullmatch(r"[0-9a-f]{32}", self.salt) is None:
            raise ValueError("a salt's digest has 32 hex digits, in small letters")

    def holds(self, address: Address) -> bool:
        """Whether the object is meant."""
        return self.salt in (None, address.salt) and self.holds_model(address.model_folder)

    def holds_model(self, folder: str) -> bool:
        """Whether the model of this folder is meant."""
        return self.model_name is None or means_folder(self.model_name, folder)


@lru_cache(NAMES_REMEMBERED)
def means(wanted: str, model_name: str) -> bool:
    """Whether keys of this model name are meant: in memory what is meant of a store, even of names cut short there.

    Args:
        wanted: see `Selection`.
    """
    return means_folder(wanted, quote(model_name))


def means_folder(wanted: str, folder: str) -> bool:
    """Whether the model of this folder is meant."""
    name = unquote(folder)
    if name is not None:
        return wanted in (name, name.rpartition(FEATURE_MARK)[0])
    # The folder holds a digest instead of the name's end: only features that we know can be recognized.
    return any(folder == quote(wanted + suffix) for suffix in ("", *FEATURE_SUFFIX.values()))


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in a store.

    Attributes:
        address: what the name tells (in quarantine the one before); None for a foreign object, whose name is none
            that we give.
    """

    entry: Entry
    address: Address | None


async def find(store: ChunkStore, selection: Selection) -> AsyncIterator[Found]:
    """What is meant, as the store lists it; foreign objects too, where they lie among it. Not what is in quarantine.

    Raises:
        TierError: the store can't be listed (any more).
    """
    for prefix in await _prefixes(store, selection, ""):
        async for entry in store.list(prefix):
            if entry.name.startswith(f"{QUARANTINE}/"):
                continue
            address = parse_name(entry.name)
            if address is None or selection.holds(address):
                yield Found(entry, address)


async def find_quarantined(store: ChunkStore, selection: Selection) -> AsyncIterator[Found]:
    """The same of what is in quarantine: whose it was its folder tells, which its own broken bytes can't.

    Raises:
        TierError: the store can't be listed (any more).
    """
    for prefix in await _prefixes(store, selection, f"{QUARANTINE}/"):
        async for entry in store.list(prefix):
            address = parse_name(name_before(entry.name))
            if address is None or selection.holds(address):
                yield Found(entry, address)


async def _prefixes(store: ChunkStore, selection: Selection, place: str) -> list[str]:
    """The fewest below which everything lies that is meant.

    Args:
        place: what they all begin with; empty, or a folder and a slash.
    """
    if selection.model_name is None:
        return [place.rstrip("/")]
    models = [
        folder
        for folder in await store.folders(f"{place}{VERSION}")
        if selection.holds_model(folder.rpartition("/")[2])
    ]
    if selection.salt is None:
        return models
    return [
        f"{layout}/{selection.salt or NO_SALT}"
        for model in models
        for layout in await store.folders(model)
    ]
