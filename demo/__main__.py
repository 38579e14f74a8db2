"""The main job, from nothing to proof: `python -m demo`, or `make demo`.

1  prepares a real model (SmolLM2-135M)              demo/model.py
2  starts the query server                           a process
3  runs stock vLLM with capture on                   a process, demo/generate.py
4  retrieves queries and keys by token ids,          a process, demo/verify.py
   computes attention from them, compares both
5  audits the counts, prints a table, writes demo/report.json; pictures are in demo/
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo.audit import FEATURES, FINE, TOLERANCES, audit
from demo.model import prepare
from demo.table import render_table
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon

MODEL = Path(".cache/smollm2-135m")
REPORT = Path("demo/report.json")
PICTURES = Path("demo")


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
    """One account of the run."""
    coverage, metrics = server.status()["coverage"]["features"], server.metrics()
    store_seconds = metrics["lmcache_mp_store_seconds_sum"]
    return {
        "tokens_computed": engine["tokens_computed"],
        "tokens_expected": proof["tokens_expected"],
        "features": {
            name: {
                "captured": coverage[name]["captured"],
                "lost": {
                    reason: count for reason, count in coverage[name]["lost"].items() if count
                },
                "pending": coverage[name]["pending"],
            }
            for name in FEATURES
        },
        "chunks_stored": int(metrics['lmcache_mp_store_chunks_total{outcome="stored"}']),
        "chunks_duplicate": int(metrics['lmcache_mp_store_chunks_total{outcome="duplicate"}']),
        **{
            f"max {column}".replace(" ", "_"): max(row[column] for row in proof["rows"])
            for column in TOLERANCES
        },
        "store_gb_s": metrics["lmcache_mp_store_bytes_total"] / store_seconds / 1e9
        if store_seconds
        else 0.0,
        "retrieve_gb_s": proof["retrieve_gb_s"],
        "seconds": seconds,
    }


def render_figures(report: dict[str, Any]) -> str:
    """The report as a table; what is counted for each feature has a row of its own."""
    flat = {name: value for name, value in report.items() if name != "features"}
    for feature, counts in report["features"].items():
        flat |= {f"{feature}: {name}": count or 0 for name, count in counts.items()}
    return render_table([{"figure": name, "value": value} for name, value in flat.items()])


def render_proof(report: dict[str, Any], sink_mass: list[list[float]]) -> str:
    """What the run has shown, in words."""
    masses = [mass for layer in sink_mass for mass in layer]
    share, many = sum(masses) / len(masses), sum(mass > 0.5 for mass in masses)
    rows = max(report["max_query_row_error"], report["max_key_row_error"])
    attention, beyond = report["max_attention_error"], report["max_beyond_1e-5"]
    return (
        f"SHOWN: every stored query and key is transformers' own, to {rows:.1e} of a row's size\n"
        f"SHOWN: softmax(QK^T * scale) of stored tensors is transformers' eager attention, to {attention:.1e} at most\n"
        f"       and to {FINE:.0e} but for {beyond:.1e} of all weights (docs/figures.md says why)\n"
        f"SEEN:  the first four tokens get {share:.0%} of all attention on the longest prompt, more than half "
        f"from {many} of {len(masses)} heads"
    )


def main() -> int:
    """Run the demo; 0 when everything that it claims has been shown."""
    parser = argparse.ArgumentParser(prog="python -m demo", description="The demo: `make demo`.")
    parser.add_argument(
        "--float64",
        action="store_true",
        help="also compare with transformers in float64: whose rounding is what (half a minute more)",
    )
    options = parser.parse_args()
    progress = Progress()
    progress.say("1/5 preparing the model")
    prepare(MODEL, lambda text: progress.say(f"    {text}"))
    with tempfile.TemporaryDirectory() as folder, running_daemon(pool_bytes="1GiB") as server:
        progress.say(f"2/5 server is ready (pid {server.pid})")
        engine_report, proof_report = Path(folder, "engine.json"), Path(folder, "proof.json")
        progress.say("3/5 vLLM starts and runs the prompts, with capture on (under a minute)")
        run_module("demo.generate", model=MODEL, server_url=server.url, out=engine_report)
        progress.say(
            "4/5 another process retrieves queries and keys by token ids, computes attention from them, and compares "
            "every row and every weight with transformers"
        )
        run_module(
            "demo.verify",
            model=MODEL,
            server_url=server.url,
            http_url=server.http_url,
            engine_report=engine_report,
            pictures=PICTURES,
            float64="yes" if options.float64 else "no",
            out=proof_report,
        )
        engine, proof = json.loads(engine_report.read_text()), json.loads(proof_report.read_text())
        report = build_report(server, engine, proof, time.monotonic() - progress.began)
        faults = audit(report, proof["rows"])
        if faults:
            print(server.log(), file=sys.stderr)
    progress.say("5/5 audit")
    print(render_table(proof["rows"]))
    print(render_figures(report))
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    for fault in faults:
        print(f"NOT PROVEN: {fault}")
    if not faults:
        print(render_proof(report, proof["sink_mass"]))
    print(
        f"report: {REPORT}   pictures: {', '.join(str(PICTURES / name) for name in proof['pictures'])}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
