"""Memory in which a decode step's few rows wait until its last layer.

Between two layers it is the calls that count, not the bytes: the layers' weights have just flushed the caches, and one
plain copy of a tensor costs a quarter of an assignment by index (docs/benchmarks.md). So each layer's rows are copied
aside as they come, by one call, and those of all layers go into the ring together at the end.
"""

from __future__ import annotations

import torch

FEW = 32
"""Rows of a step; beyond that the bytes count."""


class RowsAside:
    """Belongs to one ring, and to one step at a time.

    Args:
        num_layers, hidden_dim, dtype: the ring's.

    Attributes:
        rows: `[num_layers, FEW, hidden_dim]`.
    """

    def __init__(self, num_layers: int, hidden_dim: int, dtype: torch.dtype) -> None:
        self.rows = torch.zeros(num_layers, FEW, hidden_dim, dtype=dtype)
        self._layers: dict[torch.Size, list[torch.Tensor]] = {}

    def layers(self, shape: torch.Size) -> list[torch.Tensor]:
        """Each layer's first rows, as tensors of `shape`: `[rows, ...]`, at most FEW, `hidden_dim` elements each."""
        if shape not in self._layers:
            self._layers[shape] = [layer[: shape[0]].view(shape) for layer in self.rows]
        return self._layers[shape]
