"""The daemon of lmcache-qserver: keeps attention queries, and hands them out again."""

from __future__ import annotations

DISTRIBUTION = "lmcache-qserver"


def installed_version() -> str:
    """The distribution's version; "0+unknown" when it runs from a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # late: it costs 50 ms

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"
