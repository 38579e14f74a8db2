"""One upload: a store of one chunk (or piece) whose bytes come in messages, not out of a ring.

    begin ─▶ OPEN ── part, part, ... ── end ─▶ SEALING ── stamps are right ─▶ committed
               │                                  └────── they are not, or its instance is dead ─▶ failed
               └── its time is over, a part is wrong or can't be copied, its instance goes ─▶ failed ("given up")

Parts come in order and without gaps: what follows a lost one can't be taken for it. Its slot is RESERVED meanwhile, and
stays so after a failure until no thread writes to it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_qprotocol.messages import StoreOutcome
from lmcache_qprotocol.stamps import STAMP_BYTES
from lmcache_qserver.copying import ChunkCopy, Job
from lmcache_qserver.qstore.index import Write
from lmcache_qserver.qstore.instance import Instance
from lmcache_qserver.qstore.store_check import CheckedStore, PlannedChunk


@dataclass(eq=False, slots=True)
class Upload:
    """See the head of this file. Only `Uploads` changes it.

    Attributes:
        target: the slot's bytes, uint8 `[nbytes]`, writable.
        received: bytes that have come; they are in the lane, or copied.
        sealing: the stamps have come; it ends by itself.
        jobs: copies that are not over.
        ended: done with what became of it.
    """

    upload_id: int
    client: Hashable
    instance: Instance
    store: CheckedStore
    planned: PlannedChunk
    write: Write
    target: npt.NDArray[np.uint8]
    expires_at: float
    ended: asyncio.Future[StoreOutcome]
    received: int = 0
    sealing: bool = False
    jobs: set[Job[Any]] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes that are to come."""
        return self.store.object_bytes

    @property
    def stamps_bytes(self) -> int:
        """Bytes of its stamps."""
        first, end = self.store.rows
        return (end - first) * STAMP_BYTES

    def chunk_copy(self) -> ChunkCopy:
        """What is to be proven."""
        first, end = self.store.rows
        description = self.store.description
        return ChunkCopy(
            tuple(range(description.blocks_of(self.store.rows))),
            self.planned.first_stamp,
            self.target,
            skip=first % description.block_size,
            rows=end - first,
            layers=len(description.layout.layer_ids),
        )

    def watch(self, job: Job[Any]) -> None:
        """Remember a copy until it is over."""
        self.jobs.add(job)
        job.over.add_done_callback(lambda _: self.jobs.discard(job))

    def copies_over(self) -> asyncio.Future[Any] | None:
        """Done when no thread writes to the target any more; None when none does."""
        running = [job.over for job in self.jobs if not job.over.done()]
        return asyncio.gather(*running) if running else None
