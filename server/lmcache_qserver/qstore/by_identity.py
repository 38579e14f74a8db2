"""Finding identities by token ids: under which salts, LoRA adapters and items the same tokens are stored.

Chunk hashes differ by identity, so none finds another identity's chunks. Therefore a store may bring a *claim*: its
identity in words, and the hash of the chunk before by the token ids alone. Objects hang here under

    (model name, that plain parent hash) → objects, sorted by their tokens

so those that agree with asked tokens the furthest are the neighbours of the tokens' place in the order, and a walk
outwards from there meets objects in the order of agreement.

Hints only. The server can't prove a claim, and need not: whoever asks hashes each identity anew and looks it up, so a
false claim costs its sender's victims a lookup that finds nothing, never a wrong tensor.

Bounded: claims are kept once, however many objects share them, and all together in `CHARS_KEPT` characters; an object
whose claim finds no room is stored as ever, and not listed. A question looks at `MOST_LOOKED_AT` objects, and an answer
holds `MAX_IDENTITIES` identities of `MOST_CHARS_TOLD` characters.

Synchronous, on the event loop, like the index that owns it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lmcache_qprotocol.hashing import token_bytes
from lmcache_qprotocol.identity import ItemIdentity, LoraIdentity
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.limits import MAX_IDENTITIES
from lmcache_qprotocol.messages import IdentitiesReply, KnownIdentity, PartialChunk
from lmcache_qserver.qstore.by_tokens import common_rows

CHARS_KEPT = 1 << 24
MOST_CHARS_TOLD = 1 << 20
MOST_ITEMS_LOOKED_AT = 1 << 16
"""Items of the claims that one question looks at: each is compared, and hashed."""
MOST_LOOKED_AT = 2048
ITEM_CHARS = 32
"""Counted for an item besides its digest."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a writer says of a chunk, besides its tokens.

    Attributes:
        items: absolute offsets, in order of (offset, kind, digest).
    """

    cache_salt: str
    lora: LoraIdentity | None
    items: tuple[ItemIdentity, ...]

    @property
    def chars(self) -> int:
        """Characters, about."""
        lora = self.lora
        named = 0 if lora is None else len(lora.name) + len(lora.source) + len(lora.digest)
        items = sum(len(item.digest) + ITEM_CHARS for item in self.items)
        return len(self.cache_salt) + named + items

    def up_to(self, end: int) -> Claim:
        """The claim as far as it is about positions below `end`."""
        if not self.items or self.items[-1].offset < end:
            return self
        items = tuple(item for item in self.items if item.offset < end)
        return Claim(self.cache_salt, self.lora, items)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim, and where its object hangs.

    Attributes:
        plain_parent_hash: of the chunk before, by the token ids alone.
        tokens: of the chunk up to the object's end, as uint32 big-endian (`token_bytes`).
    """

    claim: Claim
    plain_parent_hash: bytes
    tokens: bytes


_Ordered = list[tuple[bytes, bytes, ObjectKey]]
"""(tokens, digest of the key, key); the digest orders objects of equal tokens."""


