"""The store of queries: who may store, what is stored, and who is reading it."""

from lmcache_qserver.qstore.module import QStoreModule

__all__ = ["QStoreModule"]
