"""QRingBufferCapture: one worker's capture, step by step.

    begin_step(meta)                    the ledger decides which rows go where
    save_layer(name, tensors, slots)    the step's first attention layer, from inside the forward pass: finds the rows
    layer_sink(), output_sink()         what takes the later layers, before and behind their attention
    batched_submit_qstore_requests(e)   at the forward's exit: stamps, then one STORE_Q per finished chunk and feature
    reclaim()                           gives the blocks of finished stores back
    work_idle(ended)                    between steps, when none comes: what the next step would have done

The first layer of a step attributes the rows; every later layer and every feature reuses that, so all layers put the
same tokens into the same ring rows. A step that goes wrong is given up as a whole: its chunks are dropped and counted,
the next step starts clean.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from lmcache_qclient.capture.accounts import Accounts
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.full_ring import WaitForRoom
from lmcache_qclient.capture.geometry import (
    Geometry,
    geometries_of,
    layers_without_group,
    ring_block_size,
)
from lmcache_qclient.capture.ledger import Ledger
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.ring_size import RingBlocks, RingSettings, ring_blocks
from lmcache_qclient.capture.shared_blocks import SharedBlocks
from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qclient.capture.step_plan import Run
from lmcache_qclient.capture.step_rows import DeviceRows, HostRows, StepRows
from lmcache_qclient.capture.tensor_kind import LayerSink, TensorKind, Tensors
from lmcache_qclient.capture.track import Track, rows_behind, sink_of
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import NONCE_LIMIT

logger = logging.getLogger(__name__)

ANSWER_POLL_S = 0.05

OUTPUT = "o"
"""The tensor that is there only behind a layer's attention."""

Way = tuple[TensorKind, QRingBufferAdapter]
"""A feature, and its way to the server."""


class Connect(Protocol):
    """Opens a way to the server for one ring."""

    def __call__(self, feature: str, group: int = 0, /) -> QRingBufferAdapter:
        """Args: the feature's name, and which of the rank's groups of layers of one shape the ring is for."""


