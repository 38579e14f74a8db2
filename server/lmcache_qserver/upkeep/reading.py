"""Reading objects to look at them: a header alone, or all of it, piece by piece, to prove it."""

from __future__ import annotations

import asyncio

import numpy as np

from lmcache_qserver.tier import ChunkStore, Corrupt, Entry, Transfer
from lmcache_qserver.tier.format import ALIGNMENT, MAX_HEADER_BYTES, Header, Proof, header_bytes
from lmcache_qserver.tier.format import read_header as header_in

PIECE_BYTES = 16 << 20
"""One request to an object store."""


class Memory:
    """Pieces of memory, each used again as soon as no transfer uses it: a new one costs as much as reading into it.

    Args:
        piece_bytes: of each; any header fits.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        assert piece_bytes >= MAX_HEADER_BYTES
        self._piece_bytes = piece_bytes
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """One that nobody uses."""
        if self._free:
            return self._free.pop()
        return np.empty(self._piece_bytes, np.uint8).data

    def give_back(self, piece: memoryview, transfer: Transfer[None] | None) -> None:
        """It is free when the last transfer into it is over."""
        if transfer is None:
            self._free.append(piece)
        else:
            transfer.when_over(lambda: self._free.append(piece))


async def read_header(store: ChunkStore, entry: Entry) -> Header:
    """What an object says of itself; nothing of it is proven.

    Raises:
        TierError: Corrupt, NotThere, or it can't be read.
    """
    head = memoryview(bytearray(min(ALIGNMENT, entry.nbytes)))
    if not head:
        raise Corrupt("the object is empty")
    await store.get_into(entry.name, [head], to_end=False)
    length = header_bytes(head)
    if length > head.nbytes:
        head = memoryview(bytearray(length))
        await store.get_into(entry.name, [head], to_end=False)
    return header_in(head)


async def prove(store: ChunkStore, entry: Entry, memory: Memory) -> Header:
    """Read all of an object, and prove that it is whole, unchanged, and lies under its own name.

    Of a salt the digest is all that name and header know: that they agree is proven, not whose salt it is.

    Raises:
        TierError: Corrupt, NotThere, or it can't be read.
    """
    piece = memory.take()
    transfer: Transfer[None] | None = None
    proof: Proof | None = None
    try:
        for offset in range(0, entry.nbytes, piece.nbytes):
            part = piece[: entry.nbytes - offset]
            is_last = offset + part.nbytes == entry.nbytes
            transfer = store.get_into(entry.name, [part], offset, to_end=is_last)
            await transfer
            await transfer.wait_until_over()
            if proof is None:
                split = header_bytes(part)
                proof, part = Proof(part[:split]), part[split:]
            await asyncio.to_thread(proof.update, part)
    finally:
        memory.give_back(piece, transfer)
    if proof is None:
        raise Corrupt("the object is empty")
    header = proof.finish()
    if header.address.name != entry.name:
        raise Corrupt(f"the object belongs elsewhere: {header.address.name}")
    return header
