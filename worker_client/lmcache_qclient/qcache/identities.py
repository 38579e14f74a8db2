"""What is stored for the same token ids under other identities.

The server tells identities as their writers claimed them; each is hashed anew here and looked up, so what is listed can
be retrieved, and a false claim is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from lmcache_qclient.qcache.catalog import StoredLayout
from lmcache_qclient.qcache.reading import PARTIAL_TOKENS, Found, Wanted, find_all
from lmcache_qclient.qcache.session import Session
from lmcache_qprotocol.hashing import HashChain, root_hash
from lmcache_qprotocol.identity import Identity, ItemIdentity, LoraIdentity
from lmcache_qprotocol.limits import MAX_PARTIALS
from lmcache_qprotocol.messages import (
    IdentitiesReply,
    IdentityQuery,
    KnownIdentity,
    PartialChunk,
)
from lmcache_qprotocol.operations import IDENTITIES_Q


class IdentityArguments(TypedDict):
    """Arguments of `retrieve` and `lookup`."""

    cache_salt: str
    lora: LoraIdentity | None
    mm: tuple[ItemIdentity, ...]


@dataclass(frozen=True)
class StoredIdentity:
    """One identity under which some of the asked tokens are stored.

    Attributes:
        cache_salt, lora, mm: as `retrieve` takes them; `mm` holds prompt embeddings as well.
        num_tokens: tokens from the first without a gap, what `retrieve` would give.
        tokens_stored: tokens that are stored anywhere in the sequence.
        layouts: the ways in which they are stored, the one that reaches furthest first; the figures are its.
    """

    cache_salt: str
    lora: LoraIdentity | None
    mm: tuple[ItemIdentity, ...]
    num_tokens: int
    tokens_stored: int
    layouts: tuple[StoredLayout, ...]

    @property
    def arguments(self) -> IdentityArguments:
        """For `retrieve(token_ids, **one.arguments)`."""
        return {"cache_salt": self.cache_salt, "lora": self.lora, "mm": self.mm}


@dataclass(frozen=True)
class Identities:
    """All identities of a sequence, those that reach furthest first.

    Attributes:
        more: the server knows more than it tells at once; those that agree the longest are here.
    """

    found: tuple[StoredIdentity, ...]
    more: bool = False

    def __iter__(self) -> Iterator[StoredIdentity]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


@dataclass(frozen=True)
class _Proven:
    """A claim that holds: what a lookup under it has found."""

    one: StoredIdentity
    end: int
    """Behind the last token that is stored."""


Want = Callable[[str, Identity, StoredLayout], Sequence[Wanted]]


def list_identities(
    session: Session, ids: Sequence[int], layouts: Sequence[StoredLayout], want: Want
) -> Identities:
    """See the head of this file; inside `Session.run`.

    Args:
        layouts: of one model, all of its.
        want: the sequence under an identity, in a layout.
    """
    if not ids:
        return Identities(())
    known, more = _ask(session, ids, layouts[0].model_name)
    proven: dict[tuple[str, bytes, tuple[ItemIdentity, ...]], _Proven] = {}
    for claim in known:
        found = _prove(session, claim, layouts, want)
        if found is None:
            continue
        identity = Identity(found.one.lora)
        key = found.one.cache_salt, root_hash(identity), found.one.mm
        if key not in proven or _reach(found) > _reach(proven[key]):
            proven[key] = found
    kept = [found for found in proven.values() if not _is_part_of_another(found, proven.values())]
    kept.sort(key=_reach, reverse=True)
    return Identities(tuple(found.one for found in kept), more)


def _ask(
    session: Session, ids: Sequence[int], model_name: str
) -> tuple[dict[KnownIdentity, None], bool]:
    """What the server was told, from the sequence's end to its beginning; and whether there is more."""
    chunk_size = session.connection.hello.chunk_size
    chain = HashChain(chunk_size)
    chain.extend(ids)
    chunks = [
        PartialChunk(
            index=index,
            parent_hash=chain.parent(index),
            tokens=tuple(ids[index * chunk_size : (index + 1) * chunk_size]),
        )
        for index in range(-(-len(ids) // chunk_size))
    ]
    known: dict[KnownIdentity, None] = {}
    more = False
    size = max(1, min(MAX_PARTIALS, PARTIAL_TOKENS // chunk_size))
    for end in range(len(chunks), 0, -size):
        query = IdentityQuery(model_name=model_name, chunks=tuple(chunks[max(0, end - size) : end]))
        reply: IdentitiesReply = session.ask(IDENTITIES_Q, (query,))
        known.update(dict.fromkeys(reply.identities))
        more = more or reply.more
    return known, more


def _prove(
    session: Session, claim: KnownIdentity, layouts: Sequence[StoredLayout], want: Want
) -> _Proven | None:
    """What is really stored under a claim; None for nothing."""
    identity = Identity(claim.lora, claim.items)
    reached = []
    for layout in layouts:
        wanteds = want(claim.cache_salt, identity, layout)
        found = find_all(session, wanteds)
        stored, end = _extent(found, wanteds[0].num_tokens)
        if stored:
            reached.append((found.num_tokens, stored, end, layout))
    if not reached:
        return None
    reached.sort(key=lambda one: one[:3], reverse=True)
    num_tokens, stored, end, _ = reached[0]
    items = sorted(claim.items, key=lambda item: (item.offset, item.kind, item.digest))
    one = StoredIdentity(
        cache_salt=claim.cache_salt,
        lora=claim.lora,
        mm=tuple(item for item in items if item.offset < end),
        num_tokens=num_tokens,
        tokens_stored=stored,
        layouts=tuple(layout for *_, layout in reached),
    )
    return _Proven(one, end)


def _extent(found: Found, num_tokens: int) -> tuple[int, int]:
    """How many tokens are stored on all ranks, and the end of the last of them."""
    stored, end, covered = 0, 0, 0
    for miss in sorted(found.missing, key=lambda miss: miss.start):
        if miss.start > covered:
            stored, end = stored + miss.start - covered, miss.start
        covered = max(covered, miss.end)
    if covered < num_tokens:
        stored, end = stored + num_tokens - covered, num_tokens
    return stored, end


def _reach(found: _Proven) -> tuple[int, int, int]:
    return found.one.num_tokens, found.one.tokens_stored, len(found.one.layouts)


def _is_part_of_another(found: _Proven, others: Iterable[_Proven]) -> bool:
    """All that it holds lies before the first item by which another, that holds no less, goes on."""
    one = found.one
    root = root_hash(Identity(one.lora))
    for other in others:
        more = other.one.mm[len(one.mm) :]
        if (
            more
            and other.one.mm[: len(one.mm)] == one.mm
            and other.one.cache_salt == one.cache_salt
            and root_hash(Identity(other.one.lora)) == root
            and found.end <= more[0].offset
            and other.one.num_tokens >= one.num_tokens
            and other.one.tokens_stored >= one.tokens_stored
            and set(one.layouts) <= set(other.one.layouts)
        ):
            return True
    return False
