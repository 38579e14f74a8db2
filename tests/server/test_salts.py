"""C24, in memory: whatever a salt says, it keeps tenants apart and gets nowhere but into a digest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lmcache_qprotocol.codec import encode
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.limits import MAX_SALT_CHARS
from lmcache_qprotocol.messages import StoreProof
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.server.wire_worker import CHUNK, WireWorker, name_of, rows_of

TOKENS = tuple(range(CHUNK))
NAME = name_of(TOKENS)
SALTS = {
    "empty": "",
    "default": "_default",
    "at": "@",
    "slash": "/",
    "parent": "..",
    "path": "../../../../tmp/lmcache-qserver-salt",
    "emoji": "\U0001f511\U0001f511",
    "300 bytes": "\u00e9" * 150,
    "NUL": "a\0b",
    "newline": 'x"} 1\nlmcache_mp_store_bytes_total{a="',
    "longest": "s" * MAX_SALT_CHARS,
    "none's name": "None",
    "almost": "_default ",
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=CHUNK, pool_bytes="1MiB") as running:
        yield running


@pytest.fixture
def worker(daemon: RunningDaemon) -> Iterator[WireWorker]:
    with WireWorker(daemon) as made:
        yield made


def test_c24_every_salt_has_its_own_object(daemon: RunningDaemon, worker: WireWorker) -> None:
    before = {path for folder in ("/tmp", "/dev/shm") for path in Path(folder).iterdir()}
    for number, salt in enumerate(SALTS.values()):
        assert worker.read(NAME, salt=salt) == "not_stored"
        assert worker.store(NAME, rows_of(number), salt=salt).stored == 1
        assert worker.store(NAME, rows_of(99), salt=salt).duplicate == 1, "the first one stays"
    for number, salt in enumerate(SALTS.values()):
        assert worker.read(NAME, salt=salt) == rows_of(number)
    digests = {
        ObjectKey(family=worker.family(salt), chunk_hash=NAME).digest() for salt in SALTS.values()
    }
    assert len(digests) == len(SALTS)
    after = {path for folder in ("/tmp", "/dev/shm") for path in Path(folder).iterdir()}
    assert after <= before, "a salt is no path"
    told = daemon.get("/status") + daemon.get("/metrics") + daemon.log()
    for name in ("path", "emoji", "newline", "longest", "300 bytes"):
        assert SALTS[name] not in told
        assert SALTS[name].encode("unicode_escape").decode() not in told


def test_c24_a_salt_that_is_nil_is_the_empty_one(worker: WireWorker) -> None:
    """LMCache sends nil for no salt; no text means the same."""
    chunk = os.urandom(32)
    nonce = worker.ring.write(0, 0, rows_of(1))
    plain = msgspec.to_builtins(worker.key(chunk), builtin_types=(bytes,))
    frames = [{**plain, "cache_salt": None}, "worker", [[0]], b"", StoreProof(nonces=(nonce,))]
    worker.client.send([b"\x01", b"\x05", *map(encode, frames)])
    assert msgspec.msgpack.decode(worker.client.receive()[2])[2] == {"stored": 1}
    assert worker.read(chunk, salt="") == rows_of(1)
    assert worker.read(chunk, salt="None") == "not_stored"


def test_c24_a_salt_too_long_is_refused(worker: WireWorker) -> None:
    plain = msgspec.to_builtins(worker.key(NAME), builtin_types=(bytes,))
    key = {**plain, "cache_salt": "s" * (MAX_SALT_CHARS + 1)}
    proof = StoreProof(nonces=(1,))
    assert worker.code("store_q", key, "worker", ((0,),), b"", proof) == "bad_payload"


@pytest.mark.parametrize("victim", ["empty", "default"])
def test_c24_one_salts_object_is_evicted_and_the_others_stay_right(victim: str) -> None:
    others = {name: salt for name, salt in SALTS.items() if name != victim}
    with (
        running_daemon(chunk_size=CHUNK, pool_bytes="1MiB") as daemon,
        WireWorker(daemon) as worker,
    ):
        assert worker.store(NAME, rows_of(99), salt=SALTS[victim]).stored == 1
        for number, salt in enumerate(others.values()):
            assert worker.store(NAME, rows_of(number), salt=salt).stored == 1
        evictions = "lmcache_qserver_pool_evictions_total"
        while not daemon.metrics()[evictions]:
            for number in range(8):
                assert worker.store(os.urandom(32), rows_of(200 + number)).stored == 1
            for salt in others.values():  # which makes them the most recent
                worker.read(NAME, salt=salt)
        assert worker.read(NAME, salt=SALTS[victim]) == "evicted"
        for number, salt in enumerate(others.values()):
            assert worker.read(NAME, salt=salt) == rows_of(number)
        assert worker.store(NAME, rows_of(98), salt=SALTS[victim]).stored == 1
        assert worker.read(NAME, salt=SALTS[victim]) == rows_of(98)
        for number, salt in enumerate(others.values()):
            assert worker.read(NAME, salt=salt) == rows_of(number)
