"""The daemon of lmcache-qserver: keeps attention queries, and hands them out again."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "lmcache-qserver"


def installed_version() -> str:
    """The distribution's version; "0+unknown" when it runs from a source tree that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"
