"""All benchmarks: prints a table, writes bench.json. `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import outage, overhead, server
from benchmarks.engine import fast_dtype
from demo.__main__ import MODEL
from demo.model import prepare
from demo.table import render_table

BENCH = Path("bench.json")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=20,
        help="pairs per size of store and retrieve; 0 leaves the server's figures out",
    )
    parser.add_argument(
        "--pairs", type=int, default=30, help="pairs of engine batches; 0 leaves the overhead out"
    )
    parser.add_argument(
        "--outages", type=int, default=6, help="outages of each kind; 0 leaves them out"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        help="of the engines; may be given twice, each has its own figures (the fastest of bfloat16 and float32 here: "
        f"{fast_dtype()})",
    )
    return parser.parse_args()


def main() -> None:
    """Measure and report."""
    options = parse()
    figures: dict[str, Any] = {}
    if options.rounds:
        figures |= server.figures(options.rounds)
    if options.pairs or options.outages:
        prepare(MODEL, print)
    for dtype in options.dtype or [fast_dtype()]:
        # The fastest dtype's figures carry the plain name, another's its own.
        suffix = "" if dtype == fast_dtype() else f"_{dtype}"
        if options.pairs:
            print(
                f"capture overhead, {dtype}: one engine, with and without by turns ...", flush=True
            )
            figures[f"capture_overhead{suffix}"] = overhead.measure(MODEL, options.pairs, dtype)
        if options.outages:
            print(f"outages, {dtype}: the server is killed, then stopped ...", flush=True)
            figures[f"outage{suffix}"] = {
                "killed": outage.measure(MODEL, options.outages, dtype, hang=False),
                "hung": outage.measure(MODEL, options.outages, dtype, hang=True),
            }
    print(render_table(list(rows(figures))))
    BENCH.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"report: {BENCH}")


def rows(figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line a value; parts of parts are named with dots."""
    for name, parts in figures.items():
        for part, value in flat(parts):
            yield {"figure": name, "of": part, "value": value}


def flat(parts: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}}` → ("a.b", 1)."""
    for name, value in parts.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", deep) for inner, deep in flat(value))
        else:
            yield name, value


if __name__ == "__main__":
    main()
