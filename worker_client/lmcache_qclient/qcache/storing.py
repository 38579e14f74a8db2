"""Storing a sequence: every rank's part of every chunk, and the proof that it is what a reader gets.

    compare what is there ─▶ store, rank by rank ─▶ compare again, if anything was there; else look whether all is

Objects are immutable, and found by tokens and salt alone: where other values are stored for the same tokens, under the
same salt, the new ones can't take their place, and must not lie beside them either. A tail of another length than a
former one is an object of its own, so it is not enough to look at what the server calls a duplicate: whatever it finds
for these tokens is compared, before the first byte is sent. Only what somebody else stores meanwhile, and what lies in
the persistent tier behind a gap, where nobody looks, is found afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_qclient.qcache.catalog import RankPart, StoredLayout
from lmcache_qclient.qcache.chunks_to_store import ChunkToStore
from lmcache_qclient.qcache.comparing import compare
from lmcache_qclient.qcache.part_store import End, PartStore
from lmcache_qclient.qcache.reading import Found, Wanted, find
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.stitch import Bits
from lmcache_qclient.qcache.store_errors import RefusedChunk, StoreConflict, StoreRefused
from lmcache_qclient.qcache.stored import Stored


@dataclass(frozen=True)
class ToStore:
    """A sequence and its values.

    Attributes:
        layout: of all shapes of layers, complete.
        wanteds: the sequence as a reader asks for it, one for each shape, all layers of it.
        bits: `[layers, tokens, heads, head_dim]` for each shape.
        chunks: all of the sequence.
    """

    layout: StoredLayout
    wanteds: Sequence[Wanted]
    bits: Sequence[Bits]
    chunks: Sequence[ChunkToStore]

    def parts(self) -> Iterator[_Part]:
        """Every rank's, of every shape."""
        for wanted, bits in zip(self.wanteds, self.bits, strict=True):
            for part in wanted.layout.parts:
                alone = dataclasses.replace(wanted.layout, parts=(part,), missing_ranks=())
                values = bits[slice(*part.layers), :, slice(*part.heads)]
                yield _Part(part, dataclasses.replace(wanted, layout=alone), values)


class _Part(NamedTuple):
    """One rank's: what a reader asks for that wants it alone, and its values."""

    rank: RankPart
    wanted: Wanted
    values: Bits


@dataclass
class _Tally:
    """What has been stored so far."""

    work: ToStore
    stored: int = 0
    duplicate: int = 0
    nbytes: int = 0

    def note(self, ends: Sequence[End], rank: RankPart) -> None:
        """Count what became of one rank's chunks."""
        for chunk, outcome in ends:
            self.stored += outcome.stored
            self.duplicate += outcome.duplicate
            self.nbytes += outcome.stored * chunk.num_tokens * rank.layout.token_bytes

    def so_far(self) -> Stored:
        num_tokens = self.work.wanteds[0].num_tokens
        return Stored(num_tokens, self.stored, self.duplicate, self.nbytes, self.work.layout)


def store(session: Session, work: ToStore, threads: int = 1) -> Stored:
    """See the head of this file; inside `Session.run`.

    Args:
        threads: that may copy what is read to be compared.

    Raises:
        StoreConflict, StoreRefused: see there.
        RequestError, ConnectionError: the server can't serve it, or does not answer.
    """
    tally = _Tally(work)
    if not work.chunks:
        return tally.so_far()
    touched = False
    for part in work.parts():
        touched |= _compare(session, part, tally, threads).anything
    for part in work.parts():
        with PartStore(
            session,
            part.wanted.layout,
            part.rank,
            part.wanted.chunk_size,
            part.wanted.cache_salt,
        ) as to:
            ends = to.store(work.chunks, part.values)
        tally.note(ends, part.rank)
        _check_taken(ends, part.rank, tally)
    for part in work.parts():
        to_compare = touched or tally.duplicate
        now = _compare(session, part, tally, threads) if to_compare else find(session, part.wanted)
        _check_kept(now, part.rank, tally)
    return tally.so_far()


def _compare(session: Session, part: _Part, tally: _Tally, threads: int) -> Found:
    """Make sure that all that is there of the sequence is what is to be.

    Raises:
        StoreConflict: it is not.
    """
    found, other = compare(session, part.wanted, part.rank, part.values, threads)
    if other is not None:
        raise StoreConflict(other, other // part.wanted.chunk_size, tally.so_far())
    return found


def _check_taken(ends: Sequence[End], rank: RankPart, tally: _Tally) -> None:
    refused = [
        RefusedChunk(chunk.index, chunk.start, chunk.end, rank.rank, reason)
        for chunk, outcome in ends
        for reason in outcome.refused
    ]
    if refused:
        message = next(outcome.message for _, outcome in ends if outcome.refused)
        raise StoreRefused(refused, tally.so_far(), message)


def _check_kept(found: Found, rank: RankPart, tally: _Tally) -> None:
    """The server has taken everything; a pool that is too small has made room for the end at the beginning's cost."""
    if found.num_tokens < tally.work.wanteds[0].num_tokens:
        gone = [
            RefusedChunk(miss.index, miss.start, miss.end, rank.rank, miss.reason)
            for miss in found.missing
        ]
        message = "the server took them, and does not have them any more: give it a larger pool (--pool-bytes)"
        raise StoreRefused(gone, tally.so_far(), message)
