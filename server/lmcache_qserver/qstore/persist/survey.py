"""Learning what lies in a store that this server has not written, while it serves already.

Layouts first, so that readers find models whose engines are long gone: one header for each. Then, where listing costs
nothing but time (files), all names (sweep.py): what they amount to, and what need not be stored again. A bucket is not
listed: its objects are asked for by name when somebody wants them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import cast

from lmcache_qserver.qstore.persist.held import Held
from lmcache_qserver.qstore.persist.l2_search import read_head
from lmcache_qserver.tier import ChunkStore, Corrupt, Entry, NotThere
from lmcache_qserver.tier.paths import VERSION

MOST_LOOKED_AT = 16
"""Objects of a layout whose headers are read until one makes sense."""


async def learn_layouts(store: ChunkStore, held: Held) -> None:
    """Read one header of every model, layout and rank.

    Raises:
        TierError: the store can't say.
    """
    for model in await store.folders(VERSION):
        for layout in await store.folders(model):
            await _learn_layout(store, layout, held)


async def _learn_layout(store: ChunkStore, folder: str, held: Held) -> None:
    entries = cast("AsyncGenerator[Entry, None]", store.list(folder))
    async with contextlib.aclosing(entries):
        looked_at = 0
        async for entry in entries:
            looked_at += 1
            if looked_at > MOST_LOOKED_AT:
                return
            with contextlib.suppress(NotThere, Corrupt):
                header, _ = await read_head(store, entry.name)
                held.describe(header)
                return
