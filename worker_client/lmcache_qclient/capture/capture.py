"""QRingBufferCapture: one worker's capture, step by step.

    begin_step(meta)                    the ledger decides which rows go where
    save_q_layer(name, query, slots)    for every attention layer, from inside the forward pass
    batched_submit_qstore_requests(e)   at the forward's exit: stamps, then one STORE_Q per finished chunk
    reclaim()                           gives the blocks of finished stores back
    work_idle(ended)                    between steps, when none comes: what the next step would have done

The first layer of a step attributes the rows; every later layer reuses that, so all layers put the same tokens into
the same ring rows. A step that goes wrong is given up as a whole: its chunks are dropped and counted, the next step
starts clean.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.full_ring import WaitForRoom
from lmcache_qclient.capture.geometry import (
    Geometry,
    geometry_of,
    layers_without_group,
    ring_block_size,
)
from lmcache_qclient.capture.ledger import Ledger
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.ring_size import RingSettings, ring_blocks
from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qclient.capture.step_plan import Run
from lmcache_qclient.capture.step_rows import HostRows, StepRows
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import NONCE_LIMIT

logger = logging.getLogger(__name__)

ANSWER_POLL_S = 0.05


class QRingBufferCapture:
    """See the head of this file.

    Args:
        adapter: the way to the server.
        settings: how large the ring may be, and whether pieces are stored.
    """

    def __init__(self, adapter: QRingBufferAdapter, settings: RingSettings) -> None:
        self.adapter = adapter
        self.settings = settings
        self.geometry: Geometry | None = None
        self.ring: QRingBuffer | None = None
        self.ledger: Ledger | None = None
        self._room: WaitForRoom | None = None
        self._layer_index: dict[str, int] = {}
        self._rows_kind: type[StepRows] = HostRows
        self._forget_step()

    def _forget_step(self) -> None:
        self._wanted: list[Run] = []
        self._rows: StepRows | None = None
        self._layers_written: list[int] = []

    def setup_q_ring(
        self, kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
    ) -> None:
        """Build the ring for this rank's attention layers and register it; without any, warn and capture nothing.

        Raises:
            NotImplementedError: the engine's cache is not in host memory, or its layers have unlike heads.
            ConnectionError, RequestError: from `register_q_ring`.
        """
        geometry = geometry_of(kv_caches, kv_cache_config, vllm_config)
        if geometry is None:
            logger.warning("no attention layer on this rank: no queries are captured here")
            return
        if geometry.device.type != "cpu":
            raise NotImplementedError(
                f"queries are captured on CPU engines so far, this one runs on {geometry.device.type}: "
                "set lmcache.mp.transfer_intermediate_tensors to false"
            )
        if shared := layers_without_group(kv_caches, kv_cache_config):
            logger.warning(
                "the queries of %d layers that share another layer's KV cache are not captured, and are not in what is "
                "stored: %s",
                len(shared),
                ", ".join(shared),
            )
        chunk_size = self.adapter.tokens_per_chunk
        block_size = ring_block_size(geometry.engine_block_size, chunk_size)
        blocks = ring_blocks(
            self.settings, geometry.layout, block_size, chunk_size, vllm_config.scheduler_config
        )
        if blocks.total * block_size < chunk_size:
            logger.warning(
                "the query ring of %d blocks of %d tokens is smaller than one chunk of %d tokens: whatever needs more "
                "of a chunk is lost as ring_full. Set lmcache.q.ring_blocks to at least %d, or leave it out",
                blocks.total,
                block_size,
                chunk_size,
                chunk_size // block_size,
            )
        self.adapter.establish_transfer_context(block_size)
        ring = QRingBuffer(
            len(geometry.layer_names),
            blocks.total,
            block_size,
            geometry.layout.hidden_dim,
            geometry.dtype,
        )
        ring.populate(blocks.steps)
        self._room = WaitForRoom(ring, self.adapter, self.settings.wait_s)
        self.ledger = Ledger(
            chunk_size=chunk_size,
            block_size=block_size,
            engine_block_size=geometry.engine_block_size,
            allocate=self._room.allocate,
            free=ring.free,
            account=self.adapter.account,
            pieces=self.settings.tails,
            first_nonce=1 + secrets.randbelow(NONCE_LIMIT - 1),
        )
        self.geometry, self.ring = geometry, ring
        self._layer_index = {name: index for index, name in enumerate(geometry.layer_names)}
        self.adapter.register_q_ring(ring, geometry.layout)
        logger.info(
            "query ring: %d blocks of %d tokens, %d layers x %d elements of %s, %.1f MiB (outside the engine's budget)",
            blocks.total,
            block_size,
            ring.num_layers,
            ring.hidden_dim,
            geometry.layout.dtype,
            ring.nbytes / 2**20,
        )

    # --- the step ---------------------------------------------------------------------------------------------

    def begin_step(self, meta: StepMeta) -> None:
        """Plan the step; before its forward pass."""
        self._forget_step()
        if self.ledger is None or self.ring is None:
            return
        self.ledger.give_up(LossReason.LAYER_MISSING)  # a step before that has not been closed
        if self._room is not None:
            self._room.step_begins()
        plan = self.ledger.begin_step(meta)
        self.ring.clear_blocks(plan.clear_blocks)
        for slot, length in plan.clear_rows:
            self.ring.clear_rows(slot, length)
        self._wanted = plan.runs

    def save_q_layer(
        self, layer_name: str, query: torch.Tensor, slot_mapping: torch.Tensor | None
    ) -> None:
        """Catch one layer's rows; nothing in a step without rows to capture, or already given up.

        Args:
            layer_name: the engine's name.
            query: `[rows, heads, head_dim]` or `[rows, hidden_dim]`; rows may be padded at the end.
            slot_mapping: int64 `[rows]`, cache slots of the reference layer; -1 for padding.
        """
        layer = self._layer_index.get(layer_name)
        if not self._wanted or layer is None or slot_mapping is None:
            return
        assert self.ring is not None
        assert self.ledger is not None
        if self._rows is None:
            self._rows = self._rows_kind(self.ring, slot_mapping[: len(query)], self._wanted)
            for request_id in self._rows.unmatched:
                self.ledger.leave_out(request_id, LossReason.UNMATCHED)
        self._rows.write(layer, query)
        self._layers_written.append(layer)

    def layer_sink(self) -> Callable[[str, Mapping[str, torch.Tensor]], None] | None:
        """What takes every layer after the step's first, in as few calls as can be; None when nothing is captured.

        It is called between any two layers, where their weights have flushed the caches and each call costs. It may be
        called for the rest of the step after `give_up_step`, too: its rows are never stamped then.
        """
        if self._rows is None:
            return None
        write, layers, written = self._rows.write, self._layer_index, self._layers_written

        def sink(layer_name: str, tensors: Mapping[str, torch.Tensor]) -> None:
            layer = layers.get(layer_name)
            if layer is not None:
                write(layer, tensors["q"])
                written.append(layer)

        return sink

    def give_up_step(self, reason: LossReason) -> None:
        """Drop what this step has captured; the next step starts clean."""
        self._forget_step()
        if self.ledger is not None:
            self.ledger.give_up(reason)

    def batched_submit_qstore_requests(self, event: bytes | None) -> None:
        """Submit what the step has finished; the plan is consumed.

        Args:
            event: handle of the device event that the copy waits for, b"" where there is none to wait for (CPU). None:
                no event could be had, every block reserved in this step goes back and is counted.
        """
        if self.ledger is None or self.ring is None:
            return
        if self._wanted:
            self._close_step(event)
        self._forget_step()
        for chunk in self.ledger.end_step():
            self.adapter.submit_q_store_request(chunk)

    def _close_step(self, event: bytes | None) -> None:
        assert self.ledger is not None
        assert self.ring is not None
        if event is None:
            self.ledger.give_up(LossReason.CAPTURE_DISABLED)
        elif self._rows is None or sorted(self._layers_written) != [*range(self.ring.num_layers)]:
            # One that was seen twice is no better: nobody knows which rows were the step's.
            self.ledger.give_up(LossReason.LAYER_MISSING)
        else:
            self._rows.stamp()

    def reclaim(self) -> None:
        """Give the blocks of finished stores back, and renew the report to the server."""
        self.adapter.reclaim_finished_q_stores()
        self.adapter.renew_report(time.monotonic())

    def work_idle(self, ended: Sequence[FinishedRequest] | None) -> float | None:
        """Between steps, when none has come for a while.

        Args:
            ended: requests that have ended since the last step; None when nobody here can know, then what is complete
                as it stands is stored as pieces.

        Returns:
            Seconds until it should be called again; None when nothing is under way.
        """
        if self.ledger is None:
            return None
        for chunk in self.ledger.hand_out_idle() if ended is None else self.ledger.end_told(ended):
            self.adapter.submit_q_store_request(chunk)
        self.adapter.reclaim_finished_q_stores()
        if self.adapter.report_is_stale:
            self.adapter.tell_report()
        return ANSWER_POLL_S if self.adapter.stores_under_way else None

    def shutdown(self) -> None:
        """Store what can be stored, count the rest, leave the server."""
        if self.ledger is not None:
            self.ledger.give_up(LossReason.CAPTURE_DISABLED)
            for chunk in self.ledger.flush():
                self.adapter.submit_q_store_request(chunk)
        self.adapter.shutdown_q_ring()
        if self.ring is not None:
            self.ring.close()
