"""A sequence cut up as an engine stores it: whole chunks, and the tail as a piece, each with its tokens and claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_qprotocol.hashing import HashChain, chunk_hash
from lmcache_qprotocol.identity import Identity, ItemIdentity
from lmcache_qprotocol.messages import IdentityClaim


@dataclass(frozen=True)
class ChunkToStore:
    """Positions [start, end) of a sequence: one chunk, or the first rows of the last one.

    Attributes:
        index: of the chunk.
        name: its hash, or that of its tokens up to `end`.
        parent: the hash before it.
        items: those that begin in it, offsets counted from `start`.
        claim: what the values depend on besides the tokens, in words.
    """

    index: int
    start: int
    end: int
    name: bytes
    parent: bytes
    tokens: tuple[int, ...]
    items: tuple[ItemIdentity, ...]
    claim: IdentityClaim

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return self.end - self.start


def chunks_to_store(
    ids: Sequence[int], identity: Identity, chunk_size: int
) -> tuple[ChunkToStore, ...]:
    """All of a sequence, in order."""
    chain = HashChain(chunk_size, identity)
    chain.extend(ids)
    items = sorted(identity.items, key=lambda item: (item.offset, item.kind, item.digest))
    chunks = []
    for index, start in enumerate(range(0, len(ids), chunk_size)):
        tokens = tuple(ids[start : start + chunk_size])
        end = start + len(tokens)
        begun = tuple(item for item in items if item.offset < end)
        inside = tuple(
            ItemIdentity(item.kind, item.digest, item.offset - start)
            for item in begun
            if item.offset >= start
        )
        parent = chain.parent(index)
        chunks.append(
            ChunkToStore(
                index=index,
                start=start,
                end=end,
                name=chunk_hash(parent, tokens, 0, inside),
                parent=parent,
                tokens=tokens,
                items=inside,
                claim=IdentityClaim(
                    plain_parent_hash=chain.plain_parent(index), lora=identity.lora, items=begun
                ),
            )
        )
    return tuple(chunks)
