"""What the ledger hands out: a whole chunk or a piece of one, with all that its STORE_Q says."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qclient.capture.account import RequestTally
from lmcache_qclient.capture.accounts import Tallies
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.messages import IdentityClaim


@dataclass(frozen=True)
class FinishedChunk:
    """A whole chunk, or a piece of one, ready to be stored.

    Attributes:
        request_id: for logs.
        start, end: absolute positions.
        chunk_hash: 32 bytes, over the chunk's tokens up to `end`.
        cache_salt: part of the key.
        blocks: ring blocks that hold the rows, in order; the first begins at the block boundary at or before `start`.
        nonce: what the stamps must carry.
        tally: where its tokens are counted.
        parent_hash: hash of the chunk before; None when the ledger does not do pieces.
        piece_tokens, piece_items: the chunk's tokens up to `end`, and the items that begin among them, their offsets
            counted from the chunk's start; both empty without `parent_hash`.
        claim: what the tensors depend on besides, in words; it goes with `parent_hash`.
    """

    request_id: str
    start: int
    end: int
    chunk_hash: bytes
    cache_salt: str
    blocks: tuple[int, ...]
    nonce: int
    tally: RequestTally | Tallies
    parent_hash: bytes | None = None
    piece_tokens: tuple[int, ...] = ()
    piece_items: tuple[ItemIdentity, ...] = ()
    claim: IdentityClaim | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are stored."""
        return self.end - self.start
