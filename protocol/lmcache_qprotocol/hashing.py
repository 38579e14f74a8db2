"""Chunk hashes: a chain over token ids, byte for byte LMCache's when there is nothing else.

    h_-1 = blake3(int64 big-endian 0 ‖ uint32 big-endian 0)            LMCache 0.5.6, hash "blake3"
    h_i  = blake3(h_i-1 ‖ token ids of chunk i as uint32 big-endian)   32 bytes

With an identity (identity.py), in key-derivation mode so that no token sequence can imitate it:

    root = derive(h_-1 ‖ msgpack [name, source])                       context ROOT_CONTEXT
           derive(h_-1 ‖ msgpack [digest])                             if the LoRA has a digest
    h_i  = derive(blake3(h_i-1 ‖ tokens) ‖ msgpack [[kind, digest, offset - chunk start], ...])
           context ITEM_CONTEXT, for items whose first token lies in chunk i, in order of
           (offset, kind, digest)

A piece (rows [a, b) of a chunk) is hashed over the chunk's tokens up to b by the same formula, with
the items that begin before b. Where b lies inside the chunk fewer bytes are hashed, so no whole
chunk has this hash; where b is the chunk's end it *is* the whole chunk's hash, and only the key's
`rows` tell the two apart.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3

from lmcache_qprotocol.identity import PLAIN, Identity, ItemIdentity

HASH_BYTES = 32
NONE_HASH = blake3(struct.pack(">qI", 0, 0)).digest()
ROOT_CONTEXT = "lmcache-qserver 2026-11 lora root v1"
ITEM_CONTEXT = "lmcache-qserver 2026-11 items v1"

_UINT32 = "I" if array("I").itemsize == 4 else "L"


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as uint32 big-endian.

    Raises:
        ValueError: an id is outside [0, 2**32).
    """
    try:
        # A list, because array() would take a bytes object for ids that are packed already.
        packed = array(_UINT32, list(token_ids))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from None
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def root_hash(identity: Identity = PLAIN) -> bytes:
    """The hash before the first chunk."""
    if identity.lora is None:
        return NONE_HASH
    lora = identity.lora
    named = msgspec.msgpack.encode([lora.digest] if lora.digest else [lora.name, lora.source])
    return blake3(NONE_HASH + named, derive_key_context=ROOT_CONTEXT).digest()


def chunk_hash(
    parent: bytes, token_ids: Sequence[int], start: int = 0, items: Sequence[ItemIdentity] = ()
) -> bytes:
    """Hash of one chunk, or of its first tokens.

    Args:
        parent: the hash of the chunk before (`root_hash` for the first), 32 bytes.
        token_ids: the chunk's tokens, or as many of them as a piece reaches.
        start: absolute position of the first of them.
        items: items of the whole sequence; those that begin within `token_ids` count.
    """
    plain = blake3(parent + token_bytes(token_ids)).digest()
    end = start + len(token_ids)
    inside = sorted(
        (item.offset - start, item.kind, item.digest)
        for item in items
        if start <= item.offset < end
    )
    if not inside:
        return plain
    extras = msgspec.msgpack.encode([[kind, digest, offset] for offset, kind, digest in inside])
    return blake3(plain + extras, derive_key_context=ITEM_CONTEXT).digest()


class HashChain:
    """The rolling hash of one sequence: O(new tokens) per call, however long the sequence is.

    Tokens arrive in order by `extend`. `hashes[i]` is the hash of chunk i; `parent(i)` that of the
    chunk before it, and `plain_parent(i)` what that would be by the token ids alone.
    """

    def __init__(self, chunk_size: int, identity: Identity = PLAIN) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, not {chunk_size}")
        self.chunk_size = chunk_size
        self.identity = identity
        self.root = root_hash(identity)
        self.hashes: list[bytes] = []
        self._open: list[int] = []
        self._plain = None if identity == PLAIN else HashChain(chunk_size)

    def __len__(self) -> int:
        """Tokens seen."""
        return len(self.hashes) * self.chunk_size + len(self._open)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens; every chunk that becomes whole gets its hash.

        Raises:
            ValueError: a token id is outside [0, 2**32); the chain is unusable then.
        """
        if self._plain is not None:
            token_ids = list(token_ids)
            self._plain.extend(token_ids)
        self._open.extend(token_ids)
        size = self.chunk_size
        done = 0
        while len(self._open) - done >= size:
            start = len(self.hashes) * size
            tokens = self._open[done : done + size]
            self.hashes.append(
                chunk_hash(self.parent(len(self.hashes)), tokens, start, self.identity.items)
            )
            done += size
        del self._open[:done]

    def parent(self, chunk_index: int) -> bytes:
        """The hash that chunk `chunk_index` hangs on."""
        return self.hashes[chunk_index - 1] if chunk_index else self.root

    def plain_parent(self, chunk_index: int) -> bytes:
        """`parent` of the same tokens with nothing but token ids; what equal tokens share."""
        chain = self if self._plain is None else self._plain
        return chain.parent(chunk_index)

    @property
    def open_tokens(self) -> tuple[int, ...]:
        """Tokens of the chunk that is not whole yet."""
        return tuple(self._open)


def chunk_hashes(
    token_ids: Iterable[int], chunk_size: int, identity: Identity = PLAIN
) -> list[bytes]:
    """Hashes of all whole chunks of a sequence."""
    chain = HashChain(chunk_size, identity)
    chain.extend(token_ids)
    return chain.hashes
