"""Fuzz each target for a while, from the golden vectors on: `python -m tests.fuzz --seconds 20`.

Ends with 1 at the first fault, which is printed with the input that makes it; `--replay FILE` runs that input again.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from tests.fuzz.targets import TARGETS

MAX_BYTES = 1 << 15
INPUT_S = 10
"""An input that takes longer is a fault."""
RSS_MIB = 2048
LEFT_S = 60
"""Added to the time of a target for starting and for its last input."""


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="in all")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--corpus", type=Path, help="folder to keep what was found; else temporary")
    parser.add_argument("--replay", type=Path, help="run this one input and nothing else")
    asked = parser.parse_args()
    names = asked.target or sorted(TARGETS)
    if asked.replay is not None:
        for name in names:
            TARGETS[name].run(asked.replay.read_bytes())
        return 0
    if importlib.util.find_spec("atheris") is None:
        print(
            "fuzz: no atheris for this Python or machine (3.11 and up, x86-64): nothing is fuzzed"
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="qserver-fuzz-") as folder:
        corpus = asked.corpus or Path(folder)
        return max(_fuzz(name, corpus / name, asked.seconds / len(names)) for name in names)


def _fuzz(name: str, corpus: Path, seconds: float) -> int:
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in TARGETS[name].seeds():
        (corpus / sha256(seed).hexdigest()[:16]).write_bytes(seed)
    faults = corpus.parent / f"{name}-fault-"
    options = {
        "max_total_time": max(1, round(seconds)),
        "max_len": MAX_BYTES,
        "timeout": INPUT_S,
        "rss_limit_mb": RSS_MIB,
        "artifact_prefix": faults,
        "print_final_stats": 1,
    }
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.one_target", name, str(corpus)),
            *(f"-{option}={value}" for option, value in options.items()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds + LEFT_S,
        check=False,
    )
    if done.returncode:
        print(f"fuzz: {name} failed\n{done.stdout[-6000:]}")
        for fault in sorted(corpus.parent.glob(f"{name}-fault-*")):
            print(f"fuzz: the input, as hex: {fault.read_bytes().hex()}")
        return 1
    runs, coverage = _last(r"#(\d+)\s+\w", done.stdout), _last(r"cov: (\d+)", done.stdout)
    found = len(list(corpus.iterdir()))
    print(
        f"fuzz: {name}: {runs} inputs in {time.monotonic() - began:.0f} s, "
        f"{coverage} edges covered, corpus of {found}"
    )
    return 0


def _last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    return found[-1] if found else "?"


if __name__ == "__main__":
    sys.exit(main())
