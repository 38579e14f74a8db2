"""A worker, a ring and the copy out of it on one simulated device, and a check of every byte that comes out.

The worker writes as a real one does: it empties a block's stamps, writes rows, then stamps, then records its event,
all queued on its stream. Element e of chunk number n is n * 1000 + e, so no two chunks are alike in any place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lmcache_qprotocol.stamps import EMPTY, first_stamp
from lmcache_qserver.copying import ChunkCopy, RingGeometry
from lmcache_qserver.device.api import DeviceError
from lmcache_qserver.device.ring_copy import RingCopy
from lmcache_qserver.device.sim_api import SimDevice

LAYERS, BLOCK_SIZE, HIDDEN = 2, 4, 3
BLOCK_BYTES = LAYERS * BLOCK_SIZE * HIDDEN * 4
NUM_BLOCKS, BLOCKS_PER_CHUNK = 8, 3
ROWS_PER_CHUNK = BLOCKS_PER_CHUNK * BLOCK_SIZE
GEOMETRY = RingGeometry(NUM_BLOCKS, BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS * BLOCK_BYTES)
NBYTES = GEOMETRY.rows_bytes + GEOMETRY.stamps_bytes
RING, EVENT = b"ring".ljust(64, b"\0"), b"event".ljust(64, b"\0")


def content(number: int) -> npt.NDArray[np.int32]:
    """Chunk number `number`, int32 `[blocks, layers, block_size, hidden]`."""
    shape = (BLOCKS_PER_CHUNK, LAYERS, BLOCK_SIZE, HIDDEN)
    return (number * 1000 + np.arange(np.prod(shape))).astype(np.int32).reshape(shape)


class SimWorker:
    """Owns the ring."""

    def __init__(self, device: SimDevice, ring: npt.NDArray[np.uint8], event: bytes) -> None:
        self.device, self.ring = device, ring
        self.stream = device.create_stream()
        self.event = device.open_event(event)

    def write(self, number: int, blocks: Sequence[int], *, record: bool = True) -> None:
        """Queue a step that fills blocks with a chunk.

        Args:
            record: the event at the step's end; without, the step has not come to its end yet.
        """
        rows = content(number)
        stamps = first_stamp(number + 1, 0) + np.arange(ROWS_PER_CHUNK, dtype=np.int64)
        for block in blocks:
            self._write_stamps(block, np.full(BLOCK_SIZE, EMPTY, np.int64))
        for place, block in enumerate(blocks):
            start = block * BLOCK_BYTES
            target = self.ring[start : start + BLOCK_BYTES]
            self.device.queue_write(self.stream, target, rows[place].reshape(-1).view(np.uint8))
        for place, block in enumerate(blocks):
            self._write_stamps(block, stamps[place * BLOCK_SIZE :][:BLOCK_SIZE])
        if record:
            self.device.record_event(self.event, self.stream)

    def _write_stamps(self, block: int, stamps: npt.NDArray[np.int64]) -> None:
        start = GEOMETRY.stamps_offset + block * BLOCK_SIZE * 8
        target = self.ring[start : start + BLOCK_SIZE * 8]
        self.device.queue_write(self.stream, target, stamps.view(np.uint8))

    def after_submit(self, number: int, blocks: Sequence[int]) -> None:
        """Between sending a store and its answer: the blocks are not touched."""


@dataclass
class Findings:
    """What a run has shown; `wrong` is what may never be.

    Attributes:
        stored: copies that were proven, and had every byte right.
        refused: copies whose stamps did not fit.
        wrong: copies that were called proven, and had a wrong byte, there and then or a while later.
        late: copies that were called over while one of them was under way.
        broken: rules of device memory that were broken.
    """

    stored: int = 0
    refused: int = 0
    wrong: int = 0
    late: int = 0
    broken: list[str] = field(default_factory=list)

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            self.stored + other.stored,
            self.refused + other.refused,
            self.wrong + other.wrong,
            self.late + other.late,
            self.broken + other.broken,
        )


class SimRun:
    """One device, worker and copier; `end` closes them and gives the findings."""

    def __init__(
        self,
        seed: int,
        copy_class: type[RingCopy] = RingCopy,
        worker_class: type[SimWorker] = SimWorker,
        slots: int = 6,
    ) -> None:
        self.ring, event = np.zeros(NBYTES, np.uint8), np.zeros(16, np.uint8)
        self.ring[GEOMETRY.stamps_offset :].view(np.int64)[:] = EMPTY
        self.device = SimDevice(seed, {RING: self.ring, EVENT: event}.__getitem__)
        self.pool = np.zeros((slots, BLOCKS_PER_CHUNK * BLOCK_BYTES), np.uint8)
        self.device.register_host(self.pool.reshape(-1))
        self.worker = worker_class(self.device, self.ring, EVENT)
        self.copier = copy_class(self.device, GEOMETRY, NBYTES, RING)
        self.copier.open()
        self.found = Findings()

    def write_and_store(self, number: int, first: int) -> None:
        """Chunk number `number`, by way of the ring, into slot `number`."""
        blocks = (first, first + 1, first + 4)  # a run of two, and one
        self.worker.write(number, blocks)
        self.worker.after_submit(number, blocks)
        self.store(number, blocks, self.pool[number])

    def store(self, number: int, blocks: tuple[int, ...], slot: npt.NDArray[np.uint8]) -> None:
        """Copy what the ring should hold as chunk number `number`, and see what came of it."""
        found = self.found
        chunk = ChunkCopy(blocks, first_stamp(number + 1, 0), slot, layers=LAYERS)
        try:
            fault = self.copier.copy([chunk], EVENT)
        except DeviceError as error:
            found.broken.append(str(error))
            return
        if fault is not None:
            found.refused += 1
            return
        expected = content(number).tobytes()
        right = slot.tobytes() == expected
        found.late += self.device.will_write(slot)
        self.device.steps(200)  # whatever comes later must not change what was proven
        right = right and slot.tobytes() == expected
        found.stored += right
        found.wrong += not right

    def end(self) -> Findings:
        """Let everything go."""
        try:
            self.copier.close()
            self.device.unregister_host(self.pool.reshape(-1))
            self.device.check_free(self.ring)
        except DeviceError as error:
            self.found.broken.append(str(error))
        return self.found


def run(
    seed: int,
    copy_class: type[RingCopy] = RingCopy,
    worker_class: type[SimWorker] = SimWorker,
    chunks: int = 6,
) -> Findings:
    """Some steps and stores, from one seed."""
    one = SimRun(seed, copy_class, worker_class, chunks)
    for number in range(chunks):
        one.write_and_store(number, number % 3)
    return one.end()


def store_twice(seed: int, copy_class: type[RingCopy]) -> Findings:
    """The same chunk out of the same blocks into two slots."""
    one = SimRun(seed, copy_class)
    blocks = (0, 1, 2)
    one.worker.write(0, blocks)
    one.device.steps(500)
    for slot in one.pool[:2]:
        one.store(0, blocks, slot)
        one.device.steps(200)
    return one.end()
