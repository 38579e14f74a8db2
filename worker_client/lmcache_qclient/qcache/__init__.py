"""The SDK: find the queries of a token sequence again, as one tensor; store it back, edited."""

from lmcache_qclient.identity.embeddings import embeds_item
from lmcache_qclient.identity.lora_files import lora_digest
from lmcache_qclient.qcache.catalog import StoredLayout
from lmcache_qclient.qcache.context import QCacheContext, connect
from lmcache_qclient.qcache.identities import Identities, StoredIdentity
from lmcache_qclient.qcache.retrieval import LayerGroup, Lookup, MissingChunk, Retrieval
from lmcache_qclient.qcache.store_errors import (
    NotPersisted,
    RefusedChunk,
    StoreConflict,
    StoreError,
    StoreRefused,
)
from lmcache_qclient.qcache.stored import Stored
from lmcache_qprotocol.identity import ItemIdentity, LoraIdentity
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.reasons import LossReason, MissReason

__all__ = [
    "Identities",
    "ItemIdentity",
    "LayerGroup",
    "Layout",
    "Lookup",
    "LoraIdentity",
    "LossReason",
    "MissReason",
    "MissingChunk",
    "NotPersisted",
    "QCacheContext",
    "RefusedChunk",
    "Retrieval",
    "StoreConflict",
    "StoreError",
    "StoreRefused",
    "Stored",
    "StoredIdentity",
    "StoredLayout",
    "connect",
    "embeds_item",
    "lora_digest",
]
