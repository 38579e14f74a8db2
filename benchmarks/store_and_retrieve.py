"""store_vs_memcpy and retrieve_vs_memcpy: whole requests over the real daemon against a plain copy of the same bytes.

Store: a worker's STORE_Q of one chunk (16 or 64 MiB) from a block-major ring of 16-token blocks, from submitting to
the answer: message, checks, copy into the pool, stamps, commit. One at a time, and every store is a new chunk, from
other ring blocks than the one before. Duplicate: the same for a chunk that is there already.

Retrieve: the SDK's `retrieve` of such a chunk, transposed into a tensor that is there (`out=`), or into a fresh one,
whose pages the kernel still has to make; "first" is into `out=` too, but from pool pages that this process has not
read before.

The copy that all are held against runs in one thread, from one warm buffer to another, over changing places, too. The
daemon and the SDK may use two threads for a copy.
"""

from __future__ import annotations

import secrets
import statistics

import numpy as np
import torch

from benchmarks.samples import interleaved, seconds, speed_ratio
from benchmarks.worker import (
    CHUNK,
    HEAD_DIM,
    LAYERS,
    MIB,
    PLACES,
    Worker,
    layout_of,
    prompt,
    worker,
)
from lmcache_qclient.qcache import QCacheContext, connect
from lmcache_qserver.testing.daemon import RunningDaemon


class PlainCopy:
    """One `np.copyto` of `nbytes`; the turn's number says from and to which place."""

    def __init__(self, nbytes: int) -> None:
        content = secrets.token_bytes(MIB) * (nbytes // MIB * PLACES)
        self._source = np.frombuffer(bytearray(content), dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self._nbytes = nbytes

    def __call__(self, index: int) -> None:
        place = slice(index % PLACES * self._nbytes, (index % PLACES + 1) * self._nbytes)
        np.copyto(self._target[place], self._source[place])


def measure(server: RunningDaemon, chunk_mib: int, rounds: int) -> dict[str, float]:
    """Ratios for chunks of `chunk_mib` MiB, and the milliseconds of a duplicate."""
    copy = PlainCopy(chunk_mib * MIB)
    name = f"bench-{chunk_mib}"
    with worker(server.url, chunk_mib, name) as ours:
        figures = {"store_vs_memcpy": _store(ours, copy, rounds)}
        figures["duplicate_ms"] = _duplicate(ours, rounds)
        with connect(server.url, server.http_url, name) as cache:
            figures |= _retrieve(cache, layout_of(chunk_mib).num_heads, copy, rounds)
    return figures


def _store(ours: Worker, copy: PlainCopy, rounds: int) -> float:
    pairs = []
    # The first turn over all places is for warming up.
    for first in range(0, PLACES + rounds, PLACES):
        chunks = [ours.prepare(first + place) for place in range(PLACES)]
        pairs += interleaved(lambda place, chunks=chunks: ours.store(chunks[place]), copy, PLACES)  # type: ignore[misc]  # default binds the loop variable
        ours.settle()
    return speed_ratio(pairs[PLACES:])


def _duplicate(ours: Worker, rounds: int) -> float:
    """Median milliseconds of storing again what was stored last."""
    times = []
    for index in range(PLACES, PLACES + rounds):
        chunk = ours.prepare(index)
        times.append(1000 * seconds(lambda chunk=chunk: ours.store(chunk)))  # type: ignore[misc]  # default binds the loop variable
        ours.settle()
    return statistics.median(times)


def _retrieve(cache: QCacheContext, heads: int, copy: PlainCopy, rounds: int) -> dict[str, float]:
    out = torch.empty(LAYERS, CHUNK, heads, HEAD_DIM, dtype=torch.bfloat16)

    def retrieve(index: int, out: torch.Tensor | None) -> None:
        found = cache.retrieve(prompt(PLACES + index % rounds), out=out)
        assert found.num_tokens == CHUNK, found.missing

    first = interleaved(lambda index: retrieve(index, out), copy, rounds)
    into_out = interleaved(lambda index: retrieve(index, out), copy, rounds)
    fresh = interleaved(lambda index: retrieve(index, None), copy, rounds)
    return {
        "retrieve_vs_memcpy": speed_ratio(into_out),
        "retrieve_fresh_vs_memcpy": speed_ratio(fresh),
        "retrieve_first_vs_memcpy": speed_ratio(first),
    }
