"""store_vs_memcpy and retrieve_vs_memcpy: whole requests over the real daemon against a plain copy of the same bytes.

A prompt here has four chunks, of 16 or 64 MiB each.

    store           what a prefill step does: a worker hands in the four STORE_Q of a prompt and goes on; the time is
                    from the first one's submitting to the last one's answer (message, checks, copy into the pool,
                    stamps, commit). Every store is a new chunk, from ring blocks of 16 tokens.
    store, single   one STORE_Q at a time, each waited for: what a worker in a hurry would see
    duplicate       a single store of a chunk that is there already
    retrieve        the SDK's `retrieve` of a whole prompt, transposed into a tensor that is there (`out=`)
    ... single      of one chunk
    ... fresh       of one chunk, into a new tensor, whose pages the kernel still has to make
    ... first       of one chunk, into `out=`, from pool pages that this process has not read before

The copy that all are held against runs in one thread, from one warm buffer to another, over changing places, too, once
per chunk. The daemon uses as many threads as it is told, the SDK may use two. `inline_` figures are of the same prompts
with all bytes in messages.
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
from lmcache_qclient.link.connection import AUTO
from lmcache_qclient.qcache import QCacheContext, connect
from lmcache_qserver.testing.daemon import RunningDaemon

PROMPTS_READ = 4
"""Prompts that are read in turn: more than the processor's caches hold."""


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

    def all(self, _: int = 0) -> None:
        """One of every place."""
        for place in range(PLACES):
            self(place)


def measure(
    server: RunningDaemon, chunk_mib: int, rounds: int, transport: str = AUTO
) -> dict[str, float]:
    """Ratios for chunks of `chunk_mib` MiB, and the milliseconds of a duplicate.

    Args:
        transport: of worker and reader.
    """
    copy = PlainCopy(chunk_mib * MIB)
    name = f"bench-{chunk_mib}-{transport}"
    with worker(server.url, chunk_mib, name, transport) as ours:
        figures = _store(ours, copy, rounds)
        with connect(server.url, server.http_url, name, transport=transport) as cache:
            figures |= _retrieve(cache, layout_of(chunk_mib).num_heads, copy, rounds)
    return figures


def stored(server: RunningDaemon, chunk_mib: int, rounds: int) -> dict[str, float]:
    """The store's figures alone."""
    with worker(server.url, chunk_mib, f"bench-{chunk_mib}") as ours:
        return _store(ours, PlainCopy(chunk_mib * MIB), rounds)


def _store(ours: Worker, copy: PlainCopy, rounds: int) -> dict[str, float]:
    whole, single, duplicate = [], [], []
    for number in range(-2, rounds):  # two rounds to warm up
        chunks = [ours.prepare(2 * number + 5, place) for place in range(PLACES)]
        whole += interleaved(lambda _, chunks=chunks: ours.store_all(chunks), copy.all, 1, number)  # type: ignore[misc]  # default binds the loop variable
        ours.settle()
        chunks = [ours.prepare(2 * number + 6, place) for place in range(PLACES)]
        single += interleaved(lambda place, chunks=chunks: ours.store(chunks[place]), copy, PLACES)  # type: ignore[misc]  # as above
        ours.settle()
        again = ours.prepare(2 * number + 6, 0)
        duplicate.append(1000 * seconds(lambda again=again: ours.store(again)))  # type: ignore[misc]  # as above
        ours.settle()
    return {
        "store_vs_memcpy": speed_ratio(whole[2:]),
        "store_single_vs_memcpy": speed_ratio(single[2 * PLACES :]),
        "duplicate_ms": statistics.median(duplicate[2:]),
    }


def _retrieve(cache: QCacheContext, heads: int, copy: PlainCopy, rounds: int) -> dict[str, float]:
    whole = torch.empty(LAYERS, PLACES * CHUNK, heads, HEAD_DIM, dtype=torch.bfloat16)
    out = whole[:, :CHUNK].clone()
    last = 2 * (rounds - 1) + 6

    def retrieve(index: int, tokens: int, out: torch.Tensor | None) -> None:
        found = cache.retrieve(prompt(last - index % PROMPTS_READ)[:tokens], out=out)
        assert found.num_tokens == tokens, found.missing

    first = interleaved(lambda index: retrieve(index, CHUNK, out), copy, PROMPTS_READ)
    single = interleaved(lambda index: retrieve(index, CHUNK, out), copy, rounds)
    fresh = interleaved(lambda index: retrieve(index, CHUNK, None), copy, rounds)
    interleaved(lambda index: retrieve(index, PLACES * CHUNK, whole), copy.all, PROMPTS_READ)
    prompts = interleaved(
        lambda index: retrieve(index, PLACES * CHUNK, whole), copy.all, max(rounds // 2, 8)
    )
    return {
        "retrieve_vs_memcpy": speed_ratio(prompts),
        "retrieve_single_vs_memcpy": speed_ratio(single),
        "retrieve_fresh_vs_memcpy": speed_ratio(fresh),
        "retrieve_first_vs_memcpy": speed_ratio(first),
    }
