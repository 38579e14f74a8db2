"""What a purge is about; upkeep/purge.py deletes it in a store."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qprotocol.keys import KeyFamily
from lmcache_qserver.upkeep.selection import means


@dataclass(frozen=True, slots=True)
class Purge:
    """What is to go; in memory the same as in a store.

    Attributes:
        model_name: as in keys; without a feature's suffix all features of the model.
        salt: None for all.
    """

    model_name: str
    salt: str | None

    def is_family(self, family: KeyFamily) -> bool:
        """Whether a key's family is meant."""
        return self.salt in (None, family.cache_salt) and means(self.model_name, family.model_name)
