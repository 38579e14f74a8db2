"""One round trip, and when its copy may be believed without asking the server: against a scripted server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lmcache_qclient.link.connection import Connection
from lmcache_qclient.qcache import one_trip, pool_map, reading
from lmcache_qclient.qcache.copies import copy_all
from lmcache_qclient.qcache.reading import Found, Wanted
from lmcache_qclient.qcache.session import Session
from lmcache_qprotocol.codec import Request
from lmcache_qprotocol.errors import ProtocolError
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import Missing, RetrieveReply
from lmcache_qprotocol.reasons import MissReason
from tests.worker_client.link.fake_server import FakeServer
from tests.worker_client.link.waiting import wait_until
from tests.worker_client.qcache.test_reading import CHUNKS, WANTED, Store, content, target


class Clock:
    """Seconds that only the test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """The scripted store of test_reading, with leases of a second."""

    def __init__(self, lifeline: Path) -> None:
        self.clock = Clock()
        self.server = FakeServer(lifeline=lifeline)
        self.store = Store(self.server)
        self.server.answers["retrieve_q"] = self.retrieve
        connection = Connection.open(self.server.url, client="test")
        self.session = Session(connection, timeout_s=5.0, clock=self.clock)
        self.changes: dict[str, Any] = {"lease_ms": 1000}
        self.out = target()

    def retrieve(self, request: Request) -> RetrieveReply:
        return msgspec.structs.replace(self.store.retrieve(request), **self.changes)

    def names(self) -> list[str]:
        """Operations that the server has seen since the greeting."""
        return [name for name, _ in self.server.requests if name != "hello"]

    def one_trip(self, wanted: Wanted = WANTED) -> Found | None:
        """What `retrieve` does first; None when it would go on to the long way."""
        leased = one_trip.lease(self.session, wanted)
        if leased is None or not one_trip.read(self.session, wanted, leased, self.out, threads=2):
            return None
        return leased.found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "lifeline.sock")
    yield bench
    wait_until(lambda: not bench.store.open_leases)  # whatever happened
    bench.session.close()
    bench.server.stop()


def test_everything_in_one_round_trip(bench: Bench) -> None:
    assert bench.one_trip() == Found(4 * CHUNKS, ())
    assert np.array_equal(bench.out, content(bench.store))
    wait_until(lambda: bench.names() == ["retrieve_q", "release_q"])


def test_a_copy_that_took_longer_than_the_lease_proves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_slowly(copies: Any, threads: int) -> None:
        bench.clock.now += 1.0

    monkeypatch.setattr(pool_map, "copy_all", copy_slowly)
    assert bench.one_trip() is None


def test_a_request_that_took_longer_than_the_lease_proves_nothing(bench: Bench) -> None:
    """The time counts from before the request, because the server's does from when it came."""

    def answer_late(request: Request) -> RetrieveReply:
        bench.clock.now += 1.0
        return bench.retrieve(request)

    bench.server.answers["retrieve_q"] = answer_late
    assert bench.one_trip() is None


def test_a_lease_whose_time_is_not_said_proves_nothing(bench: Bench) -> None:
    bench.changes = {"lease_ms": 0}
    assert bench.one_trip() is None


def test_a_lifeline_that_hung_up_during_the_copy_proves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is gone has lost its leases, and its lifeline before them."""
    lifeline = bench.session.connection.lifeline
    assert lifeline is not None

    def hang_up(copies: Any, threads: int) -> None:
        bench.server.hang_up()
        wait_until(lambda: not lifeline.is_open())

    monkeypatch.setattr(pool_map, "copy_all", hang_up)
    assert bench.one_trip() is None


@pytest.mark.parametrize("absent", range(CHUNKS))
def test_a_chunk_that_is_not_whole_is_for_the_long_way(bench: Bench, absent: int) -> None:
    bench.store.present.discard(absent)
    assert bench.one_trip() is None
    assert not bench.out.any()


def test_a_lease_that_was_cut_is_for_the_long_way(bench: Bench) -> None:
    bench.store.cap = 2
    assert bench.one_trip() is None
    assert not bench.out.any(), "copied in vain"


def test_more_chunks_than_a_request_takes_are_for_the_long_way(bench: Bench) -> None:
    connection = bench.session.connection
    connection.hello = msgspec.structs.replace(
        connection.hello, limits=Limits(chunks_per_request=CHUNKS - 1)
    )
    assert bench.one_trip() is None
    assert not bench.names()


def test_what_is_missing_behind_the_whole_chunks_ends_the_prefix(bench: Bench) -> None:
    wanted = replace(WANTED, token_ids=tuple(range(4 * CHUNKS + 3)))
    bench.changes["missing"] = (Missing(CHUNKS, MissReason.TOO_SHORT, (1, 3)),)
    found = bench.one_trip(wanted)
    assert found is None, "the chunk's first row is said to be there, and did not come"
    bench.changes["missing"] = (Missing(CHUNKS, MissReason.TOO_SHORT, (0, 3)),)
    found = bench.one_trip(wanted)
    assert found is not None
    assert found.num_tokens == 4 * CHUNKS
    assert [(miss.start, miss.end, miss.rank) for miss in found.missing] == [(24, 27, None)]


def test_an_answer_that_lies_is_not_followed(bench: Bench) -> None:
    bench.store.change = {"offset": 4090}
    with pytest.raises(ProtocolError):
        bench.one_trip()
    assert not bench.out.any()


def test_the_long_way_believes_the_time_of_a_lease_too(bench: Bench) -> None:
    found = reading.find(bench.session, WANTED)
    assert reading.read(bench.session, WANTED, found, bench.out).num_tokens == 4 * CHUNKS
    assert np.array_equal(bench.out, content(bench.store))


def test_the_long_way_asks_when_the_time_of_a_lease_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reading.find(bench.session, WANTED)
    bench.store.expiring = 1

    def copy_slowly(copies: Any, threads: int) -> None:
        bench.clock.now += 1.0
        copy_all(copies, threads)

    monkeypatch.setattr(pool_map, "copy_all", copy_slowly)
    assert reading.read(bench.session, WANTED, found, bench.out).num_tokens == 4 * CHUNKS
    assert bench.store.granted == 2, "the first proved nothing, and was read again"
