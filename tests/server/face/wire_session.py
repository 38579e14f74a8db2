"""A worker and a reader on the bare wire, with any names: what tests of the daemon's face look at."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence

from lmcache_qprotocol.hashing import NONE_HASH, chunk_hashes
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import (
    ChunkQuery,
    IdentityClaim,
    PartialChunk,
    RangeKey,
    RetrieveReply,
    StoreOutcome,
    StoreProof,
    WorkerReport,
)
from lmcache_qprotocol.stamps import STAMP_BYTES, first_stamp
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon

TOKENS = 16
"""Per chunk, and per ring block."""
OBJECT_BYTES = TOKENS * SMALL_LAYOUT.token_bytes


class WireSession:
    """One registered worker, which reads too."""

    def __init__(
        self,
        client: BareClient,
        lifeline: BareLifeline,
        instance_id: int | str,
        model: str,
        salt: str,
    ) -> None:
        self.client = client
        self.instance_id = instance_id
        self.model = f"{model}##query"
        self.salt = salt
        self._fd, nbytes, self._stamps_offset = ring = small_ring()
        self._memory = mmap.mmap(self._fd, nbytes)
        self._nonce = 0
        register_small_ring(client, lifeline, instance_id, TOKENS, model, ring)

    @property
    def family(self) -> KeyFamily:
        """Of what it stores."""
        return KeyFamily(
            model_name=self.model,
            world_size=1,
            kv_rank=kv_rank(1, 0),
            cache_salt=self.salt,
            layout_id=layout_id(SMALL_LAYOUT),
        )

    def store(
        self, tokens: Sequence[int], request_id: str = "r", spoil: bool = False
    ) -> StoreOutcome:
        """Store one chunk.

        Args:
            tokens: `TOKENS` of them.
            spoil: without its stamps, so that it is refused.
        """
        self._nonce += 1
        if not spoil:
            stamps = (first_stamp(self._nonce, 0) + row for row in range(TOKENS))
            at = self._stamps_offset
            self._memory[at : at + TOKENS * STAMP_BYTES] = struct.pack(f"={TOKENS}q", *stamps)
        claim = IdentityClaim(plain_parent_hash=NONE_HASH)
        reply = self.client.ask(
            "store_q",
            self.key(tokens, request_id),
            self.instance_id,
            ((0,),),
            b"",
            StoreProof(nonces=(self._nonce,), claim=claim),
        )
        outcome: StoreOutcome = reply.result.outcome
        return outcome

    def key(self, tokens: Sequence[int], request_id: str = "r") -> RangeKey:
        """Of one chunk."""
        return RangeKey(
            model_name=self.model,
            world_size=1,
            worker_id=0,
            start=0,
            end=TOKENS,
            request_id=request_id,
            cache_salt=self.salt,
            chunk_hashes=tuple(chunk_hashes(tokens, TOKENS)),
            layout_id=self.family.layout_id,
            parent_hash=NONE_HASH,
            piece_tokens=tuple(tokens),
        )

    def query(self, tokens: Sequence[int], items: tuple[ItemIdentity, ...] = ()) -> ChunkQuery:
        """Asks for one chunk, whole or what there is of it."""
        partial = PartialChunk(index=0, parent_hash=NONE_HASH, tokens=tuple(tokens), items=items)
        return ChunkQuery(family=self.family, partials=(partial,))

    def retrieve(self, tokens: Sequence[int]) -> RetrieveReply:
        """Lease one chunk."""
        reply: RetrieveReply = self.client.ask("retrieve_q", self.query(tokens)).result
        return reply

    def report(self, report: WorkerReport) -> None:
        """Tell the server an account."""
        assert self.client.ask("ping", self.instance_id, report).result is True

    def close(self) -> None:
        """Forget the ring."""
        self._memory.close()
        os.close(self._fd)


@contextlib.contextmanager
def wire_session(
    daemon: RunningDaemon,
    instance_id: int | str = "worker",
    model: str = "test/model",
    salt: str = "",
) -> Iterator[WireSession]:
    """A session with a daemon whose chunk size is `TOKENS`."""
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        _, pool_fd = lifeline.attach(client.hello().session)
        os.close(pool_fd)
        session = WireSession(client, lifeline, instance_id, model, salt)
        try:
            yield session
        finally:
            session.close()
