"""One request's open chunks: parts of chunks that own ring blocks, and what became of the others."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from lmcache_qclient.capture.account import RequestTally
from lmcache_qclient.capture.accounts import Tallies
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qprotocol.hashing import HashChain, chunk_hash
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.limits import MAX_ITEMS
from lmcache_qprotocol.messages import IdentityClaim
from lmcache_qprotocol.reasons import LossReason


@dataclass(eq=False)
class Part:
    """Rows [first, filled) of chunk `index`; compared by identity."""

    index: int
    nonce: int
    first: int
    filled: int
    blocks: list[int]


@dataclass
class OpenRequest:
    """One request.

    Attributes:
        tally: counts its tokens.
        chain: hashes of its chunks, as far as its token ids are known.
        skip: why nothing of it is captured any more; None to capture.
        selected: absolute positions [from, to) that are captured; None: all.
        tokens: all that are known; kept for pieces only.
        next: the position that its next step is expected to begin at.
        settled: positions below this can't be taken back.
        open: by chunk, the part that grows.
        sealed: parts that do not grow any more.
        done: by chunk, what was handed out as pieces: absolute positions [from, to).
        closed: chunks of which nothing more is captured, and why.
    """

    tally: RequestTally | Tallies
    chain: HashChain
    cache_salt: str
    skip: LossReason | None
    selected: tuple[int, int] | None = None
    tokens: array[int] = field(default_factory=lambda: array("I"))
    next: int = 0
    settled: int = 0
    open: dict[int, Part] = field(default_factory=dict)
    sealed: list[Part] = field(default_factory=list)
    done: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    closed: dict[int, LossReason] = field(default_factory=dict)

    def parts(self) -> list[Part]:
        """All parts that own ring blocks."""
        return [*self.sealed, *self.open.values()]

    def remove(self, part: Part) -> None:
        """The part does not own anything any more."""
        if self.open.get(part.index) is part:
            del self.open[part.index]
        else:
            self.sealed.remove(part)

    def seal(self, part: Part) -> None:
        """The part is complete."""
        del self.open[part.index]
        self.sealed.append(part)

    def has_other(self, index: int) -> bool:
        """Whether rows of chunk `index` are, or were, in another part than the open one."""
        return index in self.done or any(part.index == index for part in self.sealed)

    def held(self, index: int) -> list[tuple[int, int]]:
        """Positions [from, to) of chunk `index` that are captured, in order."""
        spans = [(part.first, part.filled) for part in self.sealed if part.index == index]
        part = self.open.get(index)
        if part is not None:
            spans.append((part.first, part.filled))
        return sorted(spans + self.done.get(index, []))

    @property
    def named(self) -> int:
        """Positions below this are settled, and their token ids are known."""
        return min(self.settled, len(self.chain))

    def finished(self, part: Part, blocks: list[int], pieces: bool) -> FinishedChunk:
        """The part as it is handed out, with `blocks`; `pieces` tells whether it brings its tokens."""
        base, end = part.index * self.chain.chunk_size, part.filled
        whole = (part.first, end) == (base, base + self.chain.chunk_size)
        parent, tokens, items = None, (), ()  # type: tuple[bytes | None, tuple[int, ...], tuple[ItemIdentity, ...]]
        if pieces:
            parent = self.chain.parent(part.index)
            tokens, items = tuple(self.tokens[base:end]), self._items(base, end)
        return FinishedChunk(
            self.tally.request_id,
            part.first,
            end,
            self.chain.hashes[part.index] if whole else self._piece_hash(base, end),
            self.cache_salt,
            tuple(blocks),
            part.nonce,
            self.tally,
            parent,
            tokens,
            items,
            self._claim(part.index, end) if pieces else None,
        )

    def _piece_hash(self, base: int, end: int) -> bytes:
        parent = self.chain.parent(base // self.chain.chunk_size)
        return chunk_hash(parent, self.tokens[base:end], base, self.chain.identity.items)

    def _items(self, base: int, end: int) -> tuple[ItemIdentity, ...]:
        """Items that begin in positions [base, end), their offsets counted from `base`."""
        return tuple(
            ItemIdentity(item.kind, item.digest, item.offset - base)
            for item in self.chain.identity.items
            if base <= item.offset < end
        )

    def _claim(self, index: int, end: int) -> IdentityClaim | None:
        """The identity of chunk `index` up to `end`, in words; None if it is longer than a store may tell."""
        identity = self.chain.identity
        begun = [item for item in identity.items if item.offset < end]
        if len(begun) > MAX_ITEMS:
            return None
        begun.sort(key=lambda item: (item.offset, item.kind, item.digest))
        return IdentityClaim(
            plain_parent_hash=self.chain.plain_parent(index), lora=identity.lora, items=tuple(begun)
        )
