"""Storing one rank's part of a sequence, as a worker of an engine would.

It registers an instance of its own with memory of its own, sends a store per chunk, each with its tokens and its claim,
and goes again. It sends no report: it has computed nothing, and the engines' accounts are theirs.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from lmcache_qclient.link.connection import INLINE
from lmcache_qclient.link.lifeline import RING_TOKEN_BYTES
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qclient.link.upload import Payload, Uploader
from lmcache_qclient.qcache.catalog import RankPart, StoredLayout, base_name
from lmcache_qclient.qcache.chunks_to_store import ChunkToStore
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.staging import Staging
from lmcache_qclient.qcache.stitch import Bits
from lmcache_qprotocol.errors import ErrorCode, QServerError, RequestError
from lmcache_qprotocol.messages import (
    RangeKey,
    RingDescription,
    StoreOutcome,
    StoreProof,
    StoreResult,
)
from lmcache_qprotocol.operations import REGISTER_Q_CACHE, STORE_Q, UNREGISTER_Q_CACHE
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import first_stamp

RANK_MASK = 0xFF
"""Of a `kv_rank` word, the rank."""


class End(NamedTuple):
    """What became of a chunk."""

    chunk: ChunkToStore
    outcome: StoreOutcome


class _UnderWay(NamedTuple):
    slot: int
    chunk: ChunkToStore
    future: ReplyFuture


class PartStore:
    """A context manager; only inside `Session.run`.

    Args:
        layout: of one shape of layers.
        part: one of its ranks.
        chunk_size: the server's.

    Raises:
        RequestError: the server refuses the registration; lifeline_required where it can't reach our memory.
        ConnectionError: it does not answer.
    """

    def __init__(
        self, session: Session, layout: StoredLayout, part: RankPart, chunk_size: int, salt: str
    ) -> None:
        self._session = session
        self._layout = layout
        self._part = part
        self._chunk_size = chunk_size
        self._salt = salt
        self._inline = session.connection.transport == INLINE
        if not self._inline and session.connection.lifeline is None:
            raise RequestError(
                ErrorCode.LIFELINE_REQUIRED,
                "storing needs memory that the server can map: run on its host, or mount its runtime directory into "
                f"this container ({session.connection.no_lifeline_because})",
            )
        self._instance_id = f"qcache-{uuid.uuid4().hex}"
        self._staging = Staging(part.layout, chunk_size, shared=not self._inline)
        self._uploader = Uploader(session.connection, session.timeout_s)
        self._free = deque(range(self._staging.slots))
        self._under_way: deque[_UnderWay] = deque()
        self._ends: list[End] = []

    def __enter__(self) -> PartStore:
        try:
            self._register()
        except BaseException:
            self._staging.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._session.tell(UNREGISTER_Q_CACHE, (self._instance_id,))
                return
            with contextlib.suppress(QServerError, ConnectionError):  # everything has its end
                self._session.ask(UNREGISTER_Q_CACHE, (self._instance_id,))
        finally:
            self._staging.close()

    def store(self, chunks: Sequence[ChunkToStore], values: Bits) -> list[End]:
        """Send chunks until one is refused; returns when all that were sent have their end.

        Args:
            values: `[layers, tokens, heads, head_dim]` of this rank, for all of the sequence.

        Raises:
            RequestError, ConnectionError: the server can't serve a store, or does not answer.
        """
        for nonce, chunk in enumerate(chunks, start=1):
            if not self._free:
                self._take_end()
            if any(end.outcome.refused for end in self._ends):
                break
            self._send(chunk, nonce, values[:, chunk.start : chunk.end])
        while self._under_way:
            self._take_end()
        return self._ends

    def _register(self) -> None:
        staging, lifeline = self._staging, self._session.connection.lifeline
        token = os.urandom(RING_TOKEN_BYTES)
        if staging.memory is not None and lifeline is not None:
            token = lifeline.offer_ring(staging.memory.fd, staging.nbytes)
        description = RingDescription(
            layout=self._part.layout,
            num_blocks=staging.num_blocks,
            block_size=staging.block_size,
            chunk_size=self._chunk_size,
            ring_token=token,
            stamps_offset=0 if self._inline else staging.stamps_offset,
            kind="inline" if self._inline else "shm",
        )
        model_name = base_name(self._layout.model_name)
        payloads: tuple[Any, ...] = (
            self._instance_id,
            (),
            model_name,
            self._layout.world_size,
            "qcache",
            {},
            (),
        )
        self._session.ask(REGISTER_Q_CACHE, (*payloads, description))

    def _send(self, chunk: ChunkToStore, nonce: int, values: Bits) -> None:
        slot = self._free.popleft()
        blocks = self._staging.fill(slot, values, first_stamp(nonce, chunk.start))
        key = RangeKey(
            model_name=self._layout.model_name,
            world_size=self._layout.world_size,
            worker_id=self._part.kv_rank & RANK_MASK,
            start=chunk.start,
            end=chunk.end,
            request_id="qcache",
            cache_salt=self._salt,
            chunk_hashes=(chunk.name,),
            layout_id=self._part.layout_id,
            parent_hash=chunk.parent,
            piece_tokens=chunk.tokens,
            piece_items=chunk.items,
        )
        proof = StoreProof(nonces=(nonce,), claim=chunk.claim)
        if self._inline:
            self._upload(slot, chunk, key, proof)
            return
        payloads = (key, self._instance_id, (blocks,), b"", proof)
        self._under_way.append(_UnderWay(slot, chunk, self._session.submit(STORE_Q, payloads)))

    def _take_end(self) -> None:
        slot, chunk, future = self._under_way.popleft()
        result: StoreResult = self._session.wait(future, STORE_Q)
        self._note(slot, chunk, result)

    def _upload(self, slot: int, chunk: ChunkToStore, key: RangeKey, proof: StoreProof) -> None:
        payload = Payload(
            key,
            self._instance_id,
            proof,
            gather=lambda offset, out: self._staging.gather(slot, offset, out),
            stamps=lambda: self._staging.stamps(slot, chunk.num_tokens),
        )
        try:
            result = self._uploader.upload(payload)
        except RequestError as error:
            if error.code is not ErrorCode.UNKNOWN_UPLOAD:
                raise
            outcome = StoreOutcome(refused={LossReason.COPY_FAILED: 1}, message=error.message)
            result = StoreResult(b"", False, outcome)
        self._note(slot, chunk, result)

    def _note(self, slot: int, chunk: ChunkToStore, result: StoreResult) -> None:
        outcome = result.outcome or StoreOutcome(refused={LossReason.COPY_FAILED: 1})
        self._ends.append(End(chunk, outcome))
        self._free.append(slot)
