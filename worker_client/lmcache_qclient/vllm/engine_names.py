"""What a worker is called at the server."""

from __future__ import annotations

from lmcache_qprotocol.keys import FEATURE_SUFFIX


def instance_id(engine_id: str, rank: int, feature: str) -> str:
    """One ring's id: that of the worker's KV cache for queries, with the feature's suffix behind it for others."""
    suffix = "" if feature == "transfer_query" else FEATURE_SUFFIX[feature]
    return f"{engine_id}-{rank}{suffix}"
