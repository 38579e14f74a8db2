"""What a store answers."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qclient.qcache.catalog import StoredLayout


@dataclass(frozen=True)
class Stored:
    """A sequence that is stored now.

    Attributes:
        num_tokens: of the sequence.
        stored: objects that are new: one for each chunk, rank, and shape of layers; the tail that makes no whole chunk
            has its own.
        duplicate: objects that were there before, with the same bytes. What a lost connection made us send twice may
            count here.
        nbytes: of the new objects' rows.
        layout: for `retrieve(..., layout=)`, where the model is stored in several.
    """

    num_tokens: int
    stored: int
    duplicate: int
    nbytes: int
    layout: StoredLayout

    @property
    def in_words(self) -> str:
        """The counts, for a message."""
        return f"{self.stored} objects new, {self.duplicate} there before"
