"""Deleting everything of a model, or of one of its salts, out of a store."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qprotocol.keys import FEATURE_SUFFIX, KeyFamily
from lmcache_qserver.tier import ChunkStore
from lmcache_qserver.tier.paths import VERSION, quote, salt_segment, unquote

DELETE_NAMES = 256
SUFFIX_MARK = "##"


@dataclass(frozen=True, slots=True)
class Purge:
    """What is to go.

    Attributes:
        model_name: as in keys; without a feature's suffix all features of the model.
        salt: None for all.
    """

    model_name: str
    salt: str | None

    def is_model(self, name: str) -> bool:
        """Whether a key's model name is meant."""
        return name == self.model_name or (
            SUFFIX_MARK not in self.model_name and name.startswith(self.model_name + SUFFIX_MARK)
        )

    def is_family(self, family: KeyFamily) -> bool:
        """Whether a key's family is meant."""
        return self.is_model(family.model_name) and self.salt in (None, family.cache_salt)

    def is_folder(self, folder: str) -> bool:
        """Whether a model's folder is meant; long names can't be read off it, and are quoted for comparison."""
        segment = folder.rpartition("/")[2]
        name = unquote(segment)
        if name is not None:
            return self.is_model(name)
        suffixes = ["", *FEATURE_SUFFIX.values()] if SUFFIX_MARK not in self.model_name else [""]
        return any(quote(self.model_name + suffix) == segment for suffix in suffixes)


async def purge_store(store: ChunkStore, what: Purge) -> tuple[int, int]:
    """Delete it; how many objects that were, and bytes.

    Raises:
        TierError: some may be left; purging again is safe.
    """
    objects = nbytes = 0
    for model in await store.folders(VERSION):
        if not what.is_folder(model):
            continue
        for layout in await store.folders(model):
            prefix = layout if what.salt is None else f"{layout}/{salt_segment(what.salt)}"
            names: list[str] = []
            async for entry in store.list(prefix):
                names.append(entry.name)
                objects += 1
                nbytes += entry.nbytes
            for first in range(0, len(names), DELETE_NAMES):
                await store.delete(names[first : first + DELETE_NAMES])
    return objects, nbytes
