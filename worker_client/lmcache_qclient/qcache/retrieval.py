"""What the SDK answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_qprotocol.reasons import MissReason

if TYPE_CHECKING:
    import torch

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
        axes: names of the tensor's axes.
    """

    tensor: torch.Tensor
    num_tokens: int
    missing: tuple[MissingChunk, ...]
    layer_ids: tuple[int, ...]
    axes: tuple[str, str, str, str] = AXES
