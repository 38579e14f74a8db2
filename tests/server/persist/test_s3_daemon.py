"""Daemons over one bucket: what they share, and what its server can do to them.

Against moto's server, or any other: see s3_server.py. What a server does that stops or freezes is done by a proxy in
front of it.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash
from lmcache_qprotocol.messages import (
    ChunkQuery,
    FlushReply,
    LookupReply,
    PartialChunk,
    PurgeReply,
    RetrieveReply,
)
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT
from lmcache_qserver.testing.daemon import (
    RunningDaemon,
    command,
    environment,
    running_daemon,
    wait_until,
)
from lmcache_qserver.tier import open_store
from tests.server.ring_writer import BLOCK_BYTES
from tests.server.s3_server import BUCKET, SECRET, Admin
from tests.server.tcp_proxy import TcpProxy, running_proxy
from tests.server.test_salts import SALTS
from tests.server.wire_worker import CHUNK, MODEL, WireWorker, name_of, rows_of

URL = f"s3://{BUCKET}/captures"
FLUSH_MS = 9000
TIMEOUT_S = 1.0
"""For a server that does not answer."""
BOUNDED_S = 5.0
"""In which an answer comes nevertheless: a few of the former."""
TOKENS = tuple(range(100, 100 + CHUNK))
SEQUENCE = tuple(name_of((*TOKENS[1:], number)) for number in range(12))
"""Hashes of chunks that follow each other."""
LAYER_BYTES = BLOCK_BYTES // len(SMALL_LAYOUT.layer_ids)
ROW_BYTES = LAYER_BYTES // CHUNK
PAGE_OBJECTS = 1000
"""S3 lists so many at most per request."""

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("s3_environment")]


def s3_daemon(
    through: TcpProxy | None = None, **settings: Any
) -> AbstractContextManager[RunningDaemon]:
    """A daemon over the bucket.

    Args:
        through: the way to it.
    """
    env = {} if through is None else {"AWS_ENDPOINT_URL": through.url}
    return running_daemon(env, **{"chunk_size": CHUNK, "pool_bytes": "1MiB", "l2": URL, **settings})


@pytest.fixture
def proxy(s3_environment: str) -> Iterator[TcpProxy]:
    """Of which a test makes use before it starts daemons behind it."""
    with running_proxy(s3_environment) as proxy:
        yield proxy


@pytest.fixture
def first() -> Iterator[WireWorker]:
    """A worker of one server."""
    with s3_daemon() as daemon, WireWorker(daemon) as worker:
        yield worker


@pytest.fixture
def second() -> Iterator[WireWorker]:
    """A reader, and worker, of another."""
    with s3_daemon() as daemon, WireWorker(daemon) as worker:
        yield worker


def tier(worker: WireWorker) -> dict[str, Any]:
    """What its server says of the bucket."""
    report: dict[str, Any] = worker.daemon.status()["l2"]
    return report


def flush(worker: WireWorker) -> None:
    """All that it has stored is in the bucket."""
    reply: FlushReply = worker.client.ask("flush_q", FLUSH_MS).result
    assert reply.persisted, reply


def store_sequence(worker: WireWorker) -> None:
    """All of `SEQUENCE`, and none of it in the ring any more."""
    for first in range(0, len(SEQUENCE), 4):
        nonces = [
            worker.ring.write(block, (first + block) * CHUNK, rows_of(first + block))
            for block in range(4)
        ]
        key = worker.key(
            *SEQUENCE[first : first + 4],
            start=first * CHUNK,
            end=(first + 4) * CHUNK,
            **({} if not first else {"request_id": "goes on"}),
        )
        assert worker.send_store(key, (0, 1, 2, 3), tuple(nonces)).stored == 4


def piece(first: int, end: int) -> dict[str, Any]:
    """Rows [first, end) of the chunk of `TOKENS`; of all of it, the chunk itself, found by its tokens too."""
    return {
        "start": first,
        "end": end,
        "chunk_hashes": (chunk_hash(NONE_HASH, TOKENS[:end], 0, ()),),
        "parent_hash": NONE_HASH,
        "piece_tokens": TOKENS[:end],
    }


def store_piece(worker: WireWorker, first: int, end: int, rows: bytes) -> None:
    nonce = worker.ring.write(0, 0, rows)
    assert worker.send_store(worker.key(**piece(first, end)), (0,), (nonce,)).stored == 1


def partly(worker: WireWorker, tokens: tuple[int, ...], more: str = "retrieve_q") -> Any:
    """The answer for a part of a chunk, by its tokens."""
    asked = PartialChunk(index=0, parent_hash=NONE_HASH, tokens=tokens)
    return worker.client.ask(more, ChunkQuery(family=worker.family(), partials=(asked,))).result


def read_at(worker: WireWorker, number: int) -> bytes | str:
    """One chunk of `SEQUENCE`, or the reason why it is not there."""
    parent = SEQUENCE[number - 1] if number else None
    query = ChunkQuery(family=worker.family(), chunk_hashes=(SEQUENCE[number],), parent_hash=parent)
    reply: RetrieveReply = worker.client.ask("retrieve_q", query).result
    if not reply.chunks:
        return reply.missing[0].reason.value
    (found,) = reply.chunks
    worker.client.ask("release_q", (reply.lease_id,))
    return worker.pool[found.offset : found.offset + found.nbytes]


def in_bounded_time(ask: Callable[[], Any]) -> Any:
    began = time.monotonic()
    answer = ask()
    assert time.monotonic() - began < BOUNDED_S
    return answer


# --- two servers ------------------------------------------------------------------------------------------------


def test_what_is_stored_through_one_server_is_served_by_another(
    first: WireWorker, second: WireWorker
) -> None:
    store_sequence(first)
    flush(first)
    query = ChunkQuery(family=second.family(), chunk_hashes=SEQUENCE)
    found: LookupReply = second.client.ask("lookup_q", query).result
    assert (found.prefix, found.tokens) == (len(SEQUENCE), len(SEQUENCE) * CHUNK)
    assert tier(second)["brought"] == 0, "a lookup brings nothing"
    reply: RetrieveReply = second.retrieve(*SEQUENCE)
    for number, chunk in enumerate(reply.chunks):
        held = second.pool[chunk.offset : chunk.offset + chunk.nbytes]
        assert held == rows_of(number)
    assert reply.tokens == len(SEQUENCE) * CHUNK
    report = tier(second)
    assert (report["brought"], report["submitted"]) == (len(SEQUENCE), 0), "and writes none again"
    assert tier(first)["written"] == len(SEQUENCE)


def test_a_store_of_what_another_server_has_written_is_written_once(
    first: WireWorker, second: WireWorker, s3_admin: Admin
) -> None:
    name = name_of(TOKENS)
    assert first.store(name, rows_of(1)).stored == 1
    flush(first)
    assert second.store(name, rows_of(2)).stored == 1
    flush(second)
    report = tier(second)
    assert (report["written"], report["already_there"]) == (0, 1)
    assert len(s3_admin.objects()) == 1
    with s3_daemon() as third, WireWorker(third) as reader:
        assert reader.read(name) == rows_of(1), "the first one stays"


def test_of_the_same_chunk_stored_through_both_at_once_one_is_written(proxy: TcpProxy) -> None:
    name = name_of(TOKENS)
    with (
        s3_daemon(proxy) as one,
        s3_daemon(proxy) as other,
        WireWorker(one) as first,
        WireWorker(other) as second,
    ):
        proxy.freeze()
        for worker, rows in ((first, rows_of(1)), (second, rows_of(2))):
            assert worker.store(name, rows).stored == 1
        wait_until(lambda: proxy.count("PUT") == 2, "both puts are under way")
        proxy.pass_on()
        flush(first)
        flush(second)
        reports = [tier(first), tier(second)]
        assert sorted(one["written"] for one in reports) == [0, 1]
        assert sorted(one["already_there"] for one in reports) == [0, 1]
        written = [rows_of(1), rows_of(2)][[one["written"] for one in reports].index(1)]
    with s3_daemon() as third, WireWorker(third) as reader:
        assert reader.read(name) == written


def test_pieces_and_parts_are_found_under_their_parent(
    first: WireWorker, second: WireWorker
) -> None:
    """By a server that never saw them, and knows the asked tokens only."""
    store_piece(first, 0, 5, rows_of(1))
    store_piece(first, 5, 9, rows_of(2))
    flush(first)
    other = (*TOKENS[:3], 7, 7)
    assert partly(second, other).tokens == 3, "as far as the tokens agree: headers tell"
    looked: LookupReply = partly(second, TOKENS[:12], "lookup_q")
    assert looked.tokens == 9
    reply: RetrieveReply = partly(second, TOKENS[:12])
    assert reply.tokens == 9
    for one, (rows, first_row, end) in zip(
        reply.chunks, ((rows_of(1), 0, 5), (rows_of(2), 5, 9)), strict=True
    ):
        held = second.pool[one.offset : one.offset + one.nbytes]
        for layer in range(2):  # the rows of a piece lie where they lie in its chunk
            place = slice(
                layer * LAYER_BYTES + first_row * ROW_BYTES, layer * LAYER_BYTES + end * ROW_BYTES
            )
            assert held[place] == rows[place]
    assert tier(second)["brought"] == 2
    assert partly(second, (7, *TOKENS[1:])).tokens == 0


def test_a_whole_chunk_is_found_by_a_part_of_its_tokens(
    first: WireWorker, second: WireWorker
) -> None:
    store_piece(first, 0, CHUNK, rows_of(3))
    flush(first)
    reply: RetrieveReply = partly(second, TOKENS[:7])
    assert reply.tokens == 7
    (chunk,) = reply.chunks
    assert second.pool[chunk.offset : chunk.offset + chunk.nbytes] == rows_of(3)


def test_a_server_that_comes_back_serves_what_the_other_wrote_meanwhile(first: WireWorker) -> None:
    before, meanwhile = SEQUENCE[0], SEQUENCE[1]
    with s3_daemon() as daemon, WireWorker(daemon) as worker:
        assert worker.store(before, rows_of(1)).stored == 1
        flush(worker)
        daemon.process.kill()
        daemon.process.wait()
    assert first.store(meanwhile, rows_of(2)).stored == 1
    flush(first)
    with s3_daemon() as daemon, WireWorker(daemon) as worker:
        assert worker.read(before) == rows_of(1)
        assert worker.read(meanwhile) == rows_of(2)
        assert first.read(before) == rows_of(1)


# --- what is known without asking -----------------------------------------------------------------------------------


def test_models_come_back_without_an_engine_and_without_listing_the_bucket(
    first: WireWorker, proxy: TcpProxy, s3_admin: Admin
) -> None:
    store_sequence(first)
    flush(first)
    (model,) = first.daemon.status()["models"]
    layout = min(s3_admin.objects()).removeprefix("captures/").rsplit("/", 3)[0]
    asyncio.run(add_objects(f"{layout}/z", PAGE_OBJECTS))
    with s3_daemon(proxy) as daemon, WireWorker(daemon, register=False) as reader:
        wait_until(lambda: not tier(reader)["indexing"], "what there is is known")
        (known,) = daemon.status()["models"]
        for field in ("model_name", "world_size", "kv_rank", "layout_id", "layout", "chunk_size"):
            assert known[field] == model[field]
        assert (known["chunks"], known["persisted"], tier(reader)["objects"]) == (0, 0, 0)
        lists = [one for one in proxy.requests if "list-type=2" in one]
        # One to see that there is a bucket, one each for models and layouts, one for an object.
        assert len(lists) == 4, lists
        assert not [one for one in lists if "continuation-token" in one]
        assert reader.read(SEQUENCE[0]) == rows_of(0)
        (known,) = daemon.status()["models"]
        assert (known["chunks"], known["persisted"], tier(reader)["objects"]) == (1, 1, 1)
        assert len([one for one in proxy.requests if "list-type=2" in one]) == 4, "asked by name"


def test_what_hangs_on_a_parent_is_listed_and_nothing_that_lies_beside_it(
    first: WireWorker, proxy: TcpProxy, s3_admin: Admin
) -> None:
    store_piece(first, 0, 5, rows_of(1))
    flush(first)
    (name,) = s3_admin.objects()
    folder = name.removeprefix("captures/").rpartition("/")[0]
    for neighbours in ("-", "z"):  # before and behind
        asyncio.run(add_objects(f"{folder}/{neighbours}", 6 * PAGE_OBJECTS // 10))
    with s3_daemon(proxy) as daemon, WireWorker(daemon, register=False) as reader:
        wait_until(lambda: not tier(reader)["indexing"], "what there is is known")
        before = len(proxy.requests)
        assert partly(reader, TOKENS[:7]).tokens == 5
        asked = [one for one in proxy.requests[before:] if "list-type=2" in one]
        assert len(asked) == 1, asked
        # And two for the piece: its header, then its data.
        assert len(proxy.requests) - before == 3


async def add_objects(folder: str, count: int) -> None:
    """As many more, of no use."""
    store = await open_store(URL)
    data = memoryview(b"x")
    for start in range(0, count, 100):
        await asyncio.gather(
            *(store.put(f"{folder}/{start + number}", [data]) for number in range(100))
        )
    await store.close(10.0)


# --- mistakes of an operator ------------------------------------------------------------------------------------


def start(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A daemon that does not get far."""
    settings: dict[str, Any] = {
        "url": "tcp://127.0.0.1:0",
        "http_port": 0,
        "pool_bytes": "1MiB",
        "lifeline": tmp_path / "lifeline.sock",
        "ready_file": tmp_path / "ready.json",
        "l2": env.pop("l2", URL),
    }
    return subprocess.run(
        command(**settings),
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def assert_told(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """It has ended with one line that says all of this."""
    assert done.returncode == 1, done.stderr
    told = [line for line in done.stderr.splitlines() if "listens" not in line]
    assert len(told) == 1, done.stderr
    for word in (*words, "--l2"):
        assert word in told[0], told[0]
    assert SECRET not in done.stderr.replace(URL, "")
    assert "wrong-secret" not in done.stderr


def test_wrong_credentials_are_told_at_the_start(tmp_path: Path, s3_admin: Admin) -> None:
    with s3_admin.rejecting():
        nobody = start(tmp_path, AWS_ACCESS_KEY_ID="NOBODY", AWS_SECRET_ACCESS_KEY="wrong-secret")
        wrong = start(tmp_path, AWS_SECRET_ACCESS_KEY="wrong-secret")
    assert_told(nobody, URL, "403")
    assert_told(wrong, URL, "403")


def test_a_bucket_that_does_not_exist_is_told_at_the_start(tmp_path: Path) -> None:
    assert_told(
        start(tmp_path, l2="s3://no-such-bucket/x"), "s3://no-such-bucket/x", "NoSuchBucket"
    )


# --- a server that stops, or freezes --------------------------------------------------------------------------------


def test_a_server_that_stops_in_the_middle_of_a_put(proxy: TcpProxy, s3_admin: Admin) -> None:
    with s3_daemon(proxy) as daemon, WireWorker(daemon) as worker:
        proxy.cut_put()
        assert worker.store(SEQUENCE[0], rows_of(0)).stored == 1
        wait_until(lambda: tier(worker)["errors"]["unavailable"], "the put has failed")
        assert proxy.is_cut
        assert s3_admin.objects() == {}, "no half of an object"
        assert worker.store(SEQUENCE[1], rows_of(1)).stored == 1, "storing goes on"
        assert worker.read(SEQUENCE[0]) == rows_of(0)
        wait_until(lambda: tier(worker)["state"] == "failing", "that is told")
        reply: FlushReply = worker.client.ask("flush_q", FLUSH_MS).result
        assert (reply.persisted, reply.waiting) == (False, 2)
        assert "failing" in reply.message
        proxy.pass_on()
        wait_until(lambda: tier(worker)["written"] == 2, "it is written later")
        report = tier(worker)
        assert (report["state"], report["waiting"]) == ("ready", 0)
        assert not any(report["lost"].values())
    with s3_daemon() as daemon, WireWorker(daemon) as reader:
        assert [reader.read(name) for name in SEQUENCE[:2]] == [rows_of(0), rows_of(1)]


def test_a_server_that_is_not_there_at_the_start(proxy: TcpProxy) -> None:
    proxy.cut_off()
    with s3_daemon(proxy, l2_timeout_s=TIMEOUT_S) as daemon, WireWorker(daemon) as worker:
        assert tier(worker)["state"] == "opening"
        assert worker.store(SEQUENCE[0], rows_of(0)).stored == 1
        assert worker.read(SEQUENCE[0]) == rows_of(0)
        assert tier(worker)["waiting"] == 1
        proxy.pass_on()
        wait_until(lambda: tier(worker)["written"] == 1, "it is open, and written to")
        assert tier(worker)["state"] == "ready"


def test_a_frozen_server_holds_up_nobody(first: WireWorker, proxy: TcpProxy) -> None:
    store_sequence(first)
    flush(first)
    with s3_daemon(proxy, l2_timeout_s=TIMEOUT_S) as daemon, WireWorker(daemon) as worker:
        assert read_at(worker, 0) == rows_of(0)
        proxy.freeze()
        assert in_bounded_time(lambda: read_at(worker, 1)) == "unavailable"
        reply: RetrieveReply = in_bounded_time(lambda: worker.retrieve(*SEQUENCE))
        assert reply.tokens == CHUNK, "what is in memory"
        worker.client.ask("release_q", (reply.lease_id,))
        assert {miss.reason.value for miss in reply.missing} == {"unavailable"}, "asked or not"
        for tokens in (TOKENS, TOKENS[:7]):
            for question in ("retrieve_q", "lookup_q"):
                found = in_bounded_time(lambda: partly(worker, tokens, question))  # noqa: B023
                assert [miss.reason.value for miss in found.missing] == ["unavailable"]
        fresh = name_of(TOKENS)
        assert in_bounded_time(lambda: worker.store(fresh, rows_of(50))).stored == 1
        assert worker.read(fresh) == rows_of(50)
        wait_until(lambda: tier(worker)["state"] == "failing", "that is told")
        wait_until(lambda: tier(worker)["errors"]["unavailable"], "and counted")
        assert tier(worker)["missed"]["unavailable"] >= 3
        assert daemon.get("/readyz") == "ok\n"
        began = time.monotonic()
        assert read_at(worker, 2) == "unavailable"
        assert time.monotonic() - began < TIMEOUT_S, "who asks again does not wait again"
        proxy.pass_on()
        wait_until(lambda: tier(worker)["state"] == "ready", "that is over, though nobody reads")
        assert read_at(worker, 1) == rows_of(1)
        flush_when_ready(worker)
        report = tier(worker)
        assert (report["state"], report["waiting"]) == ("ready", 0)
        # A put that was given up may have been done nevertheless.
        assert report["written"] + report["already_there"] == 1
    with s3_daemon() as daemon, WireWorker(daemon) as reader:
        assert reader.read(fresh) == rows_of(50)


def flush_when_ready(worker: WireWorker) -> None:
    """`flush` gives up at once while the tier fails."""
    wait_until(lambda: not tier(worker)["waiting"] + tier(worker)["writing"], "all is written")
    flush(worker)


def test_it_stops_in_bounded_time_while_the_server_is_frozen(proxy: TcpProxy) -> None:
    with s3_daemon(proxy, l2_timeout_s=TIMEOUT_S, drain_timeout_s=1.0) as daemon:
        with WireWorker(daemon) as worker:
            proxy.freeze()
            assert worker.store(SEQUENCE[0], rows_of(0)).stored == 1
            wait_until(lambda: proxy.count("PUT"), "a put is under way")
        began = time.monotonic()
        daemon.process.terminate()
        assert daemon.process.wait(20) == 0
        assert time.monotonic() - began < 2 * BOUNDED_S
        assert "Traceback" not in daemon.log()


# --- salts ----------------------------------------------------------------------------------------------------------


def test_c24_salts_share_a_bucket_and_nothing_else(
    first: WireWorker, second: WireWorker, s3_admin: Admin
) -> None:
    name = name_of(TOKENS)
    for number, salt in enumerate(SALTS.values()):
        assert first.store(name, rows_of(number), salt=salt).stored == 1
    flush(first)
    for number, salt in enumerate(SALTS.values()):
        assert second.read(name, salt=salt) == rows_of(number)
    assert second.read(name, salt="another") == "not_stored"
    names = s3_admin.objects()
    assert len(names) == len(SALTS)
    assert all(
        one.startswith(f"captures/v1/{MODEL.replace('/', '=2F')}=23=23query/") for one in names
    )
    told = " ".join(names) + second.daemon.get("/status") + second.daemon.get("/metrics")
    told += first.daemon.log() + second.daemon.log()
    for which in ("path", "emoji", "newline", "longest", "300 bytes", "default"):
        assert SALTS[which] not in told
        assert SALTS[which].encode("unicode_escape").decode() not in told
    assert SECRET not in second.daemon.get("/metrics")


@pytest.mark.parametrize("victim", ["empty", "default", "parent"])
def test_c24_one_salt_is_purged_and_the_others_stay(
    victim: str, first: WireWorker, s3_admin: Admin
) -> None:
    name = name_of(TOKENS)
    for number, salt in enumerate(SALTS.values()):
        assert first.store(name, rows_of(number), salt=salt).stored == 1
    flush(first)
    purged: PurgeReply = first.client.ask("purge_q", MODEL, SALTS[victim]).result
    assert (purged.dropped, purged.deleted, purged.message) == (1, 1, "")
    assert len(s3_admin.objects()) == len(SALTS) - 1
    with s3_daemon() as daemon, WireWorker(daemon) as reader:
        for number, (which, salt) in enumerate(SALTS.items()):
            wanted = "not_stored" if which == victim else rows_of(number)
            assert reader.read(name, salt=salt) == wanted
    assert first.read(name, salt=SALTS[victim]) in ("purged", "not_stored")
