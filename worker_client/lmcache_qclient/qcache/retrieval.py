"""What the SDK answers."""

from __future__ import annotations

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
class Retrieval:
    """The queries of the longest stored prefix.

    Attributes:
        tensor: `[layers, num_tokens, heads, head_dim]` on the CPU; the caller's own. Contiguous, unless it is the front
            of a longer `out`.
        num_tokens: tokens of the prefix, any number.
        missing: all that is not there, in order; some of it may lie before what is stored. Of a generated sequence the
            last token is always missing: the engine never computes its row.
        layer_ids: global layer index of each row of the layer axis.
        nonfinite: one of the stored objects that this was read from holds NaN or Inf, as the engine computed it; look
            for it with `tensor.isfinite()`. It may lie in rows or layers that were not asked for.
        layout: how it is stored: feature, dtype, heads, ranks.
        axes: names of the tensor's axes.
    """

    tensor: torch.Tensor
    num_tokens: int
    missing: tuple[MissingChunk, ...]
    layer_ids: tuple[int, ...]
    nonfinite: bool = False
    layout: StoredLayout | None = None
    axes: tuple[str, str, str, str] = AXES

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor as a NumPy array over the same memory.

        NumPy has no bfloat16 and no 8-bit floats: of these it is the bits, as unsigned integers of their size.
        """
        from lmcache_qclient.qcache.tensors import numpy_of

        return numpy_of(self.tensor)
