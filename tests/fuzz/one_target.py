"""The process of one target: `python -m tests.fuzz.one_target NAME CORPUS [libFuzzer's options]`; libFuzzer ends it."""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["lmcache_qprotocol", "lmcache_qserver"]):
    from tests.fuzz.targets import TARGETS

from tests.fuzz.messages import mutate


def mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the inputs change as messages, the others as bytes."""
    dice = random.Random(seed)
    if dice.random() < 0.5:
        changed = mutate(data, dice)
        if len(changed) <= max_size:
            return changed
    return bytes(atheris.Mutate(data, max_size))


if __name__ == "__main__":
    name = sys.argv.pop(1)
    structured = {} if name == "packets" else {"custom_mutator": mutator}
    atheris.Setup(sys.argv, TARGETS[name].run, **structured)
    atheris.Fuzz()
