"""The power goes: what has been acknowledged is there, and what is not whole is not accepted.

A file system in a file, mounted through a loop device. While a writer puts objects the file is copied: the copy is what
a disk would hold at that moment, without anything that the kernel still has in memory. The copy is then mounted, which
replays its journal as after a cut.

The copy takes a moment in which the kernel writes on, so the writer is stopped for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_qserver.tier import Corrupt, open_store
from lmcache_qserver.tier.format import decode, header_bytes
from lmcache_qserver.tier.paths import name_of
from tests.server.tier.conformance import DEADLINE_S, get
from tests.server.tier.power_cut_objects import key_of, object_parts

IMAGE_BYTES = 192 << 20
ACKNOWLEDGED = 30
CUTS = 3

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mkfs.ext4") is None, reason="needs root and mkfs.ext4"
)


@contextlib.contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    """The image's file system; hardly anything is written to it unless somebody asks for that."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-o", "loop,commit=600", str(image), str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"can't mount a file here: {done.stderr.decode()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def cut(folder: Path, direct: str) -> tuple[set[int], Path]:
    """Write, and copy the disk in the middle of it: (what had been acknowledged before the copy, the copy)."""
    image, copy = folder / "disk.img", folder / "copy.img"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(image, folder / "disk") as disk:
        command = [sys.executable, "-m", "tests.server.tier.power_cut_writer"]
        with subprocess.Popen(
            [*command, f"file://{disk}/l2", direct],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(ACKNOWLEDGED)]
            writer.send_signal(signal.SIGSTOP)
            # Sparse: holes are not written, so it takes as long as the data do.
            subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)
            writer.kill()
    return {int(line) for line in lines}, copy


async def accepted(folder: Path) -> tuple[set[int], int]:
    """(objects that are whole, objects that are refused); fails if one is accepted that is not what was written."""
    store = await open_store(f"file://{folder}", timeout_s=DEADLINE_S)
    whole, refused = set(), 0
    numbers = {name_of(key_of(index)): index for index in range(1000)}
    async for entry in store.list():
        index = numbers[entry.name]
        found = memoryview(await get(store, entry.name, entry.nbytes)) if entry.nbytes else b""
        try:
            split = header_bytes(memoryview(found))
            decode(memoryview(found)[:split], memoryview(found)[split:], key_of(index))
        except Corrupt:
            refused += 1
            continue
        assert b"".join(object_parts(index)[1]) == found
        whole.add(index)
    await store.close(DEADLINE_S)
    return whole, refused


@pytest.mark.parametrize("direct", ["cached", "direct"])
@pytest.mark.parametrize("number", range(CUTS))
async def test_a_power_cut_loses_nothing_acknowledged_and_leaves_nothing_torn(
    tmp_path: Path, number: int, direct: str
) -> None:
    acknowledged, copy = cut(tmp_path, direct)
    with mounted(copy, tmp_path / "after") as after:
        whole, refused = await accepted(after / "l2")
        left = os.listdir(after / "l2" / ".tmp")
    assert len(acknowledged) == ACKNOWLEDGED
    assert acknowledged <= whole
    assert refused == 0
    assert left == []
    print(f"cut {number}, {direct}: {len(acknowledged)} acknowledged, {len(whole)} there")
