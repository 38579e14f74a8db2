"""l2_put_vs_disk and l2_get_vs_disk: objects through the file adapter, against the same bytes in a plain file.

    put         header and checksum, temporary file, write, fdatasync, name, fsync of the folder; as a coroutine waits
                for it. Against: open, writev, fdatasync of a new file.
    get         into a buffer that is there, and proven by its checksum. Against: open and preadv into such a buffer.
    get, bytes  the same without the proof: what the store alone takes
    get, cold   the same after the kernel was told to forget the file's pages.
    ... direct  written with O_DIRECT, against the same plain file through the cache.

Pairs, who goes first alternates; 1.0 is as fast as the plain file. Seconds of processor time per GB (1e9) are
this process's, kernel included. `python -m benchmarks.tier --folder DISK` (default: the current folder's disk).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.samples import bootstrap_interval, interleaved, speed_ratio
from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qserver.tier import ChunkStore, PutOutcome, open_store
from lmcache_qserver.tier.format import ALIGNMENT, Proof, encode, header_of
from lmcache_qserver.tier.paths import name_of

MIB = 1 << 20
SIZES_MIB = (16, 64)
LAYERS, HEADS, HEAD_DIM = 32, 16, 64
BLOCK_SIZE = 16
CREATED = 1.8e9

Pairs = list[tuple[float, float]]


class Objects:
    """Keys of one layout, their data, and a plain file for each."""

    def __init__(self, chunk_mib: int, folder: Path) -> None:
        self.nbytes = chunk_mib * MIB
        self.layout = Layout(
            feature="transfer_query",
            layer_ids=tuple(range(LAYERS)),
            first_head=0,
            num_heads=HEADS,
            total_heads=HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
        )
        self.chunk_size = self.nbytes // self.layout.token_bytes
        self.family = KeyFamily(
            model_name="bench##query",
            world_size=1,
            kv_rank=kv_rank(1, 0),
            layout_id=layout_id(self.layout),
        )
        self.data = np.random.default_rng(0).integers(0, 256, self.nbytes, np.uint8).data
        self.header = memoryview(bytearray(ALIGNMENT))
        self.target = np.ones(self.nbytes, np.uint8).data
        self.folder = folder

    def key(self, index: int) -> ObjectKey:
        return ObjectKey(family=self.family, chunk_hash=index.to_bytes(32, "little"), rows=None)

    def plain(self, index: int) -> Path:
        return self.folder / f"plain-{index}"

    async def put(self, store: ChunkStore, index: int) -> None:
        """One object."""
        key = self.key(index)
        header = header_of(
            key, self.layout, BLOCK_SIZE, self.chunk_size, (0, self.chunk_size), CREATED
        )
        parts = [memoryview(encode(header, self.data)), self.data]
        assert await store.put(name_of(key), parts) is PutOutcome.WRITTEN

    async def get(self, store: ChunkStore, index: int) -> None:
        """One object, proven."""
        key = self.key(index)
        proofs: list[Proof] = []

        def observe(data: memoryview) -> None:
            if proofs:
                proofs[0].update(data)
            else:  # the first target is the header
                proofs.append(Proof(data, key))

        await store.get_into(name_of(key), [self.header, self.target], observe=observe)
        proofs[0].finish()

    async def get_bytes(self, store: ChunkStore, index: int) -> None:
        """One object as it lies there."""
        await store.get_into(name_of(self.key(index)), [self.header, self.target])

    def put_plain(self, index: int) -> None:
        """The same bytes, as anybody would write them."""
        fd = os.open(self.plain(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        written = os.writev(fd, [self.header, self.data])
        assert written == self.nbytes + ALIGNMENT
        os.fdatasync(fd)
        os.close(fd)

    def get_plain(self, index: int) -> None:
        """The same bytes, as anybody would read them."""
        fd = os.open(self.plain(index), os.O_RDONLY)
        done = os.preadv(fd, [self.header, self.target], 0)
        assert done == self.nbytes + ALIGNMENT
        os.close(fd)

    def forget(self, path: Path) -> None:
        """Out of the page cache."""
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Timed:
    """Coroutines as plain calls, and the processor time that they took."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.cpu_s = 0.0

    def __call__(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> Callable[[int], None]:
        def call(index: int) -> None:
            began = time.process_time()
            self._loop.run_until_complete(work(index))
            self.cpu_s += time.process_time() - began

        return call


def measure(folder: Path, chunk_mib: int, rounds: int, direct: bool) -> dict[str, Any]:
    """Ratios, intervals and processor time for objects of one size."""
    loop = uvloop.new_event_loop()
    objects = Objects(chunk_mib, folder)
    store = loop.run_until_complete(open_store(f"file://{folder}/l2", direct=direct))
    timed = Timed(loop)
    try:
        interleaved(timed(lambda i: objects.put(store, i)), objects.put_plain, 1)
        timed.cpu_s = 0.0
        puts = interleaved(
            timed(lambda i: objects.put(store, i + 1)), lambda i: objects.put_plain(i + 1), rounds
        )
        figures = _figures("put", puts, timed, objects.nbytes)
        for path in [*folder.glob("plain-*"), *(folder / "l2").rglob("*.safetensors")]:
            objects.forget(path)
        colds = interleaved(timed(lambda i: objects.get(store, i)), objects.get_plain, rounds)
        figures |= _figures("get_cold", colds, timed, objects.nbytes)
        gets = interleaved(timed(lambda i: objects.get(store, i)), objects.get_plain, rounds)
        figures |= _figures("get", gets, timed, objects.nbytes)
        alone = interleaved(timed(lambda i: objects.get_bytes(store, i)), objects.get_plain, rounds)
        figures |= _figures("get_bytes", alone, timed, objects.nbytes)
    finally:
        loop.run_until_complete(store.close(10.0))
        loop.close()
    return figures


def _figures(what: str, pairs: Pairs, timed: Timed, nbytes: int) -> dict[str, Any]:
    gigabytes = nbytes * len(pairs) / 1e9
    cpu_s, timed.cpu_s = timed.cpu_s, 0.0
    return {
        f"l2_{what}_vs_disk": speed_ratio(pairs),
        f"l2_{what}_interval": bootstrap_interval(pairs),
        f"l2_{what}_gb_per_s": gigabytes / sum(ours for ours, _ in pairs),
        f"l2_{what}_plain_gb_per_s": gigabytes / sum(theirs for _, theirs in pairs),
        f"l2_{what}_cpu_s_per_gb": cpu_s / gigabytes,
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=12, help="pairs per size")
    options = parser.parse_args()
    results = {}
    for direct in (False, True):
        for chunk_mib in SIZES_MIB:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                name = f"{chunk_mib}mib{'_direct' if direct else ''}"
                results[name] = measure(Path(folder).resolve(), chunk_mib, options.rounds, direct)
                print(name, json.dumps(results[name], indent=1), flush=True)


if __name__ == "__main__":
    main()
