"""The server's side of the benchmarks, which needs no engine: `python -m benchmarks.server [ROUNDS]` runs it alone."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import (
    growth,
    loop_lag,
    plain_redis,
    round_trip,
    start,
    store_and_retrieve,
    tier,
    tier_stores,
    two_instances,
)
from demo.table import render_table
from lmcache_qserver.testing.daemon import running_daemon

SIZES_MIB = (16, 64)
ROUNDS = 20
INLINE_ROUNDS = 8
INLINE_FIGURES = ("store_vs_memcpy", "retrieve_vs_memcpy")
VARIANTS: dict[str, dict[str, Any]] = {
    "inline_checksum": {"checksum": "inline"},
    "one_thread": {"copy_threads": 1},
}
"""Other settings of the daemon, by the name that their figures carry."""

TIER_ROUNDS = 12
TIER_FIGURES = (
    "l2_put_vs_disk",
    "l2_put_interval",
    "l2_put_cpu_s_per_gb",
    "l2_get_vs_disk",
    "l2_get_interval",
    "l2_get_cpu_s_per_gb",
)

Figures = dict[str, dict[str, Any]]


def figures(rounds: int) -> Figures:
    """All figures that need no engine."""
    found: Figures = {"start": start.measure()}
    with running_daemon(pool_bytes="3GiB", allow_inline=True) as server:
        for size in SIZES_MIB:
            print(f"store and retrieve, {size} MiB ...", flush=True)
            for name, value in store_and_retrieve.measure(server, size, rounds).items():
                found.setdefault(name, {})[f"{size}MiB"] = value
            found[f"two_instances_{size}MiB"] = two_instances.measure(server, size, 7)
            print(f"inline, {size} MiB ...", flush=True)
            inline = store_and_retrieve.measure(server, size, INLINE_ROUNDS, "inline")
            for name in INLINE_FIGURES:
                found.setdefault(f"inline_{name}", {})[f"{size}MiB"] = inline[name]
        print("round trip ...", flush=True)
        found["rtt_vs_raw"] = round_trip.measure(server)
        print("loop lag ...", flush=True)
        found["loop_lag_copies"] = loop_lag.while_copying(server, 5.0)
        found["loop_lag_registrations"] = loop_lag.while_registering(server)
    for variant, settings in VARIANTS.items():
        with running_daemon(pool_bytes="3GiB", **settings) as server:
            for size in SIZES_MIB:
                print(f"store, {variant}, {size} MiB ...", flush=True)
                for name, value in store_and_retrieve.stored(server, size, rounds).items():
                    found.setdefault(f"{name}_{variant}", {})[f"{size}MiB"] = value
                found[f"two_instances_{variant}_{size}MiB"] = two_instances.measure(server, size, 7)
    for size in SIZES_MIB:
        print(f"persistent tier, {size} MiB ...", flush=True)
        for name, value in _persistent(size, rounds).items():
            found.setdefault(name, {})[f"{size}MiB"] = value
    print("growth ...", flush=True)
    with running_daemon(pool_bytes="1GiB", chunk_size=growth.CHUNK) as server:
        found["store_us_by_objects"] = growth.with_objects(server)
        found["store_us_by_instances"] = growth.with_instances(server)
    if reason := plain_redis.why_not():
        print(f"Redis is left out: {reason}")
    else:
        for size in SIZES_MIB:
            print(f"plain Redis, {size} MiB ...", flush=True)
            for name, value in plain_redis.measure(size, rounds).items():
                found.setdefault(name, {})[f"{size}MiB"] = value
    return found


def _persistent(size: int, rounds: int) -> dict[str, Any]:
    """Of this folder's disk: objects against plain files, and what writing costs the stores in front of it."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found = {
            f"{name}{suffix}": value
            for suffix, direct in (("", False), ("_direct", True))
            for name, value in tier.measure(
                Path(tempfile.mkdtemp(dir=folder)), size, max(rounds, TIER_ROUNDS), direct
            ).items()
            if name in TIER_FIGURES
        }
        stores = tier_stores.measure(folder, size, TIER_ROUNDS, tier_stores.PAUSE_S_PER_MIB * size)
    return found | {
        "l2_store_on_vs_off": stores["ratio"],
        "l2_store_on_vs_off_interval": stores["interval"],
    }


def main() -> None:
    """Measure, print, write bench.json."""
    found = figures(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
    rows = [
        {"figure": name, "of": part, "value": value}
        for name, parts in found.items()
        for part, value in parts.items()
    ]
    print(render_table(rows))
    Path("bench.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
