"""Prompt embeddings by their content.

    digest = hex of derive(EMBEDS_CONTEXT, msgpack [dtype, [rows, width]] ‖ the rows' bytes, row after row)

`dtype` is torch's name without its prefix ("float32"); bytes in the machine's order, little-endian everywhere we run.
Torch is imported at the first call only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from lmcache_qprotocol.identity import ItemIdentity

if TYPE_CHECKING:
    import torch

EMBEDS_CONTEXT = "lmcache-qserver 2026-11 prompt embeddings v1"


def embeds_item(embeddings: torch.Tensor, offset: int = 0) -> ItemIdentity:
    """The identity of embeddings that were given in place of token ids.

    Args:
        embeddings: `[tokens, width]` (or `[1, tokens, width]`), as they were given to the engine: in that dtype, on any
            device.
        offset: position of the first of them in the sequence.

    Raises:
        ValueError: another number of axes, or no rows.
    """
    import torch

    rows = embeddings.detach()
    if rows.dim() == 3 and len(rows) == 1:
        rows = rows[0]
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"embeddings are [tokens, width], not {list(embeddings.shape)}")
    dtype = str(rows.dtype).removeprefix("torch.")
    head = msgspec.msgpack.encode((dtype, tuple(rows.shape)))
    digest = blake3(head, derive_key_context=EMBEDS_CONTEXT)
    digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data)
    return ItemIdentity("embeds", digest.hexdigest(), offset)
