"""The main job, from nothing to proof: `python -m demo`, or `make demo`.

1  prepares a real model (SmolLM2-135M)              demo/model.py
2  starts the query server                           a process
3  runs stock vLLM with capture on                   a process, demo/generate.py
4  retrieves the queries by token ids, and compares  a process, demo/verify.py
5  audits the counts, prints a table, writes demo/report.json and demo/queries.png
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo.model import prepare
from demo.table import render_table
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon

MODEL = Path(".cache/smollm2-135m")
REPORT = Path("demo/report.json")
PICTURE = Path("demo/queries.png")
TOLERANCE = 5e-5
"""Relative to the row's norm; both sides compute in fp32, in different orders."""


class Progress:
    """Numbered steps with the time since the start."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)


# The scheduler is counted in the engine's process (demo/generate.py), so the engine stays in that process.
ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def run_module(module: str, **options: object) -> None:
    """Run `python -m module --option value ...`; exit with its code when it fails."""
    arguments = [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    environment = {**ENGINE_ENVIRONMENT, **os.environ}
    code = subprocess.call([sys.executable, "-m", module, *arguments], env=environment)
    if code:
        sys.exit(f"{module} failed with exit code {code}; its messages are above")


def build_report(
    server: RunningDaemon, engine: dict[str, Any], proof: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """One flat account of the run."""
    status, metrics = server.status(), server.metrics()
    coverage = status["coverage"]
    store_seconds = metrics["lmcache_mp_store_seconds_sum"]
    return {
        "tokens_computed": engine["tokens_computed"],
        "tokens_captured": coverage["captured"],
        "tokens_by_reason": {reason: count for reason, count in coverage["lost"].items() if count},
        "tokens_pending": coverage["pending"],
        "tokens_expected": proof["tokens_expected"],
        "chunks_stored": int(metrics['lmcache_mp_store_chunks_total{outcome="stored"}']),
        "chunks_duplicate": int(metrics['lmcache_mp_store_chunks_total{outcome="duplicate"}']),
        "max_rel_row_error": proof["max_rel_row_error"],
        "store_gb_s": metrics["lmcache_mp_store_bytes_total"] / store_seconds / 1e9
        if store_seconds
        else 0.0,
        "retrieve_gb_s": proof["retrieve_gb_s"],
        "seconds": seconds,
    }


def audit(report: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the run; empty when it proves what it should."""
    faults = []
    accounted = report["tokens_captured"] + sum(report["tokens_by_reason"].values())
    if accounted != report["tokens_computed"]:
        faults.append(
            f"captured + counted = {accounted}, but the scheduler computed {report['tokens_computed']}"
        )
    if report["tokens_captured"] != report["tokens_expected"]:
        faults.append(
            f"captured {report['tokens_captured']}, the lengths say {report['tokens_expected']}"
        )
    if not report["max_rel_row_error"] <= TOLERANCE:
        faults.append(
            f"a row is off by {report['max_rel_row_error']:.1e}, allowed are {TOLERANCE:.0e}"
        )
    faults += [
        f"{row['prompt']}: {row['retrieved']} tokens retrieved, {row['expected']} expected"
        for row in rows
        if row["retrieved"] != row["expected"]
    ]
    return faults


def main() -> int:
    """Run the demo; 0 when everything that it claims has been shown."""
    progress = Progress()
    progress.say("1/5 preparing the model")
    prepare(MODEL, lambda text: progress.say(f"    {text}"))
    with tempfile.TemporaryDirectory() as folder, running_daemon(pool_bytes="1GiB") as server:
        progress.say(f"2/5 server is ready (pid {server.pid})")
        engine_report, proof_report = Path(folder, "engine.json"), Path(folder, "proof.json")
        progress.say("3/5 vLLM starts and runs the prompts, with capture on (under a minute)")
        run_module("demo.generate", model=MODEL, server_url=server.url, out=engine_report)
        progress.say(
            "4/5 another process retrieves the queries by token ids and compares every row with transformers"
        )
        run_module(
            "demo.verify",
            model=MODEL,
            server_url=server.url,
            http_url=server.http_url,
            engine_report=engine_report,
            picture=PICTURE,
            out=proof_report,
        )
        engine, proof = json.loads(engine_report.read_text()), json.loads(proof_report.read_text())
        report = build_report(server, engine, proof, time.monotonic() - progress.began)
        faults = audit(report, proof["rows"])
        if faults:
            print(server.log(), file=sys.stderr)
    progress.say("5/5 audit")
    print(render_table(proof["rows"]))
    print(render_table([{"figure": name, "value": value} for name, value in report.items()]))
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    for fault in faults:
        print(f"NOT PROVEN: {fault}")
    print(f"report: {REPORT}   picture: {PICTURE}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
