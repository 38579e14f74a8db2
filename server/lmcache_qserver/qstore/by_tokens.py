"""Finding objects by the tokens of their chunk: what agrees with the asked tokens, and how far.

A piece can't be looked up by hash, because a reader does not know where a capture ended. So objects hang under their
parent chunk's hash, and there by their first row, in the order of their tokens:

    (family, parent hash) → first row a → objects, sorted by the words of rows [0, b)

A *word* stands for one row: its token, or where items begin at it a digest over token and items. Words have one width,
so sorting bytes sorts words, and the object that agrees with the asked words for the most rows is a neighbour of their
place in the order. So a question costs, for each of the few first rows that occur under a parent (multiples of the
engine's block, as a rule; never more than a chunk has rows), one binary search and two comparisons, however many
sequences share the parent: no object has to be left out of the index.

Digests in words are short and only find candidates: `agreement` compares tokens and items themselves.

Synchronous, on the event loop, like the index that owns it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from lmcache_qprotocol.hashing import token_bytes
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.keys import KeyFamily, ObjectKey

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Content:
    """The rows [0, b) of a chunk, as what they mean.

    Attributes:
        parent_hash: of the chunk before.
        tokens: as uint32 big-endian (`token_bytes`).
        items: those that begin among the tokens, in order of (offset, kind, digest), offsets from the chunk's start.
        words: `WORD_BYTES` a row; see the head of this file.
    """

    parent_hash: bytes
    tokens: bytes
    items: tuple[ItemIdentity, ...]
    words: bytes

    def __len__(self) -> int:
        """Rows."""
        return len(self.tokens) // 4


def content_of(
    parent_hash: bytes, token_ids: Sequence[int], items: Sequence[ItemIdentity] = ()
) -> Content:
    """Tokens and items of one chunk; every item begins among the tokens."""
    packed = token_bytes(token_ids)
    words = np.frombuffer(packed, dtype=">u4").astype(">u8")
    in_order = tuple(sorted(items, key=_place))
    at: dict[int, list[str]] = {}
    for item in in_order:
        at.setdefault(item.offset, []).extend((item.kind, item.digest))
    for offset, texts in at.items():
        digest = blake3(repr((token_ids[offset], texts)).encode()).digest(WORD_BYTES)
        words[offset] = int.from_bytes(digest, "big") | 1 << 63  # above any plain token
    return Content(parent_hash, packed, in_order, words.tobytes())


def agreement(one: Content, other: Content) -> int:
    """How many rows from the chunk's start have the same tokens and the same items, and so the same tensors."""
    rows = common_rows(one.tokens, other.tokens)
    for mine, theirs in zip(one.items, other.items, strict=False):
        if mine != theirs:
            return min(rows, mine.offset, theirs.offset)
    if len(one.items) == len(other.items):
        return rows
    longer = max(one.items, other.items, key=len)
    return min(rows, longer[min(len(one.items), len(other.items))].offset)


def common_rows(one: bytes, other: bytes) -> int:
    """How many rows from the chunk's start have the same tokens; both as `token_bytes`."""
    length = min(len(one), len(other)) // 4
    if one[: length * 4] == other[: length * 4]:
        return length
    differ = np.frombuffer(one, ">u4", length) != np.frombuffer(other, ">u4", length)
    return int(differ.argmax())


def _place(item: ItemIdentity) -> tuple[int, str, str]:
    return item.offset, item.kind, item.digest


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object, of which rows [first, agreed) belong to the asked tokens."""

    key: ObjectKey
    first: int
    agreed: int


_Ordered = list[tuple[bytes, bytes, ObjectKey]]
"""(words, digest of the key, key); the digest orders objects of equal words."""


class ByTokens:
    """All objects whose tokens are known; whole chunks among them, as rows from 0 on."""

    def __init__(self) -> None:
        self._parents: dict[tuple[KeyFamily, bytes], dict[int, _Ordered]] = {}
        self._contents: dict[ObjectKey, Content] = {}

    def __len__(self) -> int:
        """Objects."""
        return len(self._contents)

    def __iter__(self) -> Iterator[ObjectKey]:
        return iter(self._contents)

    def __contains__(self, key: object) -> bool:
        return key in self._contents

    def add(self, key: ObjectKey, content: Content) -> None:
        """The object is stored now; a key is added once."""
        assert key not in self._contents, "an object is indexed once"
        self._contents[key] = content
        starts = self._parents.setdefault((key.family, content.parent_hash), {})
        insort(starts.setdefault(_first_row(key), []), (content.words, key.digest(), key))

    def remove(self, key: ObjectKey) -> None:
        """The object has left the index; nothing if its tokens were never known."""
        content = self._contents.pop(key, None)
        if content is None:
            return
        parent = key.family, content.parent_hash
        starts = self._parents[parent]
        ordered = starts[_first_row(key)]
        del ordered[bisect_left(ordered, (content.words, key.digest()))]
        if not ordered:
            del starts[_first_row(key)]
        if not starts:
            del self._parents[parent]

    def candidates(self, family: KeyFamily, asked: Content) -> Iterator[Candidate]:
        """For every first row the object that agrees the furthest, if any of its rows do; in no order."""
        for first, ordered in self._parents.get((family, asked.parent_hash), {}).items():
            place = bisect_left(ordered, (asked.words,))
            best: Candidate | None = None
            for _, _, key in ordered[max(0, place - 1) : place + 1]:
                agreed = agreement(self._contents[key], asked)
                if agreed > (first if best is None else best.agreed):
                    best = Candidate(key, first, agreed)
            if best is not None:
                yield best

    def validate(self) -> None:
        """Assert that both sides know the same objects. O(n); for tests."""
        listed = []
        for (family, parent_hash), starts in self._parents.items():
            assert starts
            for first, ordered in starts.items():
                assert ordered
                assert ordered == sorted(ordered)
                for words, _, key in ordered:
                    assert (key.family, _first_row(key)) == (family, first)
                    content = self._contents[key]
                    assert (content.parent_hash, content.words) == (parent_hash, words)
                    listed.append(key)
        assert len(listed) == len(self._contents)


def _first_row(key: ObjectKey) -> int:
    return 0 if key.rows is None else key.rows[0]
