"""Leases that run out, chunks that vanish, answers that lie or get lost: against a scripted server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lmcache_qclient.link.connection import Connection
from lmcache_qclient.qcache.catalog import StoredEntry, StoredLayout, stored_layouts
from lmcache_qclient.qcache.reading import Found, Wanted, find, read
from lmcache_qclient.qcache.session import Session
from lmcache_qprotocol.codec import Request
from lmcache_qprotocol.errors import ErrorCode, ProtocolError, RequestError
from lmcache_qprotocol.keys import kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import LookupReply, Missing, RetrieveReply, StoredChunk
from lmcache_qprotocol.reasons import MissReason
from tests.worker_client.link.fake_server import FakeServer, Silence
from tests.worker_client.qcache.engine import layout_of

CHUNKS = 6
CHUNK_BYTES = 32
LAYOUT = layout_of(layer_ids=(0, 1), num_heads=1, total_heads=1, head_dim=4, dtype="uint8")


def stored_layout() -> StoredLayout:
    entry = StoredEntry(
        model_name="m##query",
        world_size=1,
        kv_rank=kv_rank(1, 0),
        layout_id=layout_id(LAYOUT).hex(),
        layout=LAYOUT,
        chunk_size=4,
    )
    (layout,) = stored_layouts([entry], "m##query")
    return layout


WANTED = Wanted(
    layout=stored_layout(),
    chunk_size=4,
    cache_salt="",
    root=b"\xff" * 32,
    hashes=tuple(bytes([index]) * 32 for index in range(CHUNKS)),
    token_ids=tuple(range(4 * CHUNKS)),
)


class Store:
    """All chunks lie one after the other in the pool, in blocks of two tokens; tests spoil its answers."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.present = set(range(CHUNKS))
        self.cap = CHUNKS
        self.open_leases: set[int] = set()
        self.granted = 0
        self.expiring = 0
        self.change: dict[str, Any] = {}
        self.content = np.arange(CHUNKS * CHUNK_BYTES, dtype=np.uint8)
        os.pwrite(server.pool_fd, self.content.tobytes(), 0)
        server.answers["lookup_q"] = self.look_up
        server.answers["retrieve_q"] = self.retrieve
        server.answers["release_q"] = self.release

    def _asked(self, request: Request) -> list[int]:
        """The chunks that were asked for by hash, or else by tokens: no pieces are stored here."""
        query = request.payloads[0]
        by_tokens = [(partial.parent_hash[0] + 1) % 256 for partial in query.partials]
        return [chunk_hash[0] for chunk_hash in query.chunk_hashes] or by_tokens

    def _missing(self, asked: list[int]) -> tuple[Missing, ...]:
        return tuple(
            Missing(place, MissReason.EVICTED)
            for place, index in enumerate(asked)
            if index not in self.present
        )

    def look_up(self, request: Request) -> LookupReply:
        query = request.payloads[0]
        missing = self._missing(self._asked(request))
        if query.partials:
            assert not query.chunk_hashes
            places = [partial.index for partial in query.partials]
            missing = tuple(
                Missing(
                    places[miss.index], miss.reason, (0, len(query.partials[miss.index].tokens))
                )
                for miss in missing
            )
        prefix = missing[0].index if missing else len(self._asked(request))
        return LookupReply(prefix=prefix, missing=missing)

    def retrieve(self, request: Request) -> RetrieveReply:
        asked = self._asked(request)
        found = [(place, index) for place, index in enumerate(asked) if index in self.present]
        if found[: self.cap]:
            self.granted += 1
            self.open_leases.add(self.granted)
        return RetrieveReply(
            lease_id=self.granted if found[: self.cap] else 0,
            chunks=tuple(self._chunk(place, index) for place, index in found[: self.cap]),
            missing=self._missing(asked),
            partial=len(found) > self.cap,
        )

    def _chunk(self, place: int, index: int) -> StoredChunk:
        chunk = StoredChunk(
            index=place,
            offset=index * CHUNK_BYTES,
            nbytes=CHUNK_BYTES,
            shape=(2, 2, 2, 4),
            dtype="uint8",
            rows=(0, 4),
            generation=1,
        )
        return msgspec.structs.replace(chunk, **self.change)

    def release(self, request: Request) -> None:
        (lease_ids,) = request.payloads
        self.open_leases -= set(lease_ids)
        if self.expiring:
            self.expiring -= 1
            raise RequestError(ErrorCode.UNKNOWN_LEASE, "it has run out")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    server = FakeServer(lifeline=tmp_path / "lifeline.sock")
    yield Store(server)
    server.stop()


@pytest.fixture
def session(store: Store) -> Iterator[Session]:
    session = Session(Connection.open(store.server.url, client="test"), timeout_s=5.0)
    yield session
    session.close()


def target() -> np.ndarray[Any, Any]:
    return np.zeros((2, 4 * CHUNKS, 1, 4), np.uint8)


def content(store: Store) -> np.ndarray[Any, Any]:
    """`[layers, tokens, 1, head_dim]` of what lies in the pool."""
    blocks = store.content.reshape(2 * CHUNKS, 2, 2, 4)
    rows: np.ndarray[Any, Any] = blocks.transpose(1, 0, 2, 3).reshape(2, 4 * CHUNKS, 1, 4)
    return rows


