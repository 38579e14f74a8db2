"""QRingBuffer: the paged ring that catches every layer's query rows.

Layout, block-major, one allocation (dtype of the ring, then int64):

    byte 0              rows    [num_blocks, num_layers, block_size, hidden_dim]   + one trash row
    stamps_offset       stamps  [num_blocks, block_size]                           + one trash stamp

Logically it is `[num_layers, num_blocks, block_size, hidden_dim]`: `tensors["lmcache_q_layer_{i}"]` are strided views
`[num_blocks, block_size, hidden_dim]`. Block-major, because then a block of all layers is contiguous, and copying it
out is one transfer without a gather.

A ring slot is `block_id * block_size + offset`; -1 drops the row. Rows that are dropped go to the trash row, so that no
step has to look at data on the device (a boolean mask would wait for it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lmcache_qclient.capture.blocks import Allocator, BlockAllocator
from lmcache_qclient.capture.cuda_memory import CudaRingMemory
from lmcache_qclient.capture.ring_memory import RingMemory
from lmcache_qclient.capture.rows_aside import RowsAside
from lmcache_qprotocol.stamps import EMPTY, STAMP_BYTES

PAGE = 4096
_UINT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there, without waiting for the device: only a copy out of pinned memory waits for nothing."""
    if tensor.device == device or device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class RingUsage(NamedTuple):
    """Blocks: in all, free, used, and the most ever used."""

    capacity: int
    free: int
    used: int
    high_water: int


@dataclass(frozen=True)
class RowIndex:
    """Where a step's rows go, computed once and used by every layer.

    Attributes:
        base: int64 `[rows]`, flat row index of layer 0; the trash row or beyond for dropped rows.
    """

    base: torch.Tensor


