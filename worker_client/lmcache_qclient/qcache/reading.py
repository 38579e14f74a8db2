"""Finding the chunks of a sequence on all ranks, whole or in pieces, and copying them out of the pool under a lease.

Chunks are asked for by hash first; those that are not there whole, and the last one if the sequence ends inside it, are
asked for again by their tokens: then the server answers with whatever pieces agree, and retrieve joins them.

What has been copied counts only when its lease is known to have held: by its time (`Session.still_leased`), else by the
server, which confirms the release. A lease that had run out before does not protect what was read under it, so the
batch is read again. Bytes that come in answers bring the proof along (`fetched.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from lmcache_qclient.qcache.catalog import RankPart, StoredLayout
from lmcache_qclient.qcache.retrieval import MissingChunk, in_order
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.source import ChunkRead
from lmcache_qclient.qcache.stitch import Bits, check_chunk
from lmcache_qprotocol.errors import ErrorCode, QServerError, RequestError
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.limits import MAX_PARTIALS
from lmcache_qprotocol.messages import (
    ChunkQuery,
    LookupReply,
    Missing,
    PartialChunk,
    RetrieveReply,
)
from lmcache_qprotocol.operations import LOOKUP_Q, RELEASE_Q, RETRIEVE_Q
from lmcache_qprotocol.reasons import MissReason

Result = TypeVar("Result")

LEASE_TRIES = 3
PARTIAL_TOKENS = 1 << 18
"""Most tokens of the partial chunks in one request: about a megabyte."""


@dataclass(frozen=True)
class Wanted:
    """One sequence, of which everything that is stored is wanted.

    Attributes:
        root: the hash before the first chunk.
        hashes: one per whole chunk.
        token_ids: all of them; the last may be in a chunk that is not whole.
        items: of the whole sequence.
        layers: global indices of the layers to read, in order, all of them in the layout; None: all that it has.
    """

    layout: StoredLayout
    chunk_size: int
    cache_salt: str
    root: bytes
    hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]
    items: tuple[ItemIdentity, ...] = ()
    layers: tuple[int, ...] | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global index of each row of the result's layer axis."""
        return self.layout.layer_ids if self.layers is None else self.layers

    def layer_runs(self, part: RankPart) -> list[tuple[int, int, int]]:
        """What a rank has of the layers: (place in the result, place in the rank's chunks, number of neighbours)."""
        first, end = part.layers
        if self.layers is None:
            return [(first, 0, end - first)]
        place = {layer: index for index, layer in enumerate(part.layout.layer_ids)}
        runs: list[tuple[int, int, int]] = []
        for to, layer in enumerate(self.layers):
            if layer not in place:
                continue
            last = runs[-1] if runs else (-1, -1, 0)
            if (to, place[layer]) == (last[0] + last[2], last[1] + last[2]):
                runs[-1] = last[0], last[1], last[2] + 1
            else:
                runs.append((to, place[layer], 1))
        return runs

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)

    @property
    def num_chunks(self) -> int:
        """Chunks that the sequence begins."""
        return -(-self.num_tokens // self.chunk_size)

    def missing(
        self, index: int, reason: MissReason, rank: int | None, rows: tuple[int, int] | None = None
    ) -> MissingChunk:
        """Chunk `index` of the sequence, or rows of it, as a miss."""
        start = index * self.chunk_size
        first, end = rows if rows is not None else (0, self.chunk_size)
        return MissingChunk(index, start + first, min(start + end, self.num_tokens), reason, rank)

    def partial(self, index: int, place: int) -> PartialChunk:
        """Chunk `index` by its tokens.

        Args:
            place: in the query.
        """
        base = index * self.chunk_size
        tokens = self.token_ids[base : base + self.chunk_size]
        items = tuple(
            ItemIdentity(item.kind, item.digest, item.offset - base)
            for item in self.items
            if base <= item.offset < base + len(tokens)
        )
        return PartialChunk(index=place, parent_hash=self.parent(index), tokens=tokens, items=items)

    def parent(self, index: int) -> bytes:
        """The hash before chunk `index`."""
        return self.hashes[index - 1] if index else self.root


@dataclass(frozen=True)
class Found:
    """What is there on all ranks.

    Attributes:
        num_tokens: tokens from the first without a gap.
        missing: all that is not there on some rank, in order.
        in_pieces: by rank, the chunks that are to be asked for by their tokens.
        nonfinite: something that has been read holds NaN or Inf; None when that is not known.
        persisted: all objects that have been read are in the persistent tier, too; False when none was.
        anything: some of it is there on some rank, wherever in the sequence; said by `find` alone.
    """

    num_tokens: int
    missing: tuple[MissingChunk, ...]
    in_pieces: dict[int, frozenset[int]] = field(default_factory=dict, compare=False)
    nonfinite: bool | None = field(default=False, compare=False)
    persisted: bool = field(default=False, compare=False)
    anything: bool = field(default=False, compare=False)


def find(session: Session, wanted: Wanted) -> Found:
    """Look the sequence up on all ranks, without leasing anything."""
    missing: list[MissingChunk] = []
    for rank in wanted.layout.missing_ranks:
        missing += [
            wanted.missing(index, MissReason.NOT_STORED, rank)
            for index in range(len(wanted.hashes))
        ]
    in_pieces: dict[int, frozenset[int]] = {}
    anything = False
    tails: list[list[MissingChunk]] = [_tail_of_nothing(wanted)] * len(wanted.layout.missing_ranks)
    for part in wanted.layout.parts:
        not_whole = _look_up_hashes(session, wanted, part)
        in_pieces[part.rank] = frozenset(not_whole)
        absent = _look_up_tokens(session, wanted, part, not_whole)
        anything |= sum(miss.end - miss.start for miss in absent) < wanted.num_tokens
        missing += [miss for miss in absent if miss.index < len(wanted.hashes)]
        tails.append([miss for miss in absent if miss.index >= len(wanted.hashes)])
    missing += _joined(tails)
    return Found(_reach(wanted, missing), in_order(missing), in_pieces, anything=anything)


def find_all(session: Session, wanteds: Sequence[Wanted]) -> Found:
    """`find` one sequence in the layouts of several shapes of layers: what all of them have."""
    return all_of([find(session, wanted) for wanted in wanteds])


def all_of(founds: Sequence[Found]) -> Found:
    """What is there of all; what several miss alike is said once."""
    missing = dict.fromkeys(miss for found in founds for miss in found.missing)
    return Found(
        min(found.num_tokens for found in founds),
        in_order(tuple(missing)),
        nonfinite=any_flag([found.nonfinite for found in founds]),
        anything=any(found.anything for found in founds),
    )


def found_behind_hashes(
    wanted: Wanted, missing: Sequence[tuple[RankPart, Sequence[Missing]]]
) -> Found:
    """What is there when all whole chunks are, and ranks miss something of the chunk behind them at most."""
    tails = [
        [wanted.missing(miss.index, miss.reason, part.rank, miss.rows) for miss in of_part]
        for part, of_part in missing
    ]
    joined = _joined(tails)
    return Found(_reach(wanted, joined), in_order(joined))


def _reach(wanted: Wanted, missing: Sequence[MissingChunk]) -> int:
    return min((miss.start for miss in missing), default=wanted.num_tokens)


def _tail_of_nothing(wanted: Wanted) -> list[MissingChunk]:
    """The chunk in which the sequence ends, if it does not end at a chunk's end, as a miss."""
    whole = len(wanted.hashes)
    if whole == wanted.num_chunks:
        return []
    return [wanted.missing(whole, MissReason.TOO_SHORT, None)]


def _joined(tails: Sequence[list[MissingChunk]]) -> list[MissingChunk]:
    """What is missing of the last chunk: said once, without a rank, where all ranks miss the same."""
    places = [[(miss.start, miss.end) for miss in tail] for tail in tails]
    if all(place == places[0] for place in places):
        return (
            [MissingChunk(miss.index, miss.start, miss.end, miss.reason) for miss in tails[0]]
            if tails
            else []
        )
    return [miss for tail in tails for miss in tail]


def _look_up_hashes(session: Session, wanted: Wanted, part: RankPart) -> list[int]:
    """The chunks that are not there whole."""
    family = wanted.layout.family(part, wanted.cache_salt)
    absent: list[int] = []
    size = batch_size(session)
    for start in range(0, len(wanted.hashes), size):
        query = ChunkQuery(
            family=family,
            chunk_hashes=wanted.hashes[start : start + size],
            parent_hash=wanted.parent(start),
        )
        reply: LookupReply = session.ask(LOOKUP_Q, (query,))
        absent += [start + miss.index for miss in reply.missing]
    return [*sorted(absent), *range(len(wanted.hashes), wanted.num_chunks)]


def _look_up_tokens(
    session: Session, wanted: Wanted, part: RankPart, chunks: Sequence[int]
) -> list[MissingChunk]:
    """What is missing of these chunks, however they are stored."""
    family = wanted.layout.family(part, wanted.cache_salt)
    absent = []
    size = _partials_per_request(wanted)
    for start in range(0, len(chunks), size):
        partials = tuple(wanted.partial(index, index) for index in chunks[start : start + size])
        query = ChunkQuery(family=family, partials=partials)
        reply: LookupReply = session.ask(LOOKUP_Q, (query,))
        absent += [
            wanted.missing(miss.index, miss.reason, part.rank, miss.rows) for miss in reply.missing
        ]
    return absent


def read(session: Session, wanted: Wanted, found: Found, target: Bits, threads: int = 1) -> Found:
    """Copy the found prefix into `target`; it may have become shorter since.

    Args:
        target: `[layers, >= num_tokens, heads, head_dim]`, bits of the layout's dtype.
        threads: that may copy.
    """
    num_tokens = found.num_tokens
    vanished: list[MissingChunk] = []
    flags: list[bool | None] = []
    persisted: list[bool] = []
    for part in wanted.layout.parts:
        in_pieces = found.in_pieces.get(part.rank, frozenset())
        of_part = _read_part(session, wanted, part, num_tokens, in_pieces, target, threads)
        num_tokens = of_part.num_tokens
        flags.append(of_part.nonfinite)
        persisted.append(of_part.persisted)
        vanished += of_part.missing
    missing = in_order([*found.missing, *vanished])
    return Found(num_tokens, missing, found.in_pieces, any_flag(flags), all(persisted))


class _PartRead(NamedTuple):
    """What was copied of one rank: how many tokens, what was not there any more, and what is known of the objects."""

    num_tokens: int
    missing: list[MissingChunk]
    nonfinite: bool | None
    persisted: bool


def _read_part(
    session: Session,
    wanted: Wanted,
    part: RankPart,
    num_tokens: int,
    in_pieces: frozenset[int],
    target: Bits,
    threads: int,
) -> _PartRead:
    """Copy the first `num_tokens` tokens of one rank."""
    done = 0
    flags: list[bool | None] = []
    persisted = True
    while done < num_tokens:
        batch = _next_batch(session, wanted, part, done, num_tokens, in_pieces)
        copied, reply = _read_batch(session, wanted, part, batch, target, threads)
        flags.append(any_nonfinite(reply))
        persisted &= all_persisted(reply)
        if copied >= batch.end:
            done = copied
            continue
        vanished = [
            wanted.missing(batch.chunk + miss.index, miss.reason, part.rank, miss.rows)
            for miss in reply.missing
        ]
        # What lies behind the prefix that was found is in `found` already.
        vanished = [
            dataclasses.replace(miss, end=min(miss.end, num_tokens))
            for miss in vanished
            if miss.start < num_tokens
        ]
        if any(miss.start <= copied for miss in vanished):
            return _PartRead(copied, vanished, any_flag(flags), persisted)
        if copied <= done:
            raise no_more_leases()
        done = copied
    return _PartRead(num_tokens, [], any_flag(flags), persisted)


def no_more_leases() -> RequestError:
    """The client holds as much of the pool as it may."""
    return RequestError(
        ErrorCode.TOO_MANY_LEASES,
        "the server leases no more to this client: use one context per reader, and read fewer at a time",
    )


def any_nonfinite(reply: RetrieveReply) -> bool | None:
    """Whether something that was leased holds NaN or Inf; None when the server has not looked at all of it yet."""
    return any_flag(
        None if chunk.nonfinite is None else chunk.nonfinite > 0 for chunk in reply.chunks
    )


def all_persisted(reply: RetrieveReply) -> bool:
    """Whether all that was leased is in the persistent tier, too; False when nothing was."""
    return bool(reply.chunks) and all(chunk.persisted for chunk in reply.chunks)


def any_flag(flags: Iterable[bool | None]) -> bool | None:
    """True if one is; else None if one is not known."""
    seen = set(flags)
    return True if True in seen else None if None in seen else False


@dataclass(frozen=True)
class Batch:
    """One request's chunks: from `chunk` on, to token `end` of the sequence at most."""

    query: ChunkQuery
    chunk: int
    end: int


def _next_batch(
    session: Session,
    wanted: Wanted,
    part: RankPart,
    done: int,
    num_tokens: int,
    in_pieces: frozenset[int],
) -> Batch:
    """The chunks from token `done` on; the one that it lies in is asked for again as a whole."""
    first = done // wanted.chunk_size
    stop = min(-(-num_tokens // wanted.chunk_size), first + batch_size(session))
    pieces = [index for index in range(first, stop) if index in in_pieces]
    most = _partials_per_request(wanted)
    if len(pieces) > most:
        stop = pieces[most]
        del pieces[most:]
    query = ChunkQuery(
        family=wanted.layout.family(part, wanted.cache_salt),
        chunk_hashes=wanted.hashes[first:stop],
        parent_hash=wanted.parent(first),
        partials=tuple(wanted.partial(index, index - first) for index in pieces),
    )
    return Batch(query, first, min(num_tokens, stop * wanted.chunk_size))


def _read_batch(
    session: Session, wanted: Wanted, part: RankPart, batch: Batch, target: Bits, threads: int
) -> tuple[int, RetrieveReply]:
    """Copy what follows without a gap.

    Returns:
        Up to which token of the sequence was copied, and what the server said.
    """

    def copy(reply: RetrieveReply) -> int:
        return copy_leading(session, wanted, part, batch, reply, target, threads)

    return under_lease(session, batch.query, copy, batch.end - batch.chunk * wanted.chunk_size)


def under_lease(
    session: Session, query: ChunkQuery, use: Callable[[RetrieveReply], Result], num_tokens: int
) -> tuple[Result, RetrieveReply]:
    """Lease, use, release; again when the lease ran out in between.

    Args:
        use: reads what is leased; what it returns counts only when the lease held.
        num_tokens: that are asked for; for people.

    Raises:
        RequestError(unknown_lease): it ran out time and again.
    """
    for _ in range(LEASE_TRIES):
        asked_at = session.now()
        reply: RetrieveReply = session.ask(RETRIEVE_Q, (query,))
        try:
            result = use(reply)
        except RequestError as error:
            with contextlib.suppress(QServerError, ConnectionError):
                _release(session, reply)
            if error.code is ErrorCode.UNKNOWN_LEASE:
                continue
            raise
        except BaseException:
            with contextlib.suppress(QServerError, ConnectionError):
                _release(session, reply)
            raise
        if _give_back(session, reply, asked_at):
            return result, reply
    raise RequestError(
        ErrorCode.UNKNOWN_LEASE,
        f"the lease ran out {LEASE_TRIES} times before {num_tokens} tokens were "
        "copied: ask for fewer tokens at a time, or raise the server's lease timeout",
    )


def copy_leading(
    session: Session,
    wanted: Wanted,
    part: RankPart,
    batch: Batch,
    reply: RetrieveReply,
    target: Bits,
    threads: int = 1,
) -> int:
    """Copy the rows that follow each other from the batch's first; up to which token of the sequence."""
    reads: list[ChunkRead] = []
    copied = batch.chunk * wanted.chunk_size
    if not reply.chunks:
        return copied
    source = session.source()
    runs = wanted.layer_runs(part)
    for place, chunk in enumerate(reply.chunks):
        check_chunk(chunk, part.layout, wanted.chunk_size, source.nbytes)
        base = (batch.chunk + chunk.index) * wanted.chunk_size
        first, end = chunk.valid if chunk.valid is not None else chunk.rows
        start, stop = base + first, min(base + end, batch.end)
        if start > copied:
            break
        if stop > copied:
            rows = copied - base, stop - base
            parts = tuple(
                (
                    target[to : to + count, copied:stop, slice(*part.heads)],
                    slice(stored, stored + count),
                )
                for to, stored, count in runs
            )
            reads.append(ChunkRead(place, chunk, rows, parts))
            copied = stop
    source.read(reply.lease_id, reads, threads)
    return copied


def _give_back(session: Session, reply: RetrieveReply, asked_at: float) -> bool:
    """Whether the lease held until now; it is given back."""
    if reply.lease_id and session.still_leased(asked_at, reply.lease_ms):
        session.tell(RELEASE_Q, ((reply.lease_id,),))
        return True
    return _release(session, reply)


def _release(session: Session, reply: RetrieveReply) -> bool:
    """Give the lease back. False when it had run out, and what was read under it proves nothing."""
    if not reply.lease_id:
        return not reply.chunks
    try:
        session.ask(RELEASE_Q, ((reply.lease_id,),))
    except RequestError as error:
        if error.code is not ErrorCode.UNKNOWN_LEASE:
            raise
        return False
    return True


def batch_size(session: Session) -> int:
    return max(1, session.connection.hello.limits.chunks_per_request)


def _partials_per_request(wanted: Wanted) -> int:
    return max(1, min(MAX_PARTIALS, PARTIAL_TOKENS // wanted.chunk_size))
