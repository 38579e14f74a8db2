"""Well-formed operations in any order, with ids, blocks, hashes and leases that may be another client's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash
from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.lifeline import Accepted, OfferRing, Refused
from lmcache_qprotocol.messages import (
    ChunkQuery,
    IdentityClaim,
    IdentityQuery,
    PartialChunk,
    RangeKey,
    RingDescription,
    StoreProof,
    WorkerReport,
)
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon
from tests.server.fuzz.bystander import Bystander
from tests.server.ring_writer import RingWriter

CHUNK = 16
IDS: list[int | str] = [0, -1, "worker", "", 1 << 62]
HASHES = [bytes([number]) * 32 for number in range(4)]
MODEL = "test/model"

ids = st.sampled_from(IDS)
hashes = st.sampled_from(HASHES)
positions = st.sampled_from([0, 1, 15, 16, 17, 32, 48, (1 << 31) - 1])
block_ids = st.lists(st.sampled_from([0, 1, 2, 3, 4, (1 << 31) - 1]), max_size=4)
salts = st.sampled_from(["", "_default", "@", "/", ".."])
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=CHUNK + 1).map(tuple)


class Peer:
    """One hostile client with a ring, whose stamps say whatever the last `stamp` wrote."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.daemon = daemon
        self.client = BareClient(daemon.url)
        self.lifeline: BareLifeline | None = None
        self.ring = RingWriter(small_ring())
        self.leases: list[int] = [0]
        self.token = bytes(16)
        self.session = self.client.hello().session  # a legacy client's failures would be silence

    def ask(self, name: str, *payloads: Any) -> Any:
        """The result, or None for an error; a fault of the server fails the test."""
        self.code: ErrorCode | None = None
        try:
            return self.client.ask(name, *payloads).result
        except RequestError as error:
            self.code = error.code
        assert self.code is not ErrorCode.INTERNAL, (name, payloads)
        return None

    def hello(self) -> None:
        self.hang_up()
        self.session = self.client.hello().session

    def attach(self) -> None:
        self.hello()
        self.lifeline = BareLifeline(self.daemon.lifeline)
        os.close(self.lifeline.attach(self.session)[1])

    def offer(self) -> None:
        if self.lifeline is None:
            self.attach()
        assert self.lifeline is not None
        fd, nbytes, _ = self.ring.ring
        token = os.urandom(16)
        answer, _ = self.lifeline.exchange(OfferRing(token, nbytes), [fd])
        if isinstance(answer, Accepted):
            self.token = token
        else:  # too many are offered and not registered
            assert isinstance(answer, Refused)
            assert answer.code is ErrorCode.BUSY

    def hang_up(self) -> None:
        lifeline, self.lifeline = self.lifeline, None
        if lifeline is not None:
            lifeline.socket.close()

    def register(self, name: int | str, num_blocks: int) -> None:
        description = RingDescription(
            layout=SMALL_LAYOUT,
            num_blocks=num_blocks,
            block_size=16,
            chunk_size=CHUNK,
            ring_token=self.token,
            stamps_offset=self.ring.ring[2],
        )
        self.ask("register_q_cache", name, (), MODEL, 1, "test", None, (), description)

    def store(
        self,
        name: int | str,
        start: int,
        end: int,
        blocks: list[int],
        hashes: list[bytes],
        salt: str,
    ) -> None:
        for block in blocks:
            if block < 4:
                self.ring.write(block, start)
        start, end = min(start, end), max(start, end)
        nonces = (self.ring.nonce,) * max(1, len(hashes))
        key = self._key(start, end, tuple(hashes), salt)
        self.ask("store_q", key, name, (tuple(blocks),), b"", StoreProof(nonces=nonces))

    def store_piece(self, name: int | str, first: int, tokens: tuple[int, ...], salt: str) -> None:
        nonce = self.ring.write(0, 0)
        end = len(tokens)
        hashed = chunk_hash(NONE_HASH, tokens, 0, ())
        key = msgspec.structs.replace(
            self._key(min(first, end), end, (hashed,), salt),
            parent_hash=NONE_HASH,
            piece_tokens=tokens,
        )
        claim = IdentityClaim(plain_parent_hash=NONE_HASH)
        self.ask("store_q", key, name, ((0,),), b"", StoreProof(nonces=(nonce,), claim=claim))

    @staticmethod
    def _key(start: int, end: int, hashes: tuple[bytes, ...], salt: str) -> RangeKey:
        return RangeKey(
            model_name=f"{MODEL}##query",
            world_size=1,
            worker_id=0,
            start=start,
            end=end,
            cache_salt=salt,
            chunk_hashes=hashes,
            layout_id=layout_id(SMALL_LAYOUT),
        )

    def find(self, name: str, hashes: list[bytes], tokens: tuple[int, ...], salt: str) -> None:
        family = KeyFamily(
            model_name=f"{MODEL}##query",
            world_size=1,
            kv_rank=kv_rank(1, 0),
            cache_salt=salt,
            layout_id=layout_id(SMALL_LAYOUT),
        )
        partial = PartialChunk(index=len(hashes), parent_hash=NONE_HASH, tokens=tokens)
        if name == "identities_q":
            self.ask(name, IdentityQuery(model_name=family.model_name, chunks=(partial,)))
            return
        query = ChunkQuery(family=family, chunk_hashes=tuple(hashes), partials=(partial,))
        result = self.ask(name, query)
        if name == "retrieve_q" and result is not None:
            self.leases.append(result.lease_id)

    def release(self, which: int) -> None:
        self.ask("release_q", (self.leases[which % len(self.leases)],))

    def close(self) -> None:
        self.hang_up()
        self.client.socket.close()
        self.ring.close()


Step = Callable[[Peer], None]


def _step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(*arguments).map(lambda drawn: lambda peer: getattr(peer, name)(*drawn))


REPORT = WorkerReport(computed=(1 << 62) - 1, captured=0, lost={}, pending=1)

steps: st.SearchStrategy[Step] = st.one_of(
    _step("attach"),
    _step("offer"),
    _step("hello"),
    _step("hang_up"),
    _step("register", ids, st.sampled_from([1, 4, 5])),
    _step("ask", st.just("unregister_q_cache"), ids, st.just(REPORT)),
    _step("ask", st.just("ping"), ids, st.just(REPORT)),
    _step("store", ids, positions, positions, block_ids, st.lists(hashes, max_size=4), salts),
    _step("store_piece", ids, st.integers(0, 15), tokens, salts),
    *(
        _step("find", st.just(name), st.lists(hashes, max_size=4), tokens, salts)
        for name in ("lookup_q", "retrieve_q", "identities_q")
    ),
    _step("release", st.integers(0, 10)),
)

BEGINNING: list[Step] = [
    Peer.attach,
    Peer.offer,
    lambda peer: peer.register("worker", 4),
    lambda peer: peer.store("worker", 0, 16, [1], [HASHES[0]], ""),
]


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(order=st.lists(st.tuples(st.booleans(), steps), max_size=25))
def test_operations_in_any_order(
    daemon: RunningDaemon, bystander: Bystander, order: list[tuple[bool, Step]]
) -> None:
    peers = [Peer(daemon), Peer(daemon)]
    try:
        for step in BEGINNING:
            step(peers[0])
        for second, step in order:
            step(peers[second])
        bystander.check()
    finally:
        for peer in peers:
            peer.close()
    bystander.check_resources()
