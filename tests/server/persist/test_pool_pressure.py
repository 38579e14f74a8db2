"""A pool that is much smaller than what is stored: the persistent tier has the rest."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_qclient.qcache import connect
from lmcache_qserver.testing.daemon import running_daemon
from tests.server.persist.l2_folder import objects, persist, persisted, tier, url_of
from tests.server.wire_worker import CHUNK, WireWorker, leftovers, name_of, rows_of
from tests.worker_client.qcache.engine import Engine, layout_of
from tests.worker_client.qcache.test_retrieve import bits

SLOTS = 256
"""Of a pool of 1 MiB: a slot is a page."""


def name(number: int) -> bytes:
    return name_of(tuple(range(number, number + CHUNK)))


def test_what_was_persisted_and_evicted_is_read_back(tmp_path: Path) -> None:
    """Storing goes on without a pause; what is acknowledged is there at the end, all else is lost and counted."""
    rng, acknowledged = random.Random(1), set[int]()
    with (
        running_daemon(l2=url_of(tmp_path / "l2"), chunk_size=CHUNK, pool_bytes="1MiB") as daemon,
        WireWorker(daemon) as worker,
    ):
        count = 5 * SLOTS
        for number in range(count):
            assert worker.store(name(number), rows_of(number)).stored == 1
            if number % 40 == 0:
                recent = range(max(0, number - 20), number + 1)
                answers = persisted(worker, *map(name, recent))
                acknowledged |= {one for one, yes in zip(recent, answers, strict=True) if yes}
                now = tier(daemon)
                assert now["pinned_bytes"] <= (1 << 20) // 4 + 4 * 4096
            if number % (2 * SLOTS) == SLOTS:
                persist(worker)
                recent = range(number - 20, number + 1)
                assert all(persisted(worker, *map(name, recent)))
                acknowledged |= set(recent)
        persist(worker)
        now = tier(daemon)
        assert now["submitted"] == count
        assert now["written"] == len(objects(tmp_path / "l2")) == count - now["lost"]["evicted"]
        assert acknowledged
        order = list(range(count))
        rng.shuffle(order)
        missed = 0
        for number in order:
            rows = worker.read(name(number))
            if rows == "evicted":
                missed += 1
                assert number not in acknowledged
            else:
                assert rows == rows_of(number)
        assert missed == now["lost"]["evicted"]
        assert tier(daemon)["brought"] >= count - missed - SLOTS
        assert daemon.metrics()["lmcache_qserver_pool_evictions_total"] > count - SLOTS
        assert leftovers(daemon) == {"reserved": 0, "leased": 0, "leases": 0}


def test_what_a_reader_holds_stays_while_others_bring_more_than_the_pool(tmp_path: Path) -> None:
    with (
        running_daemon(l2=url_of(tmp_path / "l2"), chunk_size=CHUNK, pool_bytes="1MiB") as daemon,
        WireWorker(daemon) as worker,
        WireWorker(daemon, "another") as another,
    ):
        for number in range(2 * SLOTS):
            assert worker.store(name(number), rows_of(number)).stored == 1
            if number % 50 == 0:
                persist(worker)
        persist(worker)
        held = worker.retrieve(*map(name, range(60)))
        assert len(held.chunks) == 60
        assert not held.partial
        for number in range(2 * SLOTS):
            assert another.read(name(number)) == rows_of(number)
        for number, chunk in enumerate(held.chunks):
            found = worker.pool[chunk.offset : chunk.offset + chunk.nbytes]
            assert found == rows_of(number), "it was evicted under a lease"
        worker.client.ask("release_q", (held.lease_id,))
        assert leftovers(daemon) == {"reserved": 0, "leased": 0, "leases": 0}


def test_a_sequence_longer_than_a_readers_share_comes_chunk_after_chunk(tmp_path: Path) -> None:
    """All of it is in the persistent tier only; the reader may hold a quarter of the pool."""
    tokens = [7 * number % 997 for number in range(300 * CHUNK + 5)]
    settings: dict[str, Any] = {"l2": url_of(tmp_path / "l2"), "chunk_size": CHUNK}
    with running_daemon(**settings) as daemon, WireWorker(daemon, register=False) as one:
        engine = Engine(daemon.url, layout_of())
        engine.store_all(tokens)
        persist(one)
        want = engine.values(tokens).reshape(3, len(tokens), 4, 8)
        engine.close()
    with (
        running_daemon(pool_bytes="1MiB", **settings) as daemon,
        connect(daemon.url, daemon.http_url, "org/model") as context,
    ):
        assert context.lookup(tokens).num_tokens == len(tokens)
        for _ in range(2):
            result = context.retrieve(tokens)
            assert (result.num_tokens, result.missing) == (len(tokens), ())
            assert np.array_equal(bits(result.tensor, "bfloat16"), want)
        now = tier(daemon)
        assert not any(now["missed"].values())
        assert now["brought"] >= 2 * 301 - SLOTS, "the pool does not hold it"
