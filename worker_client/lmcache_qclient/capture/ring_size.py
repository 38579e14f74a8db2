"""How many blocks the ring gets.

Room for some steps and for the chunks that stay open over steps, within a byte budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_qclient.capture.layer_selection import LayerSelection
from lmcache_qprotocol.layout import Layout

DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_RING_BYTES = 2 << 30


@dataclass(frozen=True)
class RingSettings:
    """The switches of the ring: its size, and what is taken out of it.

    Attributes:
        blocks: number of blocks; None to compute it.
        depth: steps of `max_num_batched_tokens` that the ring holds.
        max_bytes: budget for the computed size.
        tails: store pieces of chunks, too: what was computed of a chunk that is not computed whole.
        allow_untested_gpu: capture on a CUDA device, which has never been tried.
        wait_s: most seconds that a step waits for room in a full ring; 0 drops at once.
        layers: that are captured; None for all.
    """

    blocks: int | None = None
    depth: int = 2
    max_bytes: int = DEFAULT_RING_BYTES
    tails: bool = True
    wait_s: float = 0.0
    layers: LayerSelection | None = None
    allow_untested_gpu: bool = False


class RingBlocks(NamedTuple):
    """Blocks in all, and those of them that hold the steps (the rest is for open chunks)."""

    total: int
    steps: int


def ring_blocks(
    settings: RingSettings, layout: Layout, block_size: int, chunk_size: int, scheduler_config: Any
) -> RingBlocks:
    """The ring's size: `max(1, blocks)` if given, else

    ceil(max_num_batched_tokens / block_size) * depth + max_num_seqs * blocks per chunk, at most `max_bytes`, at least
    one chunk.
    """
    if settings.blocks is not None:
        total = max(1, settings.blocks)
        return RingBlocks(total, total)
    batched = int(
        getattr(scheduler_config, "max_num_batched_tokens", None) or DEFAULT_BATCHED_TOKENS
    )
    sequences = int(getattr(scheduler_config, "max_num_seqs", None) or 1)
    per_chunk = chunk_size // block_size
    steps = -(-batched // block_size) * settings.depth
    affordable = max(per_chunk, settings.max_bytes // (layout.token_bytes * block_size))
    total = min(steps + sequences * per_chunk, affordable)
    return RingBlocks(total, min(steps, total))
