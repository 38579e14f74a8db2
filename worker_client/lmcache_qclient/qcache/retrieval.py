"""What the SDK answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from lmcache_qprotocol.reasons import MissReason

if TYPE_CHECKING:
    import torch

    from lmcache_qclient.qcache.catalog import StoredLayout

AXES = ("layer", "token", "head", "head_dim")


@dataclass(frozen=True)
class MissingChunk:
    """Tokens that are not there; a chunk with several gaps has an entry for each.

    Attributes:
        index: of the chunk in the sequence.
        start, end: token positions [start, end), to the token.
        reason: why.
        rank: whose part is missing (pp_rank * tp_size + tp_rank); None when it is missing for all.
    """

    index: int
    start: int
    end: int
    reason: MissReason
    rank: int | None = None


@dataclass(frozen=True)
class Lookup:
    """`num_tokens` tokens from the first are stored without a gap; `missing` is all that is not."""

    num_tokens: int
    missing: tuple[MissingChunk, ...] = ()


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one shape.

    Attributes:
        tensor: `[layers, num_tokens, heads, head_dim]` on the CPU; the caller's own. Contiguous, unless it is the front
            of a longer `out`.
        layer_ids: global layer index of each row of the layer axis.
        layout: how it is stored: feature, dtype, heads, ranks.
    """

    tensor: torch.Tensor
    layer_ids: tuple[int, ...]
    layout: StoredLayout

    @property
    def scales(self) -> tuple[float, ...]:
        """One per row of the layer axis: an element times it is the value. 1 but for queries quantized to fp8."""
        stored = self.layout.scales or (1.0,) * len(self.layout.layer_ids)
        of_layer = dict(zip(self.layout.layer_ids, stored, strict=True))
        return tuple(of_layer[layer] for layer in self.layer_ids)


@dataclass(frozen=True)
class Retrieval:
    """The queries of the longest stored prefix.

    Attributes:
        groups: the layers by shape (heads, elements per head, dtype); with most models there is one.
        num_tokens: tokens of the prefix, any number; the same for all groups.
        missing: all that is not there, in order; some of it may lie before what is stored. Of a generated sequence the
            last token is always missing: the engine never computes its row.
        nonfinite: this, or one of the stored objects that it was read from, holds NaN or Inf, as the engine computed
            it; look for it with `tensor.isfinite()`. It may lie in rows or layers that were not asked for.
        persisted: every stored object that it was read from is in the server's persistent tier, too; False when nothing
            was read.
        axes: names of the tensors' axes.

    `tensor`, `layer_ids`, `scales`, `layout` and `numpy()` are the one group's; where there are several they raise
    ValueError. `layer(i)` is there always.
    """

    groups: tuple[LayerGroup, ...]
    num_tokens: int
    missing: tuple[MissingChunk, ...]
    nonfinite: bool = False
    persisted: bool = False
    axes: tuple[str, str, str, str] = AXES

    @property
    def tensor(self) -> torch.Tensor:
        """`[layers, num_tokens, heads, head_dim]`; see `LayerGroup`."""
        return self._only.tensor

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global layer index of each row of the layer axis."""
        return self._only.layer_ids

    @property
    def scales(self) -> tuple[float, ...]:
        """One per row of the layer axis; see `LayerGroup`."""
        return self._only.scales

    @property
    def layout(self) -> StoredLayout:
        """How it is stored."""
        return self._only.layout

    @property
    def _only(self) -> LayerGroup:
        if len(self.groups) == 1:
            return self.groups[0]
        shapes = "; ".join(
            f"layers {list(group.layer_ids)}: {list(group.tensor.shape)} {group.layout.dtype}"
            for group in self.groups
        )
        raise ValueError(
            f"the model's layers have unlike shapes, so they are no one tensor ({shapes}): use .groups or .layer(i), "
            "or ask for layers of one shape with layers="
        )

    def layer(self, layer_id: int) -> torch.Tensor:
        """One layer, `[num_tokens, heads, head_dim]`, by its global index; a view.

        Raises:
            KeyError: it is not there.
        """
        for group in self.groups:
            if layer_id in group.layer_ids:
                return group.tensor[group.layer_ids.index(layer_id)]
        raise KeyError(layer_id)

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor as a NumPy array over the same memory.

        NumPy has no bfloat16 and no 8-bit floats: of these it is the bits, as unsigned integers of their size.
        """
        from lmcache_qclient.qcache.tensors import numpy_of

        return numpy_of(self.tensor)


def joined(reads: Sequence[Retrieval], keep: bool) -> Retrieval:
    """One result of several shapes of layers: the prefix that all of them have.

    Args:
        keep: the tensors' memory is the caller's own: no copies.
    """
    num_tokens = min(read.num_tokens for read in reads)
    groups = []
    for group in (group for read in reads for group in read.groups):
        front = group.tensor[:, :num_tokens]
        groups.append(dataclasses.replace(group, tensor=front if keep else front.contiguous()))
    missing = dict.fromkeys(miss for read in reads for miss in read.missing)
    return Retrieval(
        tuple(groups),
        num_tokens,
        in_order(missing),
        any(read.nonfinite for read in reads),
        all(read.persisted for read in reads),
    )


def in_order(missing: Iterable[MissingChunk]) -> tuple[MissingChunk, ...]:
    """By token, then by rank."""
    return tuple(
        sorted(
            missing,
            key=lambda miss: (miss.start, miss.index, -1 if miss.rank is None else miss.rank),
        )
    )
