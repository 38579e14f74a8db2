"""A worker without an engine: a registered ring, chunks that look captured, and their stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.connection import AUTO, Connection
from lmcache_qprotocol.hashing import chunk_hashes
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.stamps import first_stamp

MIB = 1 << 20
CHUNK = 256
BLOCK = 16
LAYERS = 32
HEAD_DIM = 128
PLACES = 4
"""Chunks of a prompt; the ring, and the buffers of a plain copy, hold as many."""


@dataclass
class Worker:
    """A registered worker."""

    adapter: QRingBufferAdapter
    ring: QRingBuffer

    def prepare(self, index: int, place: int = 0) -> FinishedChunk:
        """Take ring blocks for a chunk and stamp its rows, as a worker does in a forward pass.

        Args:
            index: of the prompt.
            place: of the chunk in it.
        """
        blocks = self.ring.allocate(CHUNK // BLOCK)
        assert blocks is not None
        nonce, start = PLACES * index + place + 1, place * CHUNK
        slots = torch.arange(blocks[0] * BLOCK, blocks[0] * BLOCK + CHUNK)
        self.ring.stamp(slots, torch.arange(CHUNK) + first_stamp(nonce, start))
        tally = self.adapter.account.request("bench")
        tally.compute(CHUNK)
        name = chunk_hashes(prompt(index), CHUNK)[place]
        return FinishedChunk("bench", start, start + CHUNK, name, "", tuple(blocks), nonce, tally)

    def store_all(self, chunks: Sequence[FinishedChunk]) -> None:
        """From submitting the first to the last answer."""
        sequences = [self.adapter.submit_q_store_request(chunk) for chunk in chunks]
        for sequence in sequences:
            assert sequence is not None
            self.adapter.wait_for_store(sequence)

    def store(self, chunk: FinishedChunk) -> None:
        """From submitting to the answer."""
        sequence = self.adapter.submit_q_store_request(chunk)
        assert sequence is not None
        self.adapter.wait_for_store(sequence)

    def settle(self) -> None:
        """Take back the blocks of what was stored, all of which must have been."""
        self.adapter.reclaim_finished_q_stores()
        account = self.adapter.account
        assert account.captured == account.computed, account.lost


def layout_of(chunk_mib: int) -> Layout:
    """bf16, 32 layers, as many heads as make chunks of this size."""
    heads = chunk_mib * MIB // (CHUNK * LAYERS * 2 * HEAD_DIM)
    return Layout(
        feature="transfer_query",
        layer_ids=tuple(range(LAYERS)),
        first_head=0,
        num_heads=heads,
        total_heads=heads,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
    )


@contextmanager
def worker(url: str, chunk_mib: int, name: str, transport: str = AUTO) -> Iterator[Worker]:
    """A worker whose chunks have `chunk_mib` MiB; `name` is that of its instance and of its model."""
    layout = layout_of(chunk_mib)
    ring = QRingBuffer(LAYERS, PLACES * CHUNK // BLOCK, BLOCK, layout.hidden_dim, torch.bfloat16)
    ring.flat.copy_(torch.randint(0, 100, (1, layout.hidden_dim)))
    adapter = QRingBufferAdapter(
        Connection.open(url, client="benchmark", transport=transport),
        instance_id=name,
        model_name=name,
        world_size=1,
        rank=0,
        account=Account(),
    )
    adapter.establish_transfer_context(BLOCK)
    adapter.register_q_ring(ring, layout)
    try:
        yield Worker(adapter, ring)
    finally:
        adapter.shutdown_q_ring()


def prompt(index: int) -> list[int]:
    """Tokens of `PLACES` chunks; no two prompts have one in common."""
    return [index, *range(PLACES * CHUNK - 1)]