class ByIdentity:
    """All objects whose writers told their identity.

    Args:
        chars_kept: most characters of all claims together.
    """

    def __init__(self, chars_kept: int = CHARS_KEPT) -> None:
        self._chars_kept = chars_kept
        self._chars = 0
        self._claims: dict[Claim, tuple[Claim, int]] = {}  # itself, and how many objects have it
        self._objects: dict[ObjectKey, Claimed] = {}
        self._parents: dict[tuple[str, bytes], _Ordered] = {}

    def __len__(self) -> int:
        """Objects."""
        return len(self._objects)

    def __iter__(self) -> Iterator[ObjectKey]:
        return iter(self._objects)

    def add(self, key: ObjectKey, claimed: Claimed) -> None:
        """The object is stored now; nothing if there is no room for its claim. A key is added once."""
        assert key not in self._objects, "an object is indexed once"
        same, count = self._claims.get(claimed.claim, (claimed.claim, 0))
        if not count:
            if self._chars + same.chars > self._chars_kept:
                return
            self._chars += same.chars
        self._claims[same] = same, count + 1
        self._objects[key] = Claimed(same, claimed.plain_parent_hash, claimed.tokens)
        ordered = self._parents.setdefault(_place(key, claimed), [])
        insort(ordered, (claimed.tokens, key.digest(), key))

    def remove(self, key: ObjectKey) -> None:
        """The object has left the index; nothing if its identity was never known."""
        claimed = self._objects.pop(key, None)
        if claimed is None:
            return
        place = _place(key, claimed)
        ordered = self._parents[place]
        del ordered[bisect_left(ordered, (claimed.tokens, key.digest()))]
        if not ordered:
            del self._parents[place]
        claim, count = self._claims.pop(claimed.claim)
        if count > 1:
            self._claims[claim] = claim, count - 1
        else:
            self._chars -= claim.chars

    def find(
        self, model_name: str, chunks: Sequence[PartialChunk], chunk_size: int
    ) -> IdentitiesReply:
        """Identities of objects that hold some of the asked tokens; the last chunk's first, because they agree longest.

        Args:
            chunks: see `IdentityQuery`.
        """
        answer = _Answer()
        looked_at, items_left = 0, MOST_ITEMS_LOOKED_AT
        for chunk in sorted(chunks, key=lambda one: -one.index):
            ordered = self._parents.get((model_name, chunk.parent_hash), [])
            for agreed, key in _nearest(ordered, token_bytes(chunk.tokens)):
                if looked_at == MOST_LOOKED_AT or answer.full:
                    return answer.reply(more=True)
                looked_at += 1
                items_left -= len(self._objects[key].claim.items)
                if items_left < 0:
                    return answer.reply(more=True)
                if agreed > (0 if key.rows is None else key.rows[0]):
                    end = chunk.index * chunk_size + agreed
                    answer.add(self._objects[key].claim.up_to(end))
        return answer.reply(more=answer.full)

    def validate(self) -> None:
        """Assert that all sides know the same objects. O(n); for tests."""
        listed = []
        for place, ordered in self._parents.items():
            assert ordered
            assert ordered == sorted(ordered)
            for tokens, _, key in ordered:
                claimed = self._objects[key]
                assert (_place(key, claimed), claimed.tokens) == (place, tokens)
                listed.append(key)
        assert len(listed) == len(self._objects)
        assert sum(count for _, count in self._claims.values()) == len(self._objects)
        assert self._chars == sum(claim.chars for claim in self._claims) <= self._chars_kept


class _Answer:
    """Identities in the order in which they were found."""

    def __init__(self) -> None:
        self._claims: dict[Claim, None] = {}
        self._chars = 0
        self.full = False

    def add(self, claim: Claim) -> None:
        """Take an identity, if it is new and there is room."""
        if claim in self._claims:
            return
        if len(self._claims) == MAX_IDENTITIES or self._chars + claim.chars > MOST_CHARS_TOLD:
            self.full = True
            return
        self._claims[claim] = None
        self._chars += claim.chars

    def reply(self, *, more: bool) -> IdentitiesReply:
        """As it travels."""
        return IdentitiesReply(
            identities=tuple(
                KnownIdentity(cache_salt=claim.cache_salt, lora=claim.lora, items=claim.items)
                for claim in self._claims
            ),
            more=more,
        )


def _nearest(ordered: _Ordered, tokens: bytes) -> Iterator[tuple[int, ObjectKey]]:
    """Rows that agree, and the object: the furthest agreement first, ends where nothing agrees."""
    place = bisect_left(ordered, (tokens,))
    below = _walk(reversed(range(place)), ordered, tokens)
    above = _walk(range(place, len(ordered)), ordered, tokens)
    nearest = [next(below, None), next(above, None)]
    while nearest[0] or nearest[1]:
        side = 0 if (nearest[0] or (0,))[0] >= (nearest[1] or (0,))[0] else 1
        found = nearest[side]
        assert found is not None
        yield found
        nearest[side] = next((below, above)[side], None)


def _walk(
    places: Iterable[int], ordered: _Ordered, tokens: bytes
) -> Iterator[tuple[int, ObjectKey]]:
    for place in places:
        theirs, _, key = ordered[place]
        agreed = common_rows(theirs, tokens)
        if not agreed:
            return
        yield agreed, key


def _place(key: ObjectKey, claimed: Claimed) -> tuple[str, bytes]:
    return key.family.model_name, claimed.plain_parent_hash
