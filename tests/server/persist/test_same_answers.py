"""What a restarted server answers is what one that never restarted does: whole chunks, pieces, tokens that diverge."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lmcache_qclient.qcache import ItemIdentity, QCacheContext, connect
from lmcache_qprotocol.hashing import HashChain
from lmcache_qprotocol.identity import PLAIN, Identity
from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import ChunkQuery, PartialChunk, RetrieveReply, StoredChunk
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.server.persist.l2_folder import persist, tier, url_of
from tests.server.wire_worker import WireWorker
from tests.worker_client.qcache.engine import CHUNK, Engine, layout_of
from tests.worker_client.qcache.test_pieces import gaps, there
from tests.worker_client.qcache.test_retrieve import bits

CASES = 40
LENGTH = 3 * CHUNK
Tokens = tuple[int, ...]
Piece = tuple[Tokens, int, int]
MODEL = "org/model"
FAMILY = KeyFamily(
    model_name=f"{MODEL}##query",
    world_size=1,
    kv_rank=kv_rank(1, 0),
    layout_id=layout_id(layout_of()),
)


def items_of(rng: random.Random) -> tuple[ItemIdentity, ...]:
    """Pictures and embeddings at some places of a sequence."""
    places = sorted(rng.sample(range(LENGTH), rng.choice([1, 3, 6])))
    return tuple(
        ItemIdentity(rng.choice(("mm", "embeds")), f"digest {rng.randrange(2)}", place)
        for place in places
    )


class Case:
    """Sequences that share beginnings of any length, what is stored of them, and what is asked for."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        # The first token makes every case a sequence of its own in one model.
        self.base = (1000 + seed, *(rng.randrange(4) for _ in range(LENGTH - 1)))
        self.identity = Identity(items=items_of(rng)) if seed % 3 == 0 else PLAIN
        self.pieces = [self._piece(rng) for _ in range(rng.randrange(1, 8))]
        asked = [self._branch(rng)[: rng.randrange(1, LENGTH + 1)] for _ in range(3)]
        self.asked = [(tokens, self.identity) for tokens in (*asked, self.base)]
        # Without one of the items, or with another in its place.
        for at, item in enumerate(self.identity.items):
            others = (*self.identity.items[:at], *self.identity.items[at + 1 :])
            changed = ItemIdentity(item.kind, "another", item.offset)
            with_another = (*self.identity.items[:at], changed, *self.identity.items[at + 1 :])
            for items in (others, with_another):
                self.asked.append((self._branch(rng), Identity(items=items)))

    def _branch(self, rng: random.Random) -> Tokens:
        at = rng.randrange(1, LENGTH + 1)
        return (*self.base[:at], *(9 - token for token in self.base[at:]))

    def _piece(self, rng: random.Random) -> Piece:
        chunk, first = rng.randrange(3) * CHUNK, rng.randrange(CHUNK)
        end = rng.randrange(first + 1, CHUNK + 1)
        first, end = rng.choice([(first, end), (0, end), (0, CHUNK)])
        return self._branch(rng), chunk + first, chunk + end


def store_all(daemon: RunningDaemon, cases: list[Case]) -> None:
    engine = Engine(daemon.url, layout_of(), MODEL)
    for case in cases:
        for tokens, start, end in case.pieces:
            engine.store_piece(tokens, start, end, case.identity)
    engine.close()


