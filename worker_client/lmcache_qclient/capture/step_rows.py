"""The rows of one step: found by the step's first layer, written by every layer, stamped after the last.

Two ways to find them. Where the slot mapping lies in host memory, `HostRows` knows whose rows are missing. Where it is
on a device, `DeviceRows` must not look (that would wait for the device): a row that can't be found, or is there twice,
gets no stamp, and the server refuses the chunk that it belongs to. Either way a row is right or absent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy

import torch

from lmcache_qclient.capture.attribution import attribute, attribute_few, targets_of
from lmcache_qclient.capture.ring import QRingBuffer, to_device
from lmcache_qclient.capture.rows_aside import FEW
from lmcache_qclient.capture.step_plan import Run


class StepRows(ABC):
    """See the head of this file.

    Args:
        ring: where the rows go.
        slot_mapping: int64 `[rows]`, the cache slot of each row of the forward pass; -1 for padding.
        wanted: the rows of the step.

    Attributes:
        unmatched: requests of which it is known that rows are missing, or there more than once; they are written to no
            real row.
    """

    unmatched: tuple[str, ...] = ()

    def __init__(
        self, ring: QRingBuffer, slot_mapping: torch.Tensor, wanted: Sequence[Run]
    ) -> None:
        self._ring = ring
        self._rows = len(slot_mapping)
        self._begin(slot_mapping, wanted)
        self._attach()

    def also(self, ring: QRingBuffer) -> StepRows:
        """The same rows for another ring, in which the same blocks have the same owners: found once for both."""
        other = copy(self)
        other._ring = ring
        other._attach()
        return other

    def _begin(self, slot_mapping: torch.Tensor, wanted: Sequence[Run]) -> None:
        """What is the same for every ring."""
        self._ring_slots, self._stamps = self._find(slot_mapping, wanted)

    def _attach(self) -> None:
        """What is the same for every layer of the ring."""
        self._index = self._ring.index(self._ring_slots)

    @abstractmethod
    def _find(
        self, slot_mapping: torch.Tensor, wanted: Sequence[Run]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ring slot (-1: dropped) and stamp of each row; int64 `[rows]` on the ring's device."""

    def write(self, layer: int, query: torch.Tensor) -> None:
        """Write one layer's rows; rows of the query beyond the slot mapping are padding.

        Raises:
            ValueError: there are fewer rows than the first layer had.
        """
        self._check_rows(layer, query)
        self._ring.write(layer, query, self._index)

    def _check_rows(self, layer: int, query: torch.Tensor) -> None:
        if len(query) < self._rows:
            raise ValueError(
                f"layer {layer} of the ring brought {len(query)} rows, the step's first one {self._rows}"
            )

    def stamp(self) -> None:
        """All layers are written."""
        self._ring.stamp(self._ring_slots, self._stamps)


class HostRows(StepRows):
    """The slot mapping lies in host memory. Few rows wait aside until the last layer (rows_aside.py)."""

    def _begin(self, slot_mapping: torch.Tensor, wanted: Sequence[Run]) -> None:
        self._few = self._rows <= FEW
        if self._few:
            self._kept, self.unmatched = attribute_few(slot_mapping.tolist(), wanted)
        else:
            super()._begin(slot_mapping, wanted)

    def _attach(self) -> None:
        self._shape = torch.Size()
        self._numel = self._dim = -1
        self._layers: list[torch.Tensor] = []
        if not self._few:
            super()._attach()

    def write(self, layer: int, query: torch.Tensor) -> None:
        """See `StepRows`."""
        if not self._few:
            super().write(layer, query)
            return
        # Of as many dimensions and elements `copy_` takes the first layer's shape only; it broadcasts nothing then. To
        # compare shapes would cost as much as to copy.
        if query.numel() != self._numel or query.dim() != self._dim:
            query = self._fitted(layer, query)
        self._layers[layer].copy_(query)

    def _fitted(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """The query without padding, in the shape of the first layer's."""
        self._check_rows(layer, query)
        rows = self._ring.as_rows(layer, query)[: self._rows].detach()
        if not self._layers:
            assert self._ring.aside is not None
            self._shape = torch.Size((self._rows, *query.shape[1:]))
            self._layers = self._ring.aside.layers(self._shape)
            # An engine's tensors want no gradients; others are detached here, layer by layer.
            self._numel = -1 if query.requires_grad else self._shape.numel()
            self._dim = len(self._shape)
        return rows.reshape(self._shape)

    def stamp(self) -> None:
        """See `StepRows`."""
        if self._few:
            self._ring.take_aside(self._kept)
        else:
            super().stamp()

    def _find(
        self, slot_mapping: torch.Tensor, wanted: Sequence[Run]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = attribute(slot_mapping.numpy(), targets_of(wanted))
        self.unmatched = found.unmatched
        return torch.from_numpy(found.ring_slots), torch.from_numpy(found.stamps)


class DeviceRows(StepRows):
    """The slot mapping lies on a device, where nothing may be looked at."""

    def _find(
        self, slot_mapping: torch.Tensor, wanted: Sequence[Run]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = targets_of(wanted)
        asked, slots, stamps = (
            to_device(torch.from_numpy(rows), self._ring.device)
            for rows in (targets.engine_slots, targets.ring_slots, targets.stamps)
        )
        place = torch.searchsorted(asked, slot_mapping.contiguous()).clamp_(max=len(targets) - 1)
        found = asked.index_select(0, place) == slot_mapping
        hits = torch.zeros_like(asked).index_add_(0, place, found.to(torch.int64))
        # A slot that is wanted twice has its hit at the first of both places: neither may count.
        twice = torch.zeros_like(asked)
        same = (asked[1:] == asked[:-1]).to(torch.int64)
        twice[1:] += same
        twice[:-1] += same
        good = found & (hits.index_select(0, place) == 1) & (twice.index_select(0, place) == 0)
        return (
            torch.where(good, slots.index_select(0, place), -1),
            torch.where(good, stamps.index_select(0, place), -1),
        )
