"""The SDK: find the queries of a token sequence again, as one tensor."""

from lmcache_qclient.identity.embeddings import embeds_item
from lmcache_qclient.identity.lora_files import lora_digest
from lmcache_qclient.qcache.catalog import StoredLayout
from lmcache_qclient.qcache.context import QCacheContext, connect
from lmcache_qclient.qcache.identities import Identities, StoredIdentity
from lmcache_qclient.qcache.retrieval import LayerGroup, Lookup, MissingChunk, Retrieval
from lmcache_qprotocol.identity import ItemIdentity, LoraIdentity
from lmcache_qprotocol.reasons import MissReason

__all__ = [
    "Identities",
    "ItemIdentity",
    "LayerGroup",
    "Lookup",
    "LoraIdentity",
    "MissReason",
    "MissingChunk",
    "QCacheContext",
    "Retrieval",
    "StoredIdentity",
    "StoredLayout",
    "connect",
    "embeds_item",
    "lora_digest",
]
