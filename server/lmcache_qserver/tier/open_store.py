"""From a URL to a store that works. Adapters are imported here when they are asked for, and nowhere before."""

from __future__ import annotations

from lmcache_qserver.tier.chunk_store import ChunkStore
from lmcache_qserver.tier.errors import Refused
from lmcache_qserver.tier.read_only import ReadOnlyStore
from lmcache_qserver.tier.url import check_url, file_path

INSTALL = "pip install 'lmcache-qserver[l2]'"
DEFAULT_TIMEOUT_S = 60.0


async def open_store(
    url: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    direct: bool = False,
    read_only: bool = False,
) -> ChunkStore:
    """Open a store and see that it answers.

    Args:
        url: file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://..., memory://. Credentials and endpoints come
            from the environment in the provider's usual names (AWS_*, GOOGLE_*, AZURE_*), never from the URL.
        timeout_s: longest time until an operation is answered.
        direct: files only: write around the page cache (a third of the processor time, colder reads).
        read_only: touch nothing: no folder is made or swept, no reading marks an object as used, and what would change
            the store is Refused. It may belong to another user.

    Raises:
        TierError: the store can't be used; says why.
        ValueError: not such a URL.
    """
    store = await _open(url, timeout_s, direct, read_only)
    return ReadOnlyStore(store) if read_only else store


async def _open(url: str, timeout_s: float, direct: bool, read_only: bool) -> ChunkStore:
    scheme = check_url(url)
    if scheme == "file":
        from lmcache_qserver.tier.files import FileStore

        return await FileStore.open(
            file_path(url), timeout_s=timeout_s, direct=direct, read_only=read_only
        )
    if direct:
        raise ValueError("direct is for file:// only")
    try:
        from lmcache_qserver.tier.objects import ObjectStore
    except ImportError as error:
        if error.name != "obstore":
            raise
        raise Refused(f"{scheme}:// needs obstore: {INSTALL}") from None
    return await ObjectStore.open(url, timeout_s=timeout_s)