def read_all(session: Session, out: np.ndarray[Any, Any]) -> Found:
    return session.run(lambda: read(session, WANTED, find(session, WANTED), out))


def test_everything(session: Session, store: Store) -> None:
    out = target()
    assert read_all(session, out) == Found(4 * CHUNKS, ())
    assert np.array_equal(out, content(store))
    assert (store.granted, store.open_leases) == (1, set())


@pytest.mark.parametrize("cap", [1, 2, 4, 5])
def test_a_capped_lease_is_released_before_the_next(
    session: Session, store: Store, cap: int
) -> None:
    store.cap = cap
    out = target()
    assert read_all(session, out).num_tokens == 4 * CHUNKS
    assert np.array_equal(out, content(store))
    names = [name for name, _ in store.server.requests if name in ("retrieve_q", "release_q")]
    assert names == ["retrieve_q", "release_q"] * -(-CHUNKS // cap)


def test_a_client_that_gets_no_lease_is_told(session: Session, store: Store) -> None:
    store.cap = 0
    with pytest.raises(RequestError) as caught:
        read_all(session, target())
    assert caught.value.code is ErrorCode.TOO_MANY_LEASES


def test_requests_are_cut_to_the_servers_limit(session: Session, store: Store) -> None:
    session.connection.hello = msgspec.structs.replace(
        session.connection.hello, limits=Limits(chunks_per_request=4)
    )
    store.present.discard(5)
    out = target()
    found = read_all(session, out)
    assert [miss.index for miss in found.missing] == [5]
    assert np.array_equal(out[:, :20], content(store)[:, :20])


def test_a_lease_that_ran_out_proves_nothing_so_it_is_read_again(
    session: Session, store: Store
) -> None:
    store.expiring = 2
    assert read_all(session, target()).num_tokens == 4 * CHUNKS
    assert store.granted == 3


def test_leases_that_always_run_out(session: Session, store: Store) -> None:
    store.expiring = 99
    with pytest.raises(RequestError) as caught:
        read_all(session, target())
    assert caught.value.code is ErrorCode.UNKNOWN_LEASE


def test_a_chunk_that_vanishes_after_the_lookup(session: Session, store: Store) -> None:
    found = session.run(lambda: find(session, WANTED))
    store.present.discard(2)
    out = target()
    left = session.run(lambda: read(session, WANTED, found, out))
    assert left.num_tokens == 8
    assert [(miss.index, miss.reason, miss.start, miss.end) for miss in left.missing] == [
        (2, MissReason.EVICTED, 8, 12)
    ]
    assert np.array_equal(out[:, :8], content(store)[:, :8])
    assert not out[:, 8:].any()
    assert not store.open_leases


@pytest.mark.parametrize(
    "change", [{"offset": 4090}, {"shape": (2, 2, 2, 5)}, {"dtype": "int8"}, {"rows": (0, 3)}]
)
def test_an_answer_that_lies_is_not_followed(
    session: Session, store: Store, change: dict[str, Any]
) -> None:
    store.change = change
    out = target()
    with pytest.raises(ProtocolError):
        read_all(session, out)
    assert not out.any()
    assert not store.open_leases


def test_a_lost_answer_costs_one_renewal_and_drops_its_lease(
    session: Session, store: Store
) -> None:
    session.timeout_s = 0.3
    lost = [True]

    def lose_the_first(request: Request) -> RetrieveReply:
        if lost.pop() if lost else False:
            raise Silence
        return store.retrieve(request)

    store.server.answers["retrieve_q"] = lose_the_first
    former = session.connection.lifeline
    assert read_all(session, target()).num_tokens == 4 * CHUNKS
    assert former is not None
    assert not former.is_open()
    assert sum(name == "hello" for name, _ in store.server.requests) == 2


def test_a_server_that_dies_is_not_waited_for(session: Session, store: Store) -> None:
    """Its lifeline tells; the time-out of an answer is for servers that hang."""
    session.timeout_s = 60.0

    def die(request: Request) -> Any:
        store.server.answers["lookup_q"] = answer
        store.server.hang_up()
        raise Silence

    answer, store.server.answers["lookup_q"] = store.server.answers["lookup_q"], die
    began = time.monotonic()
    assert session.run(lambda: find(session, WANTED)).num_tokens == WANTED.num_tokens
    assert time.monotonic() - began < 10.0


def test_a_session_that_the_server_has_forgotten_is_renewed(session: Session, store: Store) -> None:
    forgotten = [True]

    def forget_once(request: Request) -> RetrieveReply:
        if forgotten.pop() if forgotten else False:
            raise RequestError(ErrorCode.HELLO_REQUIRED, "say hello")
        return store.retrieve(request)

    store.server.answers["retrieve_q"] = forget_once
    assert read_all(session, target()).num_tokens == 4 * CHUNKS
    assert sum(name == "hello" for name, _ in store.server.requests) == 2


def test_other_refusals_are_the_callers(session: Session, store: Store) -> None:
    def refuse(request: Request) -> None:
        raise RequestError(ErrorCode.SHUTTING_DOWN, "soon back")

    store.server.answers["lookup_q"] = refuse
    with pytest.raises(RequestError) as caught:
        read_all(session, target())
    assert caught.value.code is ErrorCode.SHUTTING_DOWN
    assert sum(name == "hello" for name, _ in store.server.requests) == 1
