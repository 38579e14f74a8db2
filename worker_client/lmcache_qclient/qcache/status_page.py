"""The server's `/status` over HTTP, without anything but the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

MAX_STATUS_BYTES = 64 << 20

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The server is near; a proxy of the environment does not know it."""


def fetch_status(http_url: str, timeout_s: float) -> dict[str, Any]:
    """GET `<http_url>/status`.

    Raises:
        ConnectionError: nobody answers, or not with a JSON object.
    """
    url = http_url.rstrip("/") + "/status"
    try:
        with _opener.open(url, timeout=timeout_s) as response:
            status = json.loads(response.read(MAX_STATUS_BYTES))
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"can't read {url} ({error}): start the server with `lmcache-qserver start`, or check http_url"
        ) from None
    if not isinstance(status, dict):
        raise ConnectionError(f"{url} is not the status of an lmcache-qserver: check http_url")
    return status
