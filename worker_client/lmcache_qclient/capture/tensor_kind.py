"""What a feature catches: one kind of tensor of every attention layer, and how its rows are made up.

The features themselves are the files of `lmcache_qclient.features`; capture knows no single one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Tensors = Mapping[str, torch.Tensor]
"""What a hook sees of one layer, `[rows, heads, head_dim]` each: "q", "k", "v" before its attention, "o" behind."""

LayerSink = Callable[[str, Tensors], None]
"""Takes one layer's tensors: the engine's name, and what the hook saw."""


class Heads(NamedTuple):
    """The heads of one rank: [first, first + num) of `total`, `dim` elements each."""

    first: int
    num: int
    total: int
    dim: int


@dataclass(frozen=True)
class TensorKind:
    """One feature.

    Attributes:
        name: of the feature; a key of `FEATURE_SUFFIX`.
        tensor: under which a hook's `Tensors` hold it.
        heads: this rank's heads, by the engine's configuration (`VllmConfig`) and one of its attention layers (None
            where the engine does not show its layers).
        heads_of_layer: (heads, elements per head) that one layer says it has itself; None where it does not say. It
            counts for more than `heads`.
        has: whether a layer has such a tensor of its own.
    """

    name: str
    tensor: str
    heads: Callable[[Any, Any], Heads]
    heads_of_layer: Callable[[Any], tuple[int, int] | None]
    has: Callable[[Any], bool] = lambda layer: True

    @property
    def words(self) -> str:
        """For messages to people: "query", "attention output"."""
        return self.name.removeprefix("transfer_").replace("_", " ")
