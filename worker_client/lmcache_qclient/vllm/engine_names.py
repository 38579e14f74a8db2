"""What a worker is called at the server."""

from __future__ import annotations

from lmcache_qprotocol.keys import FEATURE_SUFFIX


def instance_id(engine_id: str, rank: int, feature: str, group: int = 0) -> str:
    """One ring's id: that of the worker's KV cache for queries, with the feature's suffix behind it for others.

    Args:
        group: of layers of one shape, where the rank's layers have unlike ones; behind the first its number is added.
    """
    suffix = "" if feature == "transfer_query" else FEATURE_SUFFIX[feature]
    number = f"##{group}" if group else ""
    return f"{engine_id}-{rank}{suffix}{number}"
