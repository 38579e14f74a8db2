"""From keys to objects, and who is about to write which: the one place where an object comes into being.

    (absent) ──reserve_write──▶ being written ──commit──▶ stored ──evicted, discarded──▶ (absent)
                                     └──────fail──────▶ (absent)

    Invariants (`validate` asserts them)
      - a key is stored, or being written, or neither; never both
      - a stored object's slot is COMMITTED or LEASED and owned by its key; it is complete and proven
      - a key is being written by one store at a time; others wait for that store's `outcome`
      - what can be found by its tokens is stored; every stored piece can be
      - an identity that is told is that of something stored
      - whatever is absent after having been offered is remembered with a reason, as long as there is memory for it

Everything is synchronous and on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qprotocol.messages import IdentitiesReply, IdentityQuery
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.pool import Pool, Slot, SlotState
from lmcache_qserver.qstore.by_identity import ByIdentity, Claimed
from lmcache_qserver.qstore.by_tokens import ByTokens, Candidate, Content
from lmcache_qserver.qstore.cover import Cover, cover
from lmcache_qserver.qstore.inventory import Inventory
from lmcache_qserver.qstore.misses import Misses
from lmcache_qserver.qstore.stored_object import NOWHERE, Description, Place, StoredObject
from lmcache_qserver.status_report import ModelReport


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """The right to write one key. It ends in `commit` or `fail`, exactly once."""

    key: ObjectKey
    slot: Slot
    outcome: asyncio.Future[bool]
    """True when the key is stored; what other stores of the same key wait for."""


@dataclass(slots=True)
class Reserved:
    """The answer to `reserve_write`: every key is in exactly one of the four."""

    writes: list[Write] = field(default_factory=list)
    """Yours to copy."""
    duplicates: list[ObjectKey] = field(default_factory=list)
    """Stored already."""
    shared: list[tuple[ObjectKey, asyncio.Future[bool]]] = field(default_factory=list)
    """Being written by another store."""
    no_room: list[ObjectKey] = field(default_factory=list)
    """Refused as `pool_full`."""


class Index:
    """All objects of this server.

    Args:
        pool: where their bytes lie; this index is its only user.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._stored: dict[ObjectKey, StoredObject] = {}
        self._writing: dict[ObjectKey, Write] = {}
        self._misses = Misses()
        self._inventory = Inventory()
        self._by_tokens = ByTokens()
        self._by_identity = ByIdentity()
        self.on_forgotten: Callable[[StoredObject, MissReason], None] = lambda _stored, _reason: (
            None
        )
        """Told of every object that is not stored any more; must not change the index."""

    def __len__(self) -> int:
        """Objects stored."""
        return len(self._stored)

    def get(self, key: ObjectKey) -> StoredObject | None:
        """The object, if it is stored now."""
        return self._stored.get(key)

    def cover(self, family: KeyFamily, asked: Content) -> Cover:
        """The objects that together hold the asked rows of a chunk, and the rows that none holds."""
        return cover(self.candidates(family, asked), len(asked))

    def candidates(self, family: KeyFamily, asked: Content) -> Iterator[Candidate]:
        """The objects that hold some of the asked rows, for every first row the one that agrees the furthest."""
        return self._by_tokens.candidates(family, asked)

    def identities(self, query: IdentityQuery, chunk_size: int) -> IdentitiesReply:
        """Under which identities the asked tokens are stored, as the writers told."""
        return self._by_identity.find(query.model_name, query.chunks, chunk_size)

    def objects(self) -> list[StoredObject]:
        """All that is stored now."""
        return list(self._stored.values())

    def miss_reason(self, key: ObjectKey) -> MissReason:
        """Why a key is not stored."""
        return MissReason.BEING_STORED if key in self._writing else self._misses.reason(key)

    def note_miss(self, key: ObjectKey, reason: MissReason) -> None:
        """The key was offered and refused; nothing happens if it is stored or being written by somebody else."""
        if key not in self._stored and key not in self._writing:
            self._misses.note(key, reason)

    def reserve_write(self, keys: Sequence[ObjectKey], nbytes: int) -> Reserved:
        """Room for what is not there yet; first keys get it first, and what does not fit does not hinder the others.

        Args:
            keys: all different.
            nbytes: bytes of each object.
        """
        answer = Reserved()
        absent = []
        for key in keys:
            stored = self._stored.get(key)
            if stored is not None:
                # Leased until room for the others is found, else making room could evict what is about to be
                # reported as stored.
                self.pool.lease(stored.slot)
                answer.duplicates.append(key)
            elif key in self._writing:
                answer.shared.append((key, self._writing[key].outcome))
            else:
                absent.append(key)
        for key in absent:
            write = self._reserve(key, nbytes)
            if write is None:
                self._misses.note(key, MissReason.POOL_FULL)
                answer.no_room.append(key)
            else:
                answer.writes.append(write)
        # Last to first, so that a sequence loses its end before its beginning: only prefixes are of use.
        for key in reversed(answer.duplicates):
            self.pool.release(self._stored[key].slot)
        return answer

    def commit(
        self,
        write: Write,
        description: Description,
        rows: tuple[int, int],
        created: float,
        content: Content | None = None,
        claimed: Claimed | None = None,
        place: Place = NOWHERE,
    ) -> StoredObject:
        """The bytes are complete and proven, and no thread touches them any more.

        Args:
            content: what makes it findable by its tokens; a piece has it, a whole chunk may.
            claimed: what its writer told of its identity, if it did.
            place: in its sequence.
        """
        assert self._writing.get(write.key) is write, "a write ends once"
        self.pool.commit(write.slot)
        del self._writing[write.key]
        stored = StoredObject(
            write.key, write.slot, description, rows, created, content=content, place=place
        )
        self._stored[write.key] = stored
        self._inventory.add(stored)
        if content is not None:
            self._by_tokens.add(write.key, content)
        if claimed is not None:
            self._by_identity.add(write.key, claimed)
        self._misses.forget(write.key)
        _tell(write.outcome, True)
        return stored

    def fail(
        self, writes: Iterable[Write], reason: MissReason, over: asyncio.Future[None] | None = None
    ) -> None:
        """Nothing of this is stored, and other stores of the same keys may try.

        Args:
            over: done when no thread touches the slots any more; until then they are quarantined. None: they are
                free at once.
        """
        for write in writes:
            assert self._writing.get(write.key) is write, "a write ends once"
            del self._writing[write.key]
            self._misses.note(write.key, reason)
            if over is None or over.done():
                self.pool.abort(write.slot)
            else:
                over.add_done_callback(partial(self._end_quarantine, write.slot))
            _tell(write.outcome, False)

    def discard(self, stored: StoredObject, reason: MissReason) -> None:
        """Drop an object that is stored; leases keep its bytes until they end."""
        assert self._stored.get(stored.key) is stored, "only what is stored can be dropped"
        self.pool.discard(stored.slot)
        self._forget(stored.key, reason)

    def models(self) -> list[ModelReport]:
        """What is stored, described by what is stored."""
        return self._inventory.summary()

    def validate(self) -> None:
        """Assert the invariants of this file's head. O(n); for tests."""
        self.pool.validate()
        assert not self._stored.keys() & self._writing.keys()
        for key, stored in self._stored.items():
            assert stored.slot.state in (SlotState.COMMITTED, SlotState.LEASED), stored.slot
            assert stored.key == key == stored.slot.owner
            assert not stored.slot.doomed
        for write in self._writing.values():
            assert write.slot.state is SlotState.RESERVED
            assert not write.outcome.done()
        self._by_tokens.validate()
        self._by_identity.validate()
        assert all(key in self._stored for key in self._by_tokens)
        assert all(key in self._stored for key in self._by_identity)
        assert all(key in self._by_tokens for key in self._stored if key.rows is not None)
        models = self.models()
        assert sum(model.chunks + model.pieces for model in models) == len(self._stored)
        assert sum(model.bytes for model in models) == sum(
            stored.slot.nbytes for stored in self._stored.values()
        )

    def _end_quarantine(self, slot: Slot, _over: asyncio.Future[None]) -> None:
        self.pool.abort(slot)

    def _forget(self, key: ObjectKey, reason: MissReason) -> None:
        stored = self._stored.pop(key)
        self._inventory.remove(stored)
        self._by_tokens.remove(key)
        self._by_identity.remove(key)
        self._misses.note(key, reason)
        self.on_forgotten(stored, reason)

    def _reserve(self, key: ObjectKey, nbytes: int) -> Write | None:
        reservation = self.pool.reserve(nbytes, key)
        for evicted in reservation.evicted:
            assert isinstance(evicted, ObjectKey)
            self._forget(evicted, MissReason.EVICTED)
        if reservation.slot is None:
            return None
        write = Write(key, reservation.slot, asyncio.get_running_loop().create_future())
        self._writing[key] = write
        return write


def _tell(outcome: asyncio.Future[bool], stored: bool) -> None:
    if not outcome.done():
        outcome.set_result(stored)
