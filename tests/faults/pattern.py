"""Q as a function of token id, layer and element, so that whatever is read tells what it is.

float32 holds every integer below 2^24: the values are exact, and two of them are equal by chance once in 16 million.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LAYERS, HEADS, HEAD_DIM = 4, 4, 32
HIDDEN = HEADS * HEAD_DIM
CHUNK, BLOCK = 64, 16
VALUES = 1 << 24


def queries(tokens: Sequence[int], layer: int) -> torch.Tensor:
    """Q of some tokens in one layer: float32 `[len(tokens), HEADS, HEAD_DIM]`."""
    token = torch.tensor(tokens, dtype=torch.int64).view(-1, 1, 1)
    element = torch.arange(HIDDEN, dtype=torch.int64).view(1, HEADS, HEAD_DIM)
    mixed = (token * LAYERS + layer) * HIDDEN + element
    return ((mixed * 2654435761 >> 7) % VALUES).to(torch.float32)


def expected(tokens: Sequence[int]) -> torch.Tensor:
    """What a reader must get: float32 `[LAYERS, len(tokens), HEADS, HEAD_DIM]`."""
    return torch.stack([queries(tokens, layer) for layer in range(LAYERS)])