class QRingBufferCapture:
    """See the head of this file.

    Args:
        ways: the features to capture; each has an adapter of its own.
        settings: how large the rings may be, and what is captured.
        connect: opens further ways, where the model's layers have unlike shapes.
    """

    def __init__(
        self, ways: Sequence[Way], settings: RingSettings, connect: Connect | None = None
    ) -> None:
        self.ways = tuple(ways)
        self._connect = connect
        self.settings = settings
        self.tracks: tuple[Track, ...] = ()
        self._more: list[QRingBufferAdapter] = []
        self.ledger: Ledger | None = None
        self._captured: frozenset[str] = frozenset()
        self._logged: set[str] = set()
        self._room: WaitForRoom | None = None
        self._rows_kind: type[StepRows] = HostRows
        self._forget_step()

    def _forget_step(self) -> None:
        self._wanted: list[Run] = []
        self._found = False
        for track in self.tracks:
            track.forget_step()

    @property
    def adapters(self) -> tuple[QRingBufferAdapter, ...]:
        """Of all features, those without a layer on this rank too."""
        return (*(adapter for _, adapter in self.ways), *self._more)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Layers that some feature captures, in the model's order."""
        names = {name: None for track in self.tracks for name in track.geometry.layer_names}
        return tuple(names)

    @property
    def ring(self) -> QRingBuffer | None:
        """The first feature's."""
        return self.tracks[0].ring if self.tracks else None

    @property
    def geometry(self) -> Geometry | None:
        """The first feature's."""
        return self.tracks[0].geometry if self.tracks else None

    def setup_q_ring(
        self, kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
    ) -> None:
        """Build the rings for this rank's attention layers and register them; without any, warn and capture nothing.

        Raises:
            NotImplementedError: the engine's cache is not in host memory, or a layer's shape can't be stored.
            ValueError: layers are selected that the model does not have.
            ConnectionError, RequestError: from `register_q_ring`, and where layers have unlike shapes from `connect`.
        """
        found: list[tuple[TensorKind, QRingBufferAdapter, Geometry]] = []
        for kind, adapter in self.ways:
            groups = geometries_of(
                kv_caches, kv_cache_config, vllm_config, kind, self.settings.layers
            )
            if not groups:
                _check_stages(kind, vllm_config)
                logger.warning("no attention layer on this rank has a %s to capture", kind.words)
            found += [
                (kind, self._way_of(kind, adapter, group), geometry)
                for group, geometry in enumerate(groups)
            ]
        if not found:
            return
        geometry = found[0][2]
        self._check_device(geometry.device)
        if unknown := layers_without_group(kv_caches, kv_cache_config, vllm_config):
            logger.warning(
                "%d layers are in none of the engine's cache groups, and are neither captured nor stored: %s",
                len(unknown),
                ", ".join(unknown),
            )
        chunk_size = found[0][1].tokens_per_chunk
        block_size = ring_block_size(geometry.engine_block_size, chunk_size)
        layouts = [geometry.layout for *_, geometry in found]
        blocks = self._size(layouts, block_size, chunk_size, vllm_config)
        self._build(found, blocks, block_size, chunk_size)

    def _way_of(
        self, kind: TensorKind, adapter: QRingBufferAdapter, group: int
    ) -> QRingBufferAdapter:
        """Layers of each further shape have a ring, objects and an account of their own."""
        if group == 0:
            return adapter
        if self._connect is None:
            raise NotImplementedError(f"the model's layers have unlike shapes of {kind.words}")
        more = self._connect(kind.name, group)
        self._more.append(more)
        return more

    def _size(
        self, layouts: Sequence[Layout], block_size: int, chunk_size: int, vllm_config: Any
    ) -> RingBlocks:
        """All rings have as many blocks as the one with the widest rows can afford."""
        sizes = [
            ring_blocks(self.settings, layout, block_size, chunk_size, vllm_config.scheduler_config)
            for layout in layouts
        ]
        blocks = min(sizes)
        if blocks.total * block_size < chunk_size:
            logger.warning(
                "the query ring of %d blocks of %d tokens is smaller than one chunk of %d tokens: whatever needs more "
                "of a chunk is lost as ring_full. Set lmcache.q.ring_blocks to at least %d, or leave it out",
                blocks.total,
                block_size,
                chunk_size,
                chunk_size // block_size,
            )
        return blocks

    def _build(
        self,
        found: Sequence[tuple[TensorKind, QRingBufferAdapter, Geometry]],
        blocks: RingBlocks,
        block_size: int,
        chunk_size: int,
    ) -> None:
        shared = SharedBlocks(blocks.total, len(found))
        tracks = []
        for place, (kind, adapter, geometry) in enumerate(found):
            adapter.establish_transfer_context(block_size)
            ring = QRingBuffer(
                len(geometry.layer_names),
                blocks.total,
                block_size,
                geometry.layout.hidden_dim,
                geometry.dtype,
                geometry.device,
                allocator=shared.ring[place],
            )
            ring.populate(blocks.steps)
            tracks.append(Track(kind, adapter, geometry, ring, place))
        self.tracks = tuple(tracks)
        on_host = found[0][2].device.type == "cpu"
        self._rows_kind = HostRows if on_host else DeviceRows
        self._captured = frozenset(self.layer_names)
        adapters = [track.adapter for track in tracks]
        self._room = WaitForRoom(shared, adapters, self.settings.wait_s)
        self.ledger = Ledger(
            chunk_size=chunk_size,
            block_size=block_size,
            engine_block_size=found[0][2].engine_block_size,
            allocate=self._room.allocate,
            free=shared.free,
            account=Accounts([adapter.account for adapter in adapters]),
            pieces=self.settings.tails,
            first_nonce=1 + secrets.randbelow(NONCE_LIMIT - 1),
        )
        for track in tracks:
            track.adapter.register_q_ring(track.ring, track.geometry.layout)
            _tell_size(track)

    def _check_device(self, device: torch.device) -> None:
        if device.type == "cpu":
            return
        if device.type == "cuda" and self.settings.allow_untested_gpu:
            logger.warning(
                "capturing queries on %s, which has never been tried on a real card (docs/gpu.md): check what you get",
                device,
            )
            return
        raise NotImplementedError(
            f"queries are captured on CPU engines so far, this one runs on {device.type}: "
            "set lmcache.mp.transfer_intermediate_tensors to false"
            + (
                ", or lmcache.q.allow_untested_gpu to true if you want to try what has never run on a card"
                if device.type == "cuda"
                else ""
            )
        )

    # --- the step ---------------------------------------------------------------------------------------------

    def begin_step(self, meta: StepMeta) -> None:
        """Plan the step; before its forward pass."""
        self._forget_step()
        if self.ledger is None:
            return
        self.ledger.give_up(LossReason.LAYER_MISSING)  # a step before that has not been closed
        if self._room is not None:
            self._room.step_begins()
        spoilt = [track for track in self.tracks if track.has_spoilt]
        if spoilt and not self.ledger.open_chunks:
            for track in spoilt:
                track.forget_spoilt()
        plan = self.ledger.begin_step(meta)
        for track in self.tracks:
            track.begin_step(plan)
        self._wanted = plan.runs

    def save_layer(
        self, layer_name: str, tensors: Tensors, slot_mapping: torch.Tensor | None
    ) -> None:
        """Catch one layer's rows; nothing in a step without rows to capture, or already given up.

        Args:
            layer_name: the engine's name.
            tensors: `[rows, heads, head_dim]` or `[rows, hidden_dim]` each; rows may be padded at the end.
            slot_mapping: int64 `[rows]`, cache slots of the reference layer; -1 for padding.
        """
        if not self._wanted or slot_mapping is None or layer_name not in self._captured:
            return
        if not self._found:
            self._find_rows(rows_behind(slot_mapping, tensors))
        failed: dict[str, Exception] = {}
        for track in self.tracks:
            try:
                track.save_layer(layer_name, tensors)
            except Exception as error:  # noqa: BLE001 - costs this track its step, and no other
                failed[track.kind.name] = error
        if len(failed) == len(self.tracks):
            raise next(iter(failed.values()))
        for feature, cause in failed.items():
            self._log_failure(feature, cause)

    def _log_failure(self, feature: str, cause: Exception) -> None:
        if feature not in self._logged:
            self._logged.add(feature)
            logger.error(
                "%s missed a layer, which costs it that step (logged once a feature)",
                feature,
                exc_info=cause,
            )

    def save_q_layer(
        self, layer_name: str, query: torch.Tensor, slot_mapping: torch.Tensor | None
    ) -> None:
        """`save_layer` of a layer's queries."""
        self.save_layer(layer_name, {"q": query}, slot_mapping)

    def _find_rows(self, slot_mapping: torch.Tensor) -> None:
        assert self.ledger is not None
        first, *others = self.tracks
        rows = self._rows_kind(first.ring, slot_mapping, self._wanted)
        for request_id in rows.unmatched:
            self.ledger.leave_out(request_id, LossReason.UNMATCHED)
        first.use_rows(rows)
        for track in others:
            track.use_rows(rows.also(track.ring))
        self._found = True

    def layer_sink(self) -> LayerSink | None:
        """What takes every layer after the step's first, in as few calls as can be; None when nothing is captured.

        It is called between any two layers, where their weights have flushed the caches and each call costs. It may be
        called for the rest of the step after `give_up_step`, too: its rows are never stamped then.
        """
        return sink_of([track for track in self.tracks if track.kind.tensor != OUTPUT])

    def output_sink(self) -> LayerSink | None:
        """The same for what attention makes, from the step's first layer on; None when nobody captures that."""
        return sink_of([track for track in self.tracks if track.kind.tensor == OUTPUT])

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
        if self.ledger is None:
            return
        if self._wanted:
            self._close_step(event)
        self._forget_step()
        self._submit(self.ledger.end_step())

    def _submit(self, chunks: Sequence[FinishedChunk]) -> None:
        for chunk in chunks:
            for track in self.tracks:
                track.submit(chunk)

    def _close_step(self, event: bytes | None) -> None:
        assert self.ledger is not None
        whole = [track for track in self.tracks if track.is_whole]
        if event is None:
            self.ledger.give_up(LossReason.CAPTURE_DISABLED)
        elif not whole:
            self.ledger.give_up(LossReason.LAYER_MISSING)
        else:
            for track in self.tracks:
                if track in whole:
                    track.stamp()
                else:
                    track.spoil(self._wanted, LossReason.LAYER_MISSING)

    def reclaim(self) -> None:
        """Give the blocks of finished stores back, and renew the reports to the server."""
        now = time.monotonic()
        for adapter in self.adapters:
            adapter.reclaim_finished_q_stores()
            adapter.renew_report(now)

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
        self._submit(self.ledger.hand_out_idle() if ended is None else self.ledger.end_told(ended))
        for adapter in self.adapters:
            adapter.reclaim_finished_q_stores()
            if adapter.report_is_stale:
                adapter.tell_report()
        under_way = any(adapter.stores_under_way for adapter in self.adapters)
        return ANSWER_POLL_S if under_way else None

    def reregister(self) -> None:
        """After the server came back."""
        for adapter in self.adapters:
            adapter.reregister_q_ring()

    def shutdown(self) -> None:
        """Store what can be stored, count the rest, leave the server."""
        if self.ledger is not None:
            self.ledger.give_up(LossReason.CAPTURE_DISABLED)
            self._submit(self.ledger.flush())
        let_go = {id(adapter): adapter.shutdown_q_ring() for adapter in self.adapters}
        for track in self.tracks:
            # Freeing device memory that the server still has mapped is undefined; then it goes with this process.
            if let_go[id(track.adapter)] or not track.ring.event_handle:
                track.ring.close()


def _check_stages(kind: TensorKind, vllm_config: Any) -> None:
    """A reader waits for every stage of a pipeline, and would wait for ever for one that has nothing to store.

    Raises:
        NotImplementedError: there are several stages.
    """
    if int(vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise NotImplementedError(
            f"a pipeline stage without any layer that has a {kind.words}, beside others that have one, can't be "
            "captured: use fewer stages, or set lmcache.mp.transfer_intermediate_tensors to false"
        )


def _tell_size(track: Track) -> None:
    ring = track.ring
    if track.geometry.without:
        logger.info(
            "%d layers use another layer's KV cache and have no %s of their own: %s",
            len(track.geometry.without),
            track.kind.words,
            ", ".join(track.geometry.without),
        )
    logger.info(
        "%s ring: %d blocks of %d tokens, %d layers x %d elements of %s, %.1f MiB (outside the engine's budget)",
        track.kind.words,
        ring.num_blocks,
        ring.block_size,
        ring.num_layers,
        ring.hidden_dim,
        track.geometry.layout.dtype,
        ring.nbytes / 2**20,
    )
