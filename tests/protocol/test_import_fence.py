"""The protocol package stands at the bottom: it brings in no I/O, no tensors, and none of the packages above it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lmcache_qprotocol

PACKAGE = Path(lmcache_qprotocol.__file__).parent
MODULES = sorted(
    "lmcache_qprotocol" if path.stem == "__init__" else f"lmcache_qprotocol.{path.stem}"
    for path in PACKAGE.glob("*.py")
)
BANNED = {"asyncio", "lmcache_qclient", "lmcache_qserver", "multiprocessing", "numpy", "select"}
BANNED |= {"selectors", "socket", "ssl", "torch", "uvloop", "zmq"}
SCRIPT = """
import importlib, json, sys
import blake3, msgspec, msgspec.msgpack
before = set(sys.modules)
for name in {modules!r}:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def modules_brought_in() -> set[str]:
    """What importing the whole package adds to an interpreter that has msgspec and blake3."""
    script = SCRIPT.format(modules=MODULES)
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})"
    command = [sys.executable, "-c", path + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_protocol_loads_nothing_it_must_not_know() -> None:
    brought = modules_brought_in()
    assert set(MODULES) <= brought
    tops = {name.partition(".")[0] for name in brought}
    assert not tops & BANNED
    # Beyond the standard library there is nothing but the package itself.
    assert tops - set(sys.stdlib_module_names) == {"lmcache_qprotocol"}


def test_the_package_has_these_modules() -> None:
    names = "codec dtypes errors hashing identity keys layout lifeline limits messages operations"
    expected = {f"lmcache_qprotocol.{name}" for name in (names + " reasons stamps").split()}
    assert set(MODULES) == expected | {"lmcache_qprotocol"}
