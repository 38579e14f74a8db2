"""QRingBufferAdapter: the only place of the worker that speaks to the server.

Threads: everything here runs on the engine's thread, but for `_on_lost` and `_on_restored`, which the
heartbeat's thread calls; those only register again and count up `_generation`.

Whose are a ring block's bytes? The ledger's while its chunk is open, the adapter's from
`submit_q_store_request` until the server has answered. Without an answer the blocks wait in quarantine
until the copy is known to be over: the server's process has died (*it* has closed the lifeline), or has
taken our ring anew since the store was sent (it drains the old one first). With bytes inline nobody but the sender
(inline_sender.py) reads them, and it has done with a store's blocks when the store's future is done.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.in_flight import InFlight, verdict
from lmcache_qclient.capture.inline_sender import InlineSender
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.connection import INLINE, Connection
from lmcache_qclient.link.health import Heartbeat
from lmcache_qclient.link.lifeline import RING_TOKEN_BYTES
from lmcache_qprotocol.keys import feature_model_name
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qprotocol.limits import MAX_NAME_CHARS
from lmcache_qprotocol.messages import (
    DeviceMemory,
    HelloReply,
    RangeKey,
    RingDescription,
    StoreProof,
    StoreResult,
    WorkerReport,
)
from lmcache_qprotocol.operations import REGISTER_Q_CACHE, STORE_Q, UNREGISTER_Q_CACHE
from lmcache_qprotocol.reasons import LossReason

logger = logging.getLogger(__name__)

REPORT_AGE_S = 0.25
"""A report is taken at most so often while steps run: it costs as much as the rest of a step's end."""


@dataclass(frozen=True)
class TransferContext:
    """The geometry that both sides have agreed on: tokens per chunk, and ring blocks per chunk."""

    tokens_per_chunk: int
    blocks_in_chunk: int


@dataclass(frozen=True)
class _Registration:
    ring: QRingBuffer
    layout: Layout
    description_size: int


def _device_memory(ring: QRingBuffer) -> DeviceMemory:
    memory = ring.device_memory
    assert memory is not None
    return DeviceMemory(uuid=memory.uuid, handle=memory.handle, nbytes=memory.nbytes)


