"""An adapter without a server: it reads every submitted chunk as the server would, and answers at once."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import TransferContext
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qprotocol.layout import Layout


@dataclass
class Stored:
    """One submitted chunk, as read through the ring's descriptor.

    Attributes:
        rows: float32 `[tokens, layers, hidden_dim]`.
        stamps: int64 `[tokens]`.
    """

    chunk: FinishedChunk
    rows: np.ndarray
    stamps: np.ndarray


class FakeAdapter:
    """Duck-typed `QRingBufferAdapter` over a float32 ring."""

    def __init__(self, tokens_per_chunk: int) -> None:
        self.tokens_per_chunk = tokens_per_chunk
        self.account = Account()
        self.stored: list[Stored] = []
        self.waiting: list[FinishedChunk] = []
        self.ring: QRingBuffer | None = None
        self.layout: Layout | None = None
        self.context: TransferContext | None = None
        self.calls: list[str] = []
        self.told = self.account.report()

    def establish_transfer_context(self, ring_block_size: int) -> TransferContext:
        self.context = TransferContext(
            self.tokens_per_chunk, self.tokens_per_chunk // ring_block_size
        )
        return self.context

    def register_q_ring(self, ring: QRingBuffer, layout: Layout) -> None:
        self.ring, self.layout = ring, layout

    def submit_q_store_request(self, chunk: FinishedChunk) -> int:
        ring = self.ring
        assert ring is not None
        assert ring.memory is not None
        seen = mmap.mmap(ring.memory.fd, ring.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        shape = (ring.num_blocks, ring.num_layers, ring.block_size, ring.hidden_dim)
        rows = np.frombuffer(seen, np.float32, count=int(np.prod(shape))).reshape(shape)
        stamps = np.frombuffer(
            seen, np.int64, ring.num_blocks * ring.block_size, ring.stamps_offset
        )
        ids = list(chunk.blocks)
        by_token = rows[ids].transpose(0, 2, 1, 3).reshape(-1, ring.num_layers, ring.hidden_dim)
        by_block = stamps.reshape(ring.num_blocks, ring.block_size)[ids].reshape(-1)
        self.stored.append(Stored(chunk, by_token.copy(), by_block.copy()))
        self.waiting.append(chunk)
        return len(self.stored)

    def reclaim_finished_q_stores(self) -> int:
        assert self.ring is not None
        done, self.waiting = self.waiting, []
        for chunk in done:
            chunk.tally.capture(chunk.tokens)
            self.ring.free(chunk.blocks)
        return len(done)

    @property
    def stores_under_way(self) -> int:
        return len(self.waiting)

    @property
    def report_is_stale(self) -> bool:
        return self.told != self.account.report()

    def tell_report(self) -> None:
        self.told = self.account.report()
        self.calls.append("tell_report")

    def renew_report(self, now: float) -> None:
        self.told = self.account.report()
        self.calls.append("renew_report")

    def shutdown_q_ring(self) -> bool:
        self.calls.append("shutdown_q_ring")
        return True
