"""The persistent tier: objects in files or in an object store, as safetensors files that prove themselves.

Importing it loads neither adapter; `open_store` loads the one that the URL asks for.
"""

from lmcache_qserver.tier.chunk_store import ChunkStore, Entry, PutOutcome
from lmcache_qserver.tier.errors import Corrupt, Full, NotThere, Refused, TierError, Unavailable
from lmcache_qserver.tier.open_store import open_store
from lmcache_qserver.tier.transfer import Transfer

__all__ = [
    "ChunkStore",
    "Corrupt",
    "Entry",
    "Full",
    "NotThere",
    "PutOutcome",
    "Refused",
    "TierError",
    "Transfer",
    "Unavailable",
    "open_store",
]
