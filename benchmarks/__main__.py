"""All benchmarks: prints a table, writes bench.json. `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import overhead, round_trip, store_and_retrieve
from demo.__main__ import MODEL
from demo.model import prepare
from demo.table import render_table
from lmcache_qserver.testing.daemon import running_daemon

SIZES_MIB = (16, 64)
BENCH = Path("bench.json")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=20, help="pairs per size of store and retrieve"
    )
    parser.add_argument(
        "--pairs", type=int, default=12, help="pairs of engine batches; 0 leaves the engine out"
    )
    options = parser.parse_args()

    store, retrieve = {}, {}
    with running_daemon(pool_bytes="3GiB") as server:
        for size in SIZES_MIB:
            print(f"store and retrieve, {size} MiB ...", flush=True)
            store[f"{size}MiB"], retrieve[f"{size}MiB"] = store_and_retrieve.measure(
                server, size, options.rounds
            )
        print("round trip ...", flush=True)
        trip = round_trip.measure(server)
        figures: dict[str, dict[str, Any]] = {
            "store_vs_memcpy": store,
            "retrieve_vs_memcpy": retrieve,
            "rtt_vs_raw": trip,
        }
        if options.pairs:
            print("capture overhead: two engines start, then take turns ...", flush=True)
            prepare(MODEL, print)
            figures["capture_overhead"] = overhead.measure(server, MODEL, options.pairs)
    rows = [
        {"figure": name, "of": part, "value": value}
        for name, parts in figures.items()
        for part, value in parts.items()
    ]
    print(render_table(rows))
    BENCH.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"report: {BENCH}")


if __name__ == "__main__":
    main()
