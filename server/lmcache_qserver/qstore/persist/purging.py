"""What a purge is about; upkeep/purge.py deletes it in a store."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qprotocol.keys import KeyFamily

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