class QRingBufferAdapter:
    """See the head of this file.

    Args:
        connection: an open connection.
        instance_id: the engine's id of this worker's KV cache.
        model_name: as the engine calls it, without a feature's suffix.
        world_size: TP size times PP size.
        rank: this worker's.
        account: where results are counted.
        timeout_s: for registering, seconds.
        heartbeat_interval_s: between two pings, seconds.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        instance_id: str,
        model_name: str,
        world_size: int,
        rank: int,
        account: Account,
        timeout_s: float = 10.0,
        heartbeat_interval_s: float = 10.0,
    ) -> None:
        self.connection = connection
        self.instance_id = instance_id
        self.model_name = model_name
        self.world_size = world_size
        self.rank = rank
        self.account = account
        self.context: TransferContext | None = None
        self._timeout_s = timeout_s
        self._registration: _Registration | None = None
        self._layout_id = b""
        self._key_model_name = ""
        self._in_flight: dict[int, InFlight] = {}
        self._quarantine: list[InFlight] = []
        self._generation = 0
        self._sequence = itertools.count()
        self._report: WorkerReport = account.report()
        self._report_due = 0.0
        self._refused: set[LossReason] = set()
        self._heartbeat = Heartbeat(
            connection,
            interval_s=heartbeat_interval_s,
            on_lost=self._on_lost,
            on_restored=self._on_restored,
            ping_payloads=lambda: (self.instance_id, self._report),
        )
        self._inline = False
        self._sender = InlineSender(connection, timeout_s, lambda: self._heartbeat.healthy)

    @property
    def features(self) -> tuple[str, ...]:
        """Feature names that the server stores."""
        return self.connection.hello.features

    @property
    def tokens_per_chunk(self) -> int:
        """The server's chunk size."""
        return self.connection.hello.chunk_size

    def establish_transfer_context(self, ring_block_size: int) -> TransferContext:
        """Agree on the geometry; called when the engine registers its KV caches."""
        chunk = self.tokens_per_chunk
        self.context = TransferContext(chunk, chunk // ring_block_size)
        return self.context

    # --- registering ------------------------------------------------------------------------------------------

    def register_q_ring(self, ring: QRingBuffer, layout: Layout) -> None:
        """Tell the server about the ring.

        Raises:
            RuntimeError: no transfer context: register KV caches first.
            ConnectionError: no answer in time, or no Unix socket to pass memory over.
            RequestError: the server refused.
        """
        if self.context is None:
            raise RuntimeError("no transfer context: register KV caches first, then the query ring")
        block_size = self.context.tokens_per_chunk // self.context.blocks_in_chunk
        if ring.block_size != block_size:
            raise ValueError(
                f"the ring's block size is {ring.block_size}, the transfer context's {block_size}"
            )
        self._registration = _Registration(ring, layout, block_size)
        self._layout_id = layout_id(layout)
        self._key_model_name = feature_model_name(self.model_name, layout.feature)
        self._send_registration()

    def _send_registration(self) -> None:
        registration = self._registration
        if registration is None or self.context is None:
            return
        ring, kind = registration.ring, self._kind(registration.ring)
        description = RingDescription(
            layout=registration.layout,
            num_blocks=ring.num_blocks,
            block_size=ring.block_size,
            chunk_size=self.context.tokens_per_chunk,
            ring_token=self._offer(ring) if kind == "shm" else os.urandom(RING_TOKEN_BYTES),
            stamps_offset=0 if kind == "inline" else ring.stamps_offset,
            kind=kind,
            device=_device_memory(ring) if kind == "cuda" else None,
        )
        payloads: tuple[object, ...] = (
            self.instance_id,
            (),
            self.model_name,
            self.world_size,
            "vllm",
            {},
            (),
            description,
        )
        connection = self.connection
        connection.link.call(REGISTER_Q_CACHE, payloads, self._timeout_s, connection.is_alive)
        self._inline = kind == "inline"

    def _kind(self, ring: QRingBuffer) -> str:
        """How the server is to get at the ring; see `RingDescription`.

        Raises:
            ConnectionError: it can't.
        """
        lifeline = self.connection.lifeline
        if self.connection.transport == INLINE and ring.memory is not None:
            return "inline"
        if lifeline is None or (ring.memory is None and ring.device_memory is None):
            raise ConnectionError(
                "the server's lifeline (a Unix socket) is not reachable from here, and the ring goes over it: "
                "run the server on this host, mount its runtime directory into this container, or let bytes of a ring "
                f"in host memory go inline (lmcache.q.transport: auto): {self.connection.no_lifeline_because}"
            )
        return "shm" if ring.memory is not None else "cuda"

    def _offer(self, ring: QRingBuffer) -> bytes:
        """Hand the ring's memory over; its token."""
        assert self.connection.lifeline is not None
        assert ring.memory is not None
        return self.connection.lifeline.offer_ring(ring.memory.fd, ring.nbytes)

    def reregister_q_ring(self) -> None:
        """Register the same ring again, after the server came back; nothing if no ring was ever built.

        Raises:
            ConnectionError, RequestError: as `register_q_ring`.
        """
        self._send_registration()

    def shutdown_q_ring(self, deadline_s: float = 5.0) -> bool:
        """Wait for stores under way, then tell the server that the ring goes; a time-out is a warning only.

        Returns:
            The server uses the ring's memory no more, as far as it has said.
        """
        let_go = True
        deadline = time.monotonic() + deadline_s
        for item in list(self._in_flight.values()):
            try:
                item.future.exception(timeout=max(0.0, deadline - time.monotonic()))
            except concurrent.futures.TimeoutError:
                break
        self.reclaim_finished_q_stores()
        self._give_up_unanswered()
        self.update_report()
        self._heartbeat.stop()
        self._sender.close()
        if self._registration is not None:
            try:
                payloads = (self.instance_id, self._report)
                timeout_s, is_alive = min(deadline_s, self._timeout_s), self.connection.is_alive
                self.connection.link.call(UNREGISTER_Q_CACHE, payloads, timeout_s, is_alive)
            except Exception as error:  # noqa: BLE001 - shutting down goes on whatever the server does
                let_go = False
                logger.warning("could not unregister the query ring, shutdown goes on: %s", error)
        self._registration = None
        self.connection.close()
        self._sender.join()
        return let_go

    # --- storing ----------------------------------------------------------------------------------------------

    def submit_q_store_request(self, chunk: FinishedChunk) -> int | None:
        """Send one STORE_Q; the blocks come back through `reclaim_finished_q_stores`.

        Returns:
            The store's sequence number; None when nothing was sent (the tokens are counted, the blocks free again).
        """
        self._heartbeat.start()
        if not self._heartbeat.healthy:
            self._settle(chunk, LossReason.SERVER_UNAVAILABLE)
            return None
        key = RangeKey(
            model_name=self._key_model_name,
            world_size=self.world_size,
            worker_id=self.rank,
            start=chunk.start,
            end=chunk.end,
            request_id=chunk.request_id[:MAX_NAME_CHARS],
            cache_salt=chunk.cache_salt,
            chunk_hashes=(chunk.chunk_hash,),
            layout_id=self._layout_id,
            parent_hash=chunk.parent_hash,
            piece_tokens=chunk.piece_tokens,
            piece_items=chunk.piece_items,
        )
        proof = StoreProof(nonces=(chunk.nonce,), claim=chunk.claim)
        generation = self._generation  # read before sending, so that it is never too new
        inline = self._inline
        try:
            future = self._submit(chunk, key, proof, inline)
        except Exception as error:  # noqa: BLE001 - one request's odd key must not cost other requests theirs
            # Not its repr: that of a UnicodeEncodeError shows all of the text, which may be a salt.
            told = f"a store can't be encoded: {type(error).__name__}: {error}"
            self._log_refusal(LossReason.CAPTURE_DISABLED, told)
            self._settle(chunk, LossReason.CAPTURE_DISABLED)
            return None
        sequence = next(self._sequence)
        self._in_flight[sequence] = InFlight(chunk, future, generation, inline)
        return sequence

    def _submit(
        self, chunk: FinishedChunk, key: RangeKey, proof: StoreProof, inline: bool
    ) -> concurrent.futures.Future[StoreResult]:
        if not inline or self._registration is None:
            payloads = (key, self.instance_id, (chunk.blocks,), self._event_handle, proof)
            return self.connection.link.submit(STORE_Q, payloads)
        ring = self._registration.ring
        return self._sender.submit(key, self.instance_id, proof, ring, chunk.blocks)

    def reclaim_finished_q_stores(self) -> int:
        """Give the blocks of finished stores back and count their tokens; never waits.

        Returns:
            Stores that have ended.
        """
        done = [sequence for sequence, item in self._in_flight.items() if item.future.done()]
        for sequence in done:
            item = self._in_flight.pop(sequence)
            end = verdict(item.future, item.gathered_here)
            if end.reason is not None:
                self._log_refusal(end.reason, end.message)
            if end.stranger:
                self._heartbeat.beat_now()  # it learns the same, and registers again
            if end.copy_over:
                self._settle(item.chunk, end.reason)
            else:
                self._count(item.chunk, end.reason)
                self._quarantine.append(item)
        self._release_quarantine()
        return len(done)

    def wait_for_store(self, sequence: int, timeout_s: float | None = None) -> None:
        """Wait until a store is answered; for tools, never called from a forward pass.

        Raises:
            TimeoutError: no answer within `timeout_s`.
        """
        item = self._in_flight.get(sequence)
        if item is None:
            return
        try:
            item.future.exception(timeout_s)
        except (
            concurrent.futures.TimeoutError
        ):  # another class than TimeoutError before Python 3.11
            raise TimeoutError(f"store {sequence} has no answer after {timeout_s} s") from None

    def wait_for_any_store(self, timeout_s: float) -> None:
        """Wait until some store under way is answered, at most `timeout_s` seconds."""
        futures = [item.future for item in self._in_flight.values()]
        concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def _give_up_unanswered(self) -> None:
        """Count what nobody will wait for any more; whether it is stored after all, the worker can't know."""
        unanswered, self._in_flight = list(self._in_flight.values()), {}
        for item in unanswered:
            self._count(item.chunk, LossReason.SERVER_UNAVAILABLE)
        if unanswered:
            logger.warning(
                "%d stores have no answer yet at shutdown: their tokens are counted as server_unavailable",
                len(unanswered),
            )
            self._quarantine += unanswered

    @property
    def _event_handle(self) -> bytes:
        """One event serves all stores: its last record covers every row that has been stamped."""
        return self._registration.ring.event_handle if self._registration is not None else b""

    @property
    def stores_under_way(self) -> int:
        """Stores without an answer yet."""
        return len(self._in_flight)

    def renew_report(self, now: float) -> None:
        """`update_report`, if the present one is old enough; called once a step by the engine's thread.

        Args:
            now: monotonic seconds.
        """
        if now >= self._report_due:
            self._report_due = now + REPORT_AGE_S
            self.update_report()

    @property
    def report_is_stale(self) -> bool:
        """Whether the account has gone on since the report was taken."""
        account, report = self.account, self._report
        return (account.computed, account.pending) != (report.computed, report.pending)

    def update_report(self) -> None:
        """Take the snapshot that the next ping carries."""
        usage = self._registration.ring.usage() if self._registration is not None else (0, 0, 0, 0)
        self._report = self.account.report(usage[0], usage[2], usage[3])

    def tell_report(self) -> None:
        """Renew the report, and send it now."""
        self.update_report()
        self._heartbeat.beat_now()

    def _settle(self, chunk: FinishedChunk, reason: LossReason | None) -> None:
        self._count(chunk, reason)
        self._free(chunk.blocks)

    def _count(self, chunk: FinishedChunk, reason: LossReason | None) -> None:
        if reason is None:
            chunk.tally.capture(chunk.tokens)
        else:
            chunk.tally.lose(reason, chunk.tokens)

    def _free(self, blocks: Sequence[int]) -> None:
        if self._registration is not None:
            self._registration.ring.free(blocks)

    def _release_quarantine(self) -> None:
        if not self._quarantine:
            return
        # Not `is_open`: we close it ourselves to come back to a server that hangs, and may be copying.
        lifeline = self.connection.lifeline
        died = lifeline is not None and lifeline.hung_up
        waiting = []
        for item in self._quarantine:
            if died or item.generation < self._generation:
                self._free(item.chunk.blocks)
            else:
                waiting.append(item)
        self._quarantine = waiting

    def _log_refusal(self, reason: LossReason, message: str) -> None:
        if reason not in self._refused:
            self._refused.add(reason)
            logger.warning("queries not stored (%s; logged once): %s", reason.value, message)

    # --- called by the heartbeat's thread -----------------------------------------------------------------------

    def _on_lost(self) -> None:
        logger.warning(
            "the query server is unavailable: queries are counted as server_unavailable until it is back"
        )

    def _on_restored(self, hello: HelloReply) -> None:
        if self.context is not None and hello.chunk_size != self.context.tokens_per_chunk:
            raise ConnectionError(
                f"the server came back with chunk size {hello.chunk_size}, this engine runs with "
                f"{self.context.tokens_per_chunk}: restart the engine, or the server with its former chunk size"
            )
        self.reregister_q_ring()
        self._generation += 1
        logger.info("the query server is back: capture goes on")
