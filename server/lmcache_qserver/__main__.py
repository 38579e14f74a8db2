"""The entry point of `lmcache-qserver` and `python -m lmcache_qserver`."""

from __future__ import annotations

import sys

from lmcache_qserver.cache_bypass import start_over

SERVER_EXTRA = frozenset({"aiohttp", "click", "prometheus_client", "uvloop", "xxhash"})
"""Import names of what the distribution's `[server]` extra installs."""


def main() -> None:
    """Run the command line; without the server's dependencies, say how to get them and exit with 2."""
    if sys.argv[1:2] == ["start"] and not {"-h", "--help"} & {*sys.argv}:
        start_over()
    try:
        from lmcache_qserver.cli import cli

        cli(prog_name="lmcache-qserver")
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SERVER_EXTRA:
            raise
        print(
            f"lmcache-qserver: the server needs {missing}, which is not installed. Install it with\n"
            '    pip install "lmcache-qserver[server]"',
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
