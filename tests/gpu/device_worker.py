"""A worker with a real ring on a CUDA device, as capture builds it, and a reader beside it.

`python -m tests.gpu.device_worker URL LIFELINE` registers a ring, says so, and sleeps: to be killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

import torch

from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qprotocol.messages import (
    ChunkQuery,
    DeviceMemory,
    RangeKey,
    RingDescription,
    StoreProof,
    StoreResult,
    WorkerReport,
)
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline

LAYERS, BLOCK_SIZE, HIDDEN, CHUNK_SIZE, NUM_BLOCKS = 8, 16, 1024, 256, 64
BLOCKS_PER_CHUNK = CHUNK_SIZE // BLOCK_SIZE
DEVICE = torch.device("cuda", 0)
MODEL = "gpu/model"
LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=tuple(range(LAYERS)),
    first_head=0,
    num_heads=16,
    total_heads=16,
    head_dim=HIDDEN // 16,
    dtype="bfloat16",
)
CHUNK_BYTES = CHUNK_SIZE * LAYOUT.token_bytes
FAMILY = KeyFamily(
    model_name=f"{MODEL}##query", world_size=1, kv_rank=kv_rank(1, 0), layout_id=layout_id(LAYOUT)
)
NOTHING_YET = WorkerReport(computed=0, captured=0, lost={}, pending=0)


def rows_of(number: int) -> torch.Tensor:
    """Chunk `number`, bfloat16 `[blocks, layers, block_size, hidden]`, on the host."""
    generator = torch.Generator().manual_seed(number)
    shape = (BLOCKS_PER_CHUNK, LAYERS, BLOCK_SIZE, HIDDEN)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


class DeviceWorker:
    """A connection with its lifeline, and a ring on the device."""

    def __init__(self, url: str, lifeline: str, num_blocks: int = NUM_BLOCKS) -> None:
        self.stack = contextlib.ExitStack()
        self.client = self.stack.enter_context(BareClient(url))
        connection = self.stack.enter_context(BareLifeline(lifeline))
        _, self.pool_fd = connection.attach(self.client.hello().session)
        self.stack.callback(os.close, self.pool_fd)
        self.ring = QRingBuffer(
            LAYERS, num_blocks, BLOCK_SIZE, HIDDEN, torch.bfloat16, device=DEVICE
        )
        memory = self.ring.device_memory
        assert memory is not None
        self.description = RingDescription(
            layout=LAYOUT,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            chunk_size=CHUNK_SIZE,
            ring_token=os.urandom(16),
            stamps_offset=self.ring.stamps_offset,
            kind="cuda",
            device=DeviceMemory(uuid=memory.uuid, handle=memory.handle, nbytes=memory.nbytes),
        )

    def register(self) -> None:
        payloads = (os.getpid(), (), MODEL, 1, "test", None, (), self.description)
        self.client.ask("register_q_cache", *payloads)

    def unregister(self) -> None:
        self.client.ask("unregister_q_cache", os.getpid(), NOTHING_YET)

    def queue_step(self, number: int, blocks: Sequence[int]) -> None:
        """Queue what a step does for a chunk: empty stamps, rows, stamps, event. Waits for nothing."""
        self.ring.clear_blocks(blocks)
        rows = rows_of(number).pin_memory().to(DEVICE, non_blocking=True)
        by_token = rows.permute(1, 0, 2, 3).reshape(LAYERS, CHUNK_SIZE, HIDDEN)
        slots = torch.tensor(
            [block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)]
        ).to(DEVICE)
        index = self.ring.index(slots)
        for layer in range(LAYERS):
            self.ring.write(layer, by_token[layer], index)
        stamps = first_stamp(number + 1, 0) + torch.arange(CHUNK_SIZE)
        self.ring.stamp(slots, stamps.to(DEVICE))
        self.ring.record_event()

    def store(self, number: int, blocks: Sequence[int]) -> StoreResult:
        """Store a chunk whose step has been queued; returns the answer."""
        key = RangeKey(
            model_name=FAMILY.model_name,
            world_size=1,
            worker_id=0,
            start=0,
            end=CHUNK_SIZE,
            chunk_hashes=(number.to_bytes(32, "big"),),
            layout_id=FAMILY.layout_id,
        )
        proof = StoreProof(nonces=(number + 1,))
        event = self.ring.event_handle
        payloads = (key, os.getpid(), (tuple(blocks),), event, proof)
        result = self.client.ask("store_q", *payloads).result
        assert isinstance(result, StoreResult)
        return result

    def read(self, number: int) -> bytes:
        """A stored chunk's bytes, out of the pool."""
        query = ChunkQuery(family=FAMILY, chunk_hashes=(number.to_bytes(32, "big"),))
        reply = self.client.ask("retrieve_q", query).result
        (chunk,) = reply.chunks
        found = os.pread(self.pool_fd, chunk.nbytes, chunk.offset)
        self.client.ask("release_q", (reply.lease_id,))
        return found

    def close(self) -> None:
        """Unregister, then give the memory back."""
        self.unregister()
        self.stack.close()
        self.ring.close()


if __name__ == "__main__":
    worker = DeviceWorker(sys.argv[1], sys.argv[2])
    worker.register()
    print("registered", flush=True)
    time.sleep(600)