class QRingBuffer:
    """See the head of this file.

    Args:
        num_layers, num_blocks, block_size, hidden_dim: the logical shape; hidden_dim is this rank's
            num_q_heads * head_size.
        dtype: of the rows.
        device: "cpu" puts the ring into shared memory, a CUDA device into an allocation that goes by handle.
        allocator: of its blocks, where other rings share it; its own when None.

    Raises:
        ValueError: one of the four numbers is not positive.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        hidden_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        allocator: Allocator | None = None,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "hidden_dim": hidden_dim,
        }
        bad = [f"{name}={value}" for name, value in sizes.items() if value <= 0]
        if bad:
            raise ValueError(f"a ring needs positive sizes; not positive: {', '.join(bad)}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hidden_dim = hidden_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.memory: RingMemory | None = None
        self.allocator: Allocator = allocator or BlockAllocator(num_blocks)
        self.device_memory: CudaRingMemory | None = None
        rows = num_blocks * num_layers * block_size
        self.rows_nbytes = (rows + 1) * hidden_dim * dtype.itemsize
        self.stamps_offset = (self.rows_nbytes + PAGE - 1) // PAGE * PAGE
        self.nbytes = self.stamps_offset + (num_blocks * block_size + 1) * STAMP_BYTES
        self._trash_row = rows
        raw = self._allocate_memory()
        self.flat = raw[: self.rows_nbytes].view(dtype).view(rows + 1, hidden_dim)
        self._flat_bits = self.flat.view(_UINT_OF_SIZE[dtype.itemsize])
        self.flat_stamps = raw[self.stamps_offset :].view(torch.int64)
        self.flat_stamps.fill_(EMPTY)
        blocks = self.flat[:rows].view(num_blocks, num_layers, block_size, hidden_dim)
        self.tensors: dict[str, torch.Tensor] = {
            f"lmcache_q_layer_{layer}": blocks[:, layer] for layer in range(num_layers)
        }
        self._stamps = self.flat_stamps[:-1].view(num_blocks, block_size)
        on_host = self.memory is not None
        self._host_bits = self._flat_bits.numpy() if on_host else None
        self._host_stamps = self.flat_stamps.numpy() if on_host else None
        self.aside = RowsAside(num_layers, hidden_dim, dtype) if on_host else None
        self._host_blocks = self._host_aside = None
        if self._host_bits is not None and self.aside is not None:
            shape = (num_blocks, num_layers, block_size, hidden_dim)
            self._host_blocks = self._host_bits[:-1].reshape(shape)
            self._host_aside = self.aside.rows.view(self._flat_bits.dtype).numpy()

    def _allocate_memory(self) -> torch.Tensor:
        if self.device.type == "cpu":
            self.memory = RingMemory(self.nbytes)
            return torch.from_numpy(self.memory.array)
        if self.device.type == "cuda":
            self.device_memory = CudaRingMemory(self.nbytes, self.device)
            return self.device_memory.tensor()
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)

    # --- blocks -----------------------------------------------------------------------------------------------

    def allocate(self, n: int) -> list[int] | None:
        """n free block ids, [] for 0, None when fewer are free.

        Raises:
            ValueError: n is negative.
        """
        return self.allocator.allocate(n)

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back; an id that is out of range or free already is logged and skipped."""
        self.allocator.free(ids)

    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self.allocator.num_free

    def usage(self) -> RingUsage:
        """A snapshot."""
        free = self.allocator.num_free
        return RingUsage(self.num_blocks, free, self.num_blocks - free, self.allocator.high_water)

    # --- rows -------------------------------------------------------------------------------------------------

    def scatter(self, layer_index: int, query: torch.Tensor, ring_slots: torch.Tensor) -> None:
        """Write one layer's rows.

        Args:
            layer_index: in [0, num_layers).
            query: `[num_tokens, ...]`, flattened to `[num_tokens, hidden_dim]` and cast to the ring's dtype.
            ring_slots: int64 `[num_tokens]`; -1 drops the row.

        Raises:
            ValueError: wrong layer index, or wrong width of a row.
        """
        self.write(layer_index, query, self.index(ring_slots))

    def index(self, ring_slots: torch.Tensor) -> RowIndex:
        """The part of `scatter` that is the same for every layer."""
        slots = to_device(ring_slots, self.device)
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        base = slots + block * ((self.num_layers - 1) * self.block_size)
        return RowIndex(torch.where(slots < 0, self._trash_row, base))

    def write(self, layer_index: int, query: torch.Tensor, index: RowIndex) -> None:
        """`scatter` with a prepared index; never waits for the device. Rows beyond the index are padding."""
        rows = self.as_rows(layer_index, query)
        # As integers of the same size: torch copies no fp8 by index.
        bits = rows[: len(index.base)].detach().to(self.dtype).view(self._flat_bits.dtype)
        offset = layer_index * self.block_size
        if self._host_bits is None:
            target = torch.clamp(index.base + offset, max=self._trash_row)
            self._flat_bits.index_copy_(0, target, bits)
        else:
            # NumPy's indexed assignment costs a fifth of torch's for a few rows, and half for many.
            self._host_bits[np.minimum(index.base.numpy() + offset, self._trash_row)] = bits.numpy()

    def take_aside(self, kept: Sequence[tuple[int, int, int]]) -> None:
        """Write what waits in `aside`, all layers of a row at once, then stamp it; host memory only.

        Args:
            kept: (row, ring slot, stamp) of each row; slots are inside the ring.
        """
        assert self._host_blocks is not None
        assert self._host_stamps is not None
        assert self._host_aside is not None
        for row, slot, _ in kept:
            block, offset = divmod(slot, self.block_size)
            self._host_blocks[block, :, offset] = self._host_aside[:, row]
        for _, slot, stamp in kept:
            self._host_stamps[slot] = stamp

    def as_rows(self, layer_index: int, query: torch.Tensor) -> torch.Tensor:
        """The query as `[rows, hidden_dim]`.

        Raises:
            ValueError: wrong layer index, or wrong width of a row.
        """
        if not 0 <= layer_index < self.num_layers:
            raise ValueError(f"layer index {layer_index} is not in [0, {self.num_layers})")
        width = query[0].numel() if len(query) else self.hidden_dim
        if width != self.hidden_dim:
            raise ValueError(
                f"a row of the query has {width} elements, the ring's rows have {self.hidden_dim}: "
                "check head count and head size"
            )
        return query.reshape(len(query), self.hidden_dim)

    # --- stamps -----------------------------------------------------------------------------------------------

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Set the stamps of whole blocks to EMPTY, before any of their rows is written."""
        if block_ids:
            self._stamps.index_fill_(0, to_device(torch.tensor(block_ids), self.device), EMPTY)

    def clear_rows(self, ring_slot: int, length: int) -> None:
        """Set the stamps of `length` neighbouring slots to EMPTY."""
        self.flat_stamps[ring_slot : ring_slot + length] = EMPTY

    def stamp(self, ring_slots: torch.Tensor, stamps: torch.Tensor) -> None:
        """Stamp rows, after the last layer has been written.

        Args:
            ring_slots, stamps: int64 `[rows]`, on the ring's device; slot -1 stamps nothing.
        """
        trash = self.num_blocks * self.block_size
        self.flat_stamps.index_copy_(0, torch.where(ring_slots < 0, trash, ring_slots), stamps)

    @property
    def event_handle(self) -> bytes:
        """Of the event that says when rows and stamps are there; empty in host memory, where they are."""
        return b"" if self.device_memory is None else self.device_memory.event_handle

    def record_event(self) -> None:
        """After the stamps of a step, on the stream that they were queued on."""
        if self.device_memory is not None:
            self.device_memory.record_event(torch.cuda.current_stream(self.device).cuda_stream)

    def populate(self, num_blocks: int) -> None:
        """Touch the memory of the first `num_blocks` blocks, and all stamps, ahead of use."""
        if self.memory is not None:
            self.memory.populate(
                self.rows_nbytes * min(num_blocks, self.num_blocks) // self.num_blocks
            )

    def close(self) -> None:
        """Give the memory back, when the server has let go of it.

        In host memory that is the descriptor, and the tensors stay usable. On a device the tensors go.
        """
        if self.memory is not None:
            self.memory.close()
        if self.device_memory is not None:
            del self.flat, self._flat_bits, self.flat_stamps, self._stamps
            self.tensors = {}
            self.device_memory.close()
