"""A worker on the simulated device, for tests of the daemon: its ring, its event, and the faults that it can play.

The device's memory is a memfd of this process, which the device's process opens by handle (device/sim_handles.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import (
    ChunkQuery,
    DeviceMemory,
    RangeKey,
    RingDescription,
    StoreProof,
    StoreResult,
)
from lmcache_qprotocol.stamps import EMPTY, STAMP_BYTES, first_stamp
from lmcache_qserver.device.sim_handles import handle_of
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT, BareClient

BLOCK_SIZE, CHUNK_SIZE, NUM_BLOCKS = 4, 16, 16
BLOCKS_PER_CHUNK = CHUNK_SIZE // BLOCK_SIZE
CHUNK_BYTES = CHUNK_SIZE * SMALL_LAYOUT.token_bytes
MODEL = "test/model"
FAMILY = KeyFamily(
    model_name=f"{MODEL}##query",
    world_size=1,
    kv_rank=kv_rank(1, 0),
    layout_id=layout_id(SMALL_LAYOUT),
)
EVENT_BYTES = 16


class SimDeviceWorker:
    """A ring of 16 blocks of 4 tokens on the simulated device.

    Args:
        uuid: of the device, 16 bytes.
        chunk_size: the server's; chunks are written and stored with the default only.
    """

    def __init__(self, uuid: bytes = b"sim-device-no-01", chunk_size: int = CHUNK_SIZE) -> None:
        stamps_offset = NUM_BLOCKS * BLOCK_SIZE * SMALL_LAYOUT.token_bytes
        self.nbytes = stamps_offset + NUM_BLOCKS * BLOCK_SIZE * STAMP_BYTES
        self.fd = os.memfd_create("sim-device")
        os.ftruncate(self.fd, self.nbytes + EVENT_BYTES)
        self._map = mmap.mmap(self.fd, self.nbytes + EVENT_BYTES)
        memory = np.frombuffer(self._map, np.uint8)
        self._blocks = memory[:stamps_offset].reshape(NUM_BLOCKS, -1)
        self._stamps = memory[stamps_offset : self.nbytes].view(np.int64)
        self._stamps[:] = EMPTY
        self.event_counts = memory[self.nbytes :].view(np.int64)
        """Records and completions; see rule 9 of the simulated device for what they can play."""
        self.event = handle_of(self.fd, self.nbytes, EVENT_BYTES)
        self.description = RingDescription(
            layout=SMALL_LAYOUT,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            chunk_size=chunk_size,
            ring_token=os.urandom(16),
            stamps_offset=stamps_offset,
            kind="sim",
            device=DeviceMemory(
                uuid=uuid, handle=handle_of(self.fd, 0, self.nbytes), nbytes=self.nbytes
            ),
        )

    def register(self, client: BareClient, instance_id: int | str = 1) -> None:
        """Register the ring; the client has a lifeline."""
        client.ask(
            "register_q_cache", instance_id, (), MODEL, 1, "test", None, (), self.description
        )

    def write(self, number: int, blocks: Sequence[int]) -> None:
        """Fill four blocks with chunk number `number`, whose nonce is `number + 1`."""
        self._blocks[list(blocks)] = np.frombuffer(content(number), np.uint8).reshape(
            len(blocks), -1
        )
        stamps = first_stamp(number + 1, 0) + np.arange(CHUNK_SIZE)
        self._stamps.reshape(NUM_BLOCKS, -1)[list(blocks)] = stamps.reshape(len(blocks), -1)

    def store_request(
        self, number: int, blocks: Sequence[int], instance_id: int | str = 1
    ) -> tuple[object, ...]:
        """Payloads of `store_q` for a chunk that has been written."""
        key = RangeKey(
            model_name=FAMILY.model_name,
            world_size=1,
            worker_id=0,
            start=0,
            end=CHUNK_SIZE,
            chunk_hashes=(hash_of(number),),
            layout_id=FAMILY.layout_id,
        )
        return key, instance_id, (tuple(blocks),), self.event, StoreProof(nonces=(number + 1,))

    def store(
        self, client: BareClient, number: int, blocks: Sequence[int], instance_id: int | str = 1
    ) -> StoreResult:
        """Write and store a chunk, and wait for the answer."""
        self.write(number, blocks)
        result = client.ask("store_q", *self.store_request(number, blocks, instance_id)).result
        assert isinstance(result, StoreResult)
        return result

    def break_device(self) -> None:
        """The next copy meets a lost device context."""
        self.event_counts[:] = 1, -1

    def hang_device(self) -> None:
        """The next copy waits for an event that never completes."""
        self.event_counts[:] = 1, 0

    def mend_device(self) -> None:
        """The opposite of both."""
        self.event_counts[:] = 0

    def close(self) -> None:
        """Forget the memory."""
        del self._blocks, self._stamps, self.event_counts
        self._map.close()
        os.close(self.fd)


def content(number: int) -> bytes:
    """The bytes of chunk number `number`."""
    return np.random.default_rng(number).bytes(CHUNK_BYTES)


def hash_of(number: int) -> bytes:
    """Any 32 bytes that name the chunk."""
    return number.to_bytes(32, "big")


def query_of(number: int) -> ChunkQuery:
    """Asks for the chunk."""
    return ChunkQuery(family=FAMILY, chunk_hashes=(hash_of(number),))
