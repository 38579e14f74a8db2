"""The URL of a store, as far as it can be judged without opening it. Loads no adapter."""

from __future__ import annotations

import urllib.parse

OBJECT_SCHEMES = ("s3", "gs", "az", "memory")


def check_url(url: str) -> str:
    """The URL's scheme.

    Args:
        url: see `open_store`.

    Raises:
        ValueError: no store has such a URL; says how one looks.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a store's URL has no credentials, no ? and no #: use the environment")
    if parts.scheme == "file":
        if parts.netloc or not url.startswith("file:///") or file_path(url) == "/":
            raise ValueError(f"{url!r} is not of the form file:///PATH")
    elif parts.scheme not in OBJECT_SCHEMES or "://" not in url:
        raise ValueError(f"{url!r}: a store is file, {', '.join(OBJECT_SCHEMES)}, with ://")
    elif parts.scheme != "memory" and not parts.netloc:
        raise ValueError(f"{url!r} names no bucket: {parts.scheme}://BUCKET/PREFIX")
    return parts.scheme


def file_path(url: str) -> str:
    """The folder of a file:// URL."""
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path)
