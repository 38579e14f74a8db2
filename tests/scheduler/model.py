"""A model without weights: what it computes for a token depends on the whole history, and nothing else.

Its cache holds one number per slot, the *state* after that token: `state = mix(state of the position before, token)`. A
row of Q is a function of (state, position, layer, head, element), so a row that belongs to another token, another
history, another layer or another position differs in every element. All values are whole numbers below 2**24: float32
holds them exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

LAYERS, HEADS, HEAD_DIM = 2, 2, 3
_MASK = (1 << 64) - 1
_ELEMENTS = np.random.default_rng(7).integers(
    0, 1 << 63, size=(LAYERS, HEADS, HEAD_DIM), dtype=np.uint64
) | np.uint64(1)


def root(*what: object) -> int:
    """The state before the first token; `what` the tensors depend on besides token ids."""
    state = 0x9E3779B97F4A7C15
    for byte in repr(what).encode():
        state = mix(state, byte)
    return state


def mix(state: int, token: int) -> int:
    """The state after one more token."""
    state = ((state ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return ((state ^ (state >> 31)) * 0x94D049BB133111EB + 1) & _MASK


def states(start: int, tokens: Iterable[int]) -> list[int]:
    """The state after each of `tokens`, from state `start` on."""
    found = []
    for token in tokens:
        start = mix(start, token)
        found.append(start)
    return found


def queries(states: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """float32 `[rows, layers, heads, head_dim]`."""
    key = np.array(states, dtype=np.uint64) ^ (
        np.array(positions, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    )
    bits = (key.reshape(-1, 1, 1, 1) * _ELEMENTS) >> np.uint64(40)
    rows: NDArray[np.float32] = bits.astype(np.float32)
    return rows
