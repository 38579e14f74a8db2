"""One feature's way from the hooks to the server: its layers, its ring, its stores, its account.

All tracks of a worker share one ledger: a ring block belongs to the same chunk in every track's ring, and a step's rows
are found once. What goes wrong in one track alone costs that track alone: the chunks whose rows it did not get are
*spoilt*, and never stored from its ring.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import torch

from lmcache_qclient.capture.account import RequestTally
from lmcache_qclient.capture.accounts import Tallies
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.geometry import Geometry
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.step_plan import Run, StepPlan
from lmcache_qclient.capture.step_rows import StepRows
from lmcache_qclient.capture.tensor_kind import LayerSink, TensorKind, Tensors
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import nonce_of

logger = logging.getLogger(__name__)


class Track:
    """See the head of this file.

    Args:
        kind: what it catches.
        adapter: its way to the server, which nobody else uses.
        geometry: of its layers.
        ring: whose blocks are shared with the other tracks' rings.
        place: among the worker's tracks.
    """

    def __init__(
        self,
        kind: TensorKind,
        adapter: QRingBufferAdapter,
        geometry: Geometry,
        ring: QRingBuffer,
        place: int = 0,
    ) -> None:
        self.kind = kind
        self.adapter = adapter
        self.geometry = geometry
        self.ring = ring
        self._place = place
        self._layer_index = {name: index for index, name in enumerate(geometry.layer_names)}
        self._rows: StepRows | None = None
        self._written: list[int] = []
        self._spoilt: dict[int, LossReason] = {}  # by nonce

    # --- the step ---------------------------------------------------------------------------------------------

    def forget_step(self) -> None:
        """Nothing of the step counts any more; what still comes of it is never stamped."""
        self._rows = None
        self._written = []

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass: rows that are given away are nobody's until they are written."""
        self.ring.clear_blocks(plan.clear_blocks)
        for slot, length in plan.clear_rows:
            self.ring.clear_rows(slot, length)

    def use_rows(self, rows: StepRows) -> None:
        """The step's rows have been found.

        Args:
            rows: in this track's ring.
        """
        self._rows = rows

    def save_layer(self, layer_name: str, tensors: Tensors) -> None:
        """One layer's rows, if the layer is captured and the tensor is there."""
        layer, tensor = self._layer_index.get(layer_name), tensors.get(self.kind.tensor)
        if layer is not None and tensor is not None and self._rows is not None:
            self._check_dtype(layer_name, tensor)
            self._rows.write(layer, tensor)
            self._written.append(layer)

    def sink(self) -> LayerSink | None:
        """`save_layer` for the rest of the step, in as few calls as can be; None when nothing is captured."""
        if self._rows is None:
            return None
        write, layers, written = self._rows.write, self._layer_index, self._written
        tensor, dtype, check = self.kind.tensor, self.ring.dtype, self._check_dtype

        def sink(layer_name: str, tensors: Tensors) -> None:
            layer = layers.get(layer_name)
            if layer is not None:
                rows = tensors[tensor]
                if rows.dtype is not dtype:
                    check(layer_name, rows)
                write(layer, rows)
                written.append(layer)

        return sink

    def _check_dtype(self, layer_name: str, tensor: torch.Tensor) -> None:
        """Rows may be cast, but for 8-bit ones: these are worth nothing without the scale they were quantized with.

        Raises:
            ValueError: one of both has 8 bits, and the other another type.
        """
        has, stored = tensor.dtype, self.ring.dtype
        if has is not stored and 1 in (has.itemsize, stored.itemsize):
            raise ValueError(
                f"{layer_name} brought {has}, what is stored is {stored}: quantized elsewhere than its layer says"
            )

    @property
    def is_whole(self) -> bool:
        """Whether every layer has come once. One that was seen twice is no better: whose rows are there then?"""
        return self._rows is not None and sorted(self._written) == [*range(self.ring.num_layers)]

    def stamp(self) -> None:
        """The step is whole: its rows count."""
        assert self._rows is not None
        self._rows.stamp()
        self.ring.record_event()

    def spoil(self, runs: Iterable[Run], reason: LossReason) -> None:
        """This track alone did not get the step's rows: the chunks that they belong to can't be stored from here."""
        for nonce in {nonce_of(run.stamp) for run in runs}:
            self._spoilt.setdefault(nonce, reason)

    @property
    def has_spoilt(self) -> bool:
        """Whether some chunk that was open lately is spoilt."""
        return bool(self._spoilt)

    def forget_spoilt(self) -> None:
        """No chunk is open any more."""
        self._spoilt.clear()

    # --- storing ----------------------------------------------------------------------------------------------

    def submit(self, chunk: FinishedChunk) -> None:
        """Send one STORE_Q, or count why not."""
        tally = self._tally_of(chunk)
        reason = self._spoilt.pop(chunk.nonce, None) if self._spoilt else None
        if reason is None:
            own = chunk if tally is chunk.tally else dataclasses.replace(chunk, tally=tally)
            self.adapter.submit_q_store_request(own)
        else:
            tally.lose(reason, chunk.tokens)
            self.ring.free(chunk.blocks)

    def _tally_of(self, chunk: FinishedChunk) -> RequestTally:
        tally = chunk.tally
        return tally.each[self._place] if isinstance(tally, Tallies) else tally


def sink_of(tracks: Sequence[Track]) -> LayerSink | None:
    """One sink for several tracks; what one of them raises costs no other its rows."""
    sinks = [sink for track in tracks if (sink := track.sink()) is not None]
    if len(sinks) < 2:
        return sinks[0] if sinks else None

    def every(layer_name: str, tensors: Tensors) -> None:
        failed: Exception | None = None
        for sink in sinks:
            try:
                sink(layer_name, tensors)
            except Exception as error:  # noqa: BLE001 - raised below
                failed = error
        if failed is not None:
            raise failed

    return every


def rows_behind(slot_mapping: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """The slots of the rows that came: an engine may pad the mapping further than its tensors."""
    return slot_mapping[: min(len(tensor) for tensor in tensors.values())]