def query_of(tokens: Tokens, identity: Identity) -> ChunkQuery:
    """Every chunk by hash and by tokens."""
    chain = HashChain(CHUNK, identity)
    chain.extend(tokens)
    whole = len(tokens) // CHUNK
    partials = []
    for index in range(-(-len(tokens) // CHUNK)):
        base = index * CHUNK
        part = tokens[base : base + CHUNK]
        items = tuple(
            ItemIdentity(item.kind, item.digest, item.offset - base)
            for item in identity.items
            if base <= item.offset < base + len(part)
        )
        partials.append(
            PartialChunk(index=index, parent_hash=chain.parent(index), tokens=part, items=items)
        )
    hashes = tuple(chain.parent(index + 1) for index in range(whole))
    return ChunkQuery(
        family=FAMILY, chunk_hashes=hashes, partials=tuple(partials), parent_hash=chain.parent(0)
    )


def rows_of(one: WireWorker, chunk: StoredChunk) -> dict[tuple[int, int], bytes]:
    """Its rows by place and number in the chunk: which of several objects that have a row is given, does not matter."""
    blocks, layers, block_size, hidden = chunk.shape
    raw = np.frombuffer(one.pool[chunk.offset : chunk.offset + chunk.nbytes], np.uint16)
    by_row = raw.reshape(blocks, layers, block_size, hidden).transpose(0, 2, 1, 3)
    by_row = by_row.reshape(blocks * block_size, layers, hidden)
    base = chunk.rows[0] // block_size * block_size
    first, end = chunk.valid or chunk.rows
    return {(chunk.index, row): by_row[row - base].tobytes() for row in range(first, end)}


def answers(one: WireWorker, query: ChunkQuery) -> dict[str, Any]:
    """Lookup and retrieve as one reads them, up to the first chunk that is not there whole."""
    said = one.client.ask("lookup_q", query).result
    reply: RetrieveReply = one.client.ask("retrieve_q", query).result
    stop = min((miss.index for miss in reply.missing), default=len(query.partials))
    found: dict[tuple[int, int], bytes] = {}
    for chunk in reply.chunks:
        if chunk.index <= stop:
            found.update(rows_of(one, chunk))
    if reply.lease_id:
        one.client.ask("release_q", (reply.lease_id,))
    missing = [miss for miss in reply.missing if miss.index <= stop]
    assert [miss for miss in said.missing if miss.index <= stop] == missing
    assert said.tokens == reply.tokens
    return {"rows": found, "missing": missing, "tokens": reply.tokens, "prefix": said.prefix}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [Case(seed) for seed in range(CASES)]


def test_replies_are_the_same(tmp_path: Path, cases: list[Case]) -> None:
    settings: dict[str, Any] = {"chunk_size": CHUNK, "pool_bytes": "16MiB"}
    folder = url_of(tmp_path / "l2")
    with running_daemon(l2=folder, **settings) as first, WireWorker(first, register=False) as one:
        store_all(first, cases)
        persist(one)
        written = tier(first)["written"]
    with (
        running_daemon(**settings) as never,
        running_daemon(l2=folder, **settings) as again,
        WireWorker(never, register=False) as at_never,
        WireWorker(again, register=False) as at_again,
    ):
        store_all(never, cases)
        rows = 0
        for case in cases:
            for tokens, identity in case.asked:
                query = query_of(tokens, identity)
                before = answers(at_never, query)
                after = answers(at_again, query)
                assert after == before, (case.pieces, tokens)
                rows += len(before["rows"])
        assert rows > CASES * CHUNK, "much of what is asked for is there"
        # The same once more, out of the pool.
        for case in cases:
            query = query_of(case.base, case.identity)
            assert answers(at_again, query) == answers(at_never, query)
        now = tier(again)
        assert 0 < now["brought"] <= written
        assert not any(now["missed"].values())
        (here,), (there_,) = never.status()["models"], again.status()["models"]
        for report in (here, there_):
            for field in ("chunks", "pieces", "bytes", "persisted", "persisted_bytes"):
                report.pop(field)
        assert here == there_


def test_the_sdk_says_to_the_token_what_is_there(tmp_path: Path, cases: list[Case]) -> None:
    plain = [case for case in cases if case.identity is PLAIN]
    folder = url_of(tmp_path / "l2")
    with (
        running_daemon(l2=folder, chunk_size=CHUNK) as daemon,
        WireWorker(daemon, register=False) as one,
    ):
        store_all(daemon, plain)
        persist(one)
    with (
        running_daemon(l2=folder, chunk_size=CHUNK) as daemon,
        connect(daemon.url, daemon.http_url, MODEL) as context,
    ):
        reference = Engine(daemon.url, layout_of(), "another")
        for case in plain:
            for tokens, _ in case.asked:
                check_sdk(context, reference, case, tokens)
        reference.close()


def check_sdk(context: QCacheContext, reference: Engine, case: Case, tokens: Tokens) -> None:
    missing = gaps(there(case.pieces, tokens), len(tokens))
    reach = missing[0][0] if missing else len(tokens)
    said, result = context.lookup(tokens), context.retrieve(tokens)
    assert said.num_tokens == result.num_tokens == reach
    told = [(miss.start, miss.end) for miss in result.missing]
    first_chunk_end = (reach // CHUNK + 1) * CHUNK
    assert [gap for gap in told if gap[0] < first_chunk_end] == [
        gap for gap in missing if gap[0] < first_chunk_end
    ]
    want = reference.values(tokens[:reach]).reshape(3, reach, 4, 8)
    assert np.array_equal(bits(result.tensor, "bfloat16"), want)


def test_a_chunk_without_its_parent_is_found_by_hash_alone(tmp_path: Path) -> None:
    """A legacy writer tells no parent; a reader's query may tell one."""
    settings: dict[str, Any] = {"l2": url_of(tmp_path / "l2"), "chunk_size": CHUNK}
    tokens = tuple(range(3 * CHUNK))
    with running_daemon(**settings) as daemon, WireWorker(daemon, register=False) as one:
        engine = Engine(daemon.url, layout_of(), MODEL)
        engine.store(tokens, range(3))
        persist(one)
        engine.close()
    with running_daemon(**settings) as daemon, WireWorker(daemon, register=False) as one:
        for query in (
            query_of(tokens, PLAIN),
            msgspec.structs.replace(query_of(tokens, PLAIN), partials=()),
        ):
            assert answers(one, query)["tokens"] == len(tokens)


def test_items_count_as_tokens_do(tmp_path: Path) -> None:
    """A chunk with a picture at its fourth token, asked for by tokens that diverge at the eleventh."""
    settings: dict[str, Any] = {"l2": url_of(tmp_path / "l2"), "chunk_size": CHUNK}
    tokens = tuple(range(CHUNK))
    asked = (*tokens[:10], *range(900, 906))
    picture = ItemIdentity("mm", "one", 3)
    cases = {
        (picture,): 10,
        (): 3,
        (ItemIdentity("mm", "another", 3),): 3,
        (ItemIdentity("embeds", "one", 3),): 3,
        (ItemIdentity("mm", "one", 5),): 3,
        (picture, ItemIdentity("mm", "two", 7)): 7,
        (picture, ItemIdentity("mm", "two", 12)): 10,
    }
    with running_daemon(**settings) as daemon, WireWorker(daemon, register=False) as one:
        engine = Engine(daemon.url, layout_of(), MODEL)
        engine.store_all(tokens, Identity(items=(picture,)))
        persist(one)
        engine.close()
        check_items(one, asked, cases)
    with running_daemon(**settings) as daemon, WireWorker(daemon, register=False) as one:
        check_items(one, asked, cases)
        assert tier(daemon)["brought"] == 1


def check_items(one: WireWorker, asked: Tokens, cases: dict[tuple[ItemIdentity, ...], int]) -> None:
    """All lookups first: they bring nothing into the pool."""
    queries = {items: query_of(asked, Identity(items=items)) for items in cases}
    said = {items: one.client.ask("lookup_q", query).result for items, query in queries.items()}
    assert {items: reply.tokens for items, reply in said.items()} == cases
    assert {items: answers(one, query)["tokens"] for items, query in queries.items()} == cases
