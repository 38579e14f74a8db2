"""The gate of a store: everything that is checked before anything is reserved or copied. Pure.

Ring block ids that pass this gate lie inside the ring and are exactly as many as the token range needs; this is what
keeps a copy from reading out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash, chunk_hashes, root_hash
from lmcache_qprotocol.identity import Identity, ItemIdentity
from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank
from lmcache_qprotocol.messages import IdentityClaim, RangeKey, RingDescription, StoreProof
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.qstore.by_identity import Claim, Claimed
from lmcache_qserver.qstore.by_tokens import Content, content_of
from lmcache_qserver.qstore.instance import Instance
from lmcache_qserver.qstore.stored_object import Description

EVENT_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class CheckedStore:
    """A store that has passed the gate: the whole chunks of [key.start, key.end), or one piece.

    Attributes:
        num_chunks: 1 for a piece.
        rows: rows [a, b) that every one of its chunks has.
        content: tokens and items of the one chunk, when they were sent.
        claimed: its identity in words, when it was sent.
        event: handle of the device event that the copy waits for; empty, for a ring in host memory.
    """

    key: RangeKey
    family: KeyFamily
    description: Description
    num_chunks: int
    rows: tuple[int, int]
    block_ids: tuple[int, ...]
    nonces: tuple[int, ...]
    content: Content | None = None
    claimed: Claimed | None = None
    event: bytes = b""

    @property
    def object_bytes(self) -> int:
        """Bytes of each object."""
        return self.description.blocks_of(self.rows) * self.description.block_bytes

    @property
    def told_chain(self) -> list[bytes]:
        """The hash of the chunk before the range, empty if not sent, and those of its chunks; [] without."""
        hashes = self.key.chunk_hashes
        return [self.key.parent_hash or b"", *hashes] if hashes else []

    def chain_of_tokens(self) -> list[bytes]:
        """The same out of the whole prefix's token ids: O(prefix), work for a thread."""
        size = self.description.chunk_size
        hashes = chunk_hashes(self.key.token_ids[: self.key.end], size)
        return [NONE_HASH, *hashes][self.key.start // size :]

    def chunks(self, chain: Sequence[bytes]) -> list[PlannedChunk]:
        """What is to be copied, in order.

        Args:
            chain: hash of the chunk before the range, empty if unknown, then one per chunk.
        """
        per_chunk = self.description.blocks_of(self.rows)
        rows = None if self.rows == (0, self.description.chunk_size) else self.rows
        return [
            PlannedChunk(
                key=ObjectKey(family=self.family, chunk_hash=name, rows=rows),
                block_ids=self.block_ids[index * per_chunk : (index + 1) * per_chunk],
                parent=parent,
                start=self.key.start + index * self.description.chunk_size,
                nonce=self.nonces[index],
            )
            for index, (parent, name) in enumerate(pairwise(chain))
        ]


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk of a store: its address, and where in the ring it lies."""

    key: ObjectKey
    block_ids: tuple[int, ...]
    parent: bytes
    """Hash of the chunk before; empty if unknown."""
    start: int
    """Absolute position of the range's first token in it."""
    nonce: int

    @property
    def first_stamp(self) -> int:
        """The stamp of its first row."""
        return first_stamp(self.nonce, self.start)


def check_store(
    instance: Instance,
    key: RangeKey,
    block_groups: Sequence[Sequence[int]],
    event: bytes,
    proof: StoreProof | None,
    chunk_size: int,
) -> CheckedStore:
    """Check a store from a LIVE instance of the caller's.

    Args:
        block_groups: ring block ids per group; a ring has one group.
        event: handle of the device event to wait for; empty, for a ring in host memory.

    Raises:
        RequestError: bad_payload, blocks_not_covering or unsupported_transport; nothing has happened then.
    """
    if instance.description.kind == "inline":
        raise RequestError(
            ErrorCode.UNSUPPORTED_TRANSPORT,
            "this ring was registered as out of the server's reach: upload what is to be stored",
        )
    if len(block_groups) != 1:
        raise _bad(f"the ring has one group of blocks, {len(block_groups)} were sent")
    return _checked(instance, key, block_groups[0], event, proof, chunk_size)


def check_upload(
    instance: Instance, key: RangeKey, proof: StoreProof, chunk_size: int
) -> CheckedStore:
    """Check a store of a LIVE instance of the caller's whose bytes are to come in messages.

    Raises:
        RequestError: bad_payload or unsupported_transport; nothing has happened then.
    """
    if instance.description.kind != "inline":
        raise RequestError(
            ErrorCode.UNSUPPORTED_TRANSPORT,
            "this instance has a ring that the server reads: store out of it, or register it as inline",
        )
    if len(key.chunk_hashes) != 1:
        raise _bad(f"an upload is of one chunk by its hash, not of {len(key.chunk_hashes)}")
    return _checked(instance, key, None, b"", proof, chunk_size)


def _checked(
    instance: Instance,
    key: RangeKey,
    block_ids: Sequence[int] | None,
    event: bytes,
    proof: StoreProof | None,
    chunk_size: int,
) -> CheckedStore:
    """Args: block_ids: None where there is no ring to copy from."""
    _check_key(instance, key)
    is_piece = _is_piece(key, chunk_size)
    num_chunks = 1 if is_piece else _count_chunks(key, chunk_size)
    chunk_start = key.start // chunk_size * chunk_size
    rows = (key.start - chunk_start, key.end - chunk_start) if is_piece else (0, chunk_size)
    _check_hashes(key, num_chunks)
    content = _check_content(key, num_chunks, chunk_start, is_piece)
    description = Description(
        instance.description.layout, instance.description.block_size, chunk_size
    )
    if block_ids is not None:
        needed = num_chunks * description.blocks_of(rows)
        _check_blocks(block_ids, needed, instance.description.num_blocks)
    if proof is None:
        raise _bad("a store from a ring needs a proof: send the nonce of each chunk")
    if len(proof.nonces) != num_chunks:
        raise _bad(f"{num_chunks} chunks need {num_chunks} nonces, {len(proof.nonces)} were sent")
    _check_event(event, instance.description)
    return CheckedStore(
        key,
        _family(instance, key),
        description,
        num_chunks,
        rows,
        tuple(block_ids or ()),
        proof.nonces,
        content,
        _check_claim(key, proof.claim, content, chunk_start),
        event,
    )


def _check_event(event: bytes, ring: RingDescription) -> None:
    if ring.device is None and event:
        raise RequestError(
            ErrorCode.UNSUPPORTED_TRANSPORT,
            "this ring lies in host memory, where there is no event to wait for: send an empty handle",
        )
    if ring.device is not None and len(event) != EVENT_HANDLE_BYTES:
        raise _bad(
            f"a store from a device needs the handle of the event to wait for: {EVENT_HANDLE_BYTES} bytes, "
            f"not {len(event)}"
        )


def _check_key(instance: Instance, key: RangeKey) -> None:
    if key.model_name != instance.key_model_name:
        raise _bad(f"the key's model must be {instance.key_model_name!r}, as registered")
    if key.world_size != instance.world_size:
        raise _bad(
            f"the key's world size is {key.world_size}, {instance.world_size} was registered"
        )
    if key.worker_id is None or not 0 <= key.worker_id < key.world_size:
        raise _bad(f"worker_id must be a rank in [0, {key.world_size}), not {key.worker_id}")
    if key.layout_id != instance.layout_id:
        raise _bad("the key's layout_id is not that of the registered layout")


def _count_chunks(key: RangeKey, chunk_size: int) -> int:
    length = key.end - key.start
    if not length or key.start % chunk_size or length % chunk_size:
        raise _bad(
            f"[{key.start}, {key.end}) is neither one or more whole chunks of {chunk_size} tokens nor rows of one chunk"
        )
    return length // chunk_size


def _is_piece(key: RangeKey, chunk_size: int) -> bool:
    """Rows of one chunk, but not all of them."""
    inside_one = key.end > key.start and key.start // chunk_size == (key.end - 1) // chunk_size
    return inside_one and key.end - key.start < chunk_size


def _check_hashes(key: RangeKey, num_chunks: int) -> None:
    if key.chunk_hashes:
        if len(key.chunk_hashes) != num_chunks:
            raise _bad(
                f"{num_chunks} chunks need {num_chunks} hashes, {len(key.chunk_hashes)} were sent"
            )
    elif len(key.token_ids) < key.end:
        raise _bad(
            f"send a hash per chunk, or the whole prefix: {key.end} token ids, not {len(key.token_ids)}"
        )


def _check_content(
    key: RangeKey, num_chunks: int, chunk_start: int, is_piece: bool
) -> Content | None:
    """Tokens and items of the chunk up to the range's end: they must be what the hash names."""
    if key.parent_hash is None:
        if is_piece or key.piece_tokens or key.piece_items:
            raise _bad("a piece needs parent_hash and piece_tokens, and both go together")
        return None
    if num_chunks != 1 or len(key.chunk_hashes) != 1:
        raise _bad("parent_hash goes with one chunk (or piece) and its one hash")
    tokens, items = key.piece_tokens, key.piece_items
    if len(tokens) != key.end - chunk_start:
        raise _bad(
            f"piece_tokens must be the {key.end - chunk_start} tokens from the chunk's start to the range's end, "
            f"not {len(tokens)}"
        )
    if any(item.offset >= len(tokens) for item in items):
        raise _bad("piece_items must begin among piece_tokens, with offsets from the chunk's start")
    if chunk_hash(key.parent_hash, tokens, 0, items) != key.chunk_hashes[0]:
        raise _bad("the hash is not that of parent_hash, piece_tokens and piece_items")
    return content_of(key.parent_hash, tokens, items)


def _check_claim(
    key: RangeKey, claim: IdentityClaim | None, content: Content | None, chunk_start: int
) -> Claimed | None:
    """The identity in words, as far as it can be checked against the key's hashes."""
    if claim is None:
        return None
    if content is None:
        raise _bad("a claim goes with parent_hash and piece_tokens")
    places = [(item.offset, item.kind, item.digest) for item in claim.items]
    if places != sorted(places):
        raise _bad("a claim's items come in order of (offset, kind, digest)")
    inside = tuple(
        ItemIdentity(item.kind, item.digest, item.offset - chunk_start)
        for item in claim.items
        if item.offset >= chunk_start
    )
    if inside != content.items:
        raise _bad("a claim's items must hold those of piece_items, at their absolute offsets")
    if not chunk_start and (content.parent_hash, claim.plain_parent_hash) != (
        root_hash(Identity(claim.lora)),
        NONE_HASH,
    ):
        raise _bad("a first chunk's parents must be the roots with the claim's LoRA, and without")
    is_plain = claim.lora is None and len(inside) == len(claim.items)
    if is_plain != (claim.plain_parent_hash == content.parent_hash):
        raise _bad("the parents must be equal without a LoRA and earlier items, and only then")
    return Claimed(
        Claim(key.cache_salt or "", claim.lora, claim.items),
        claim.plain_parent_hash,
        content.tokens,
    )


def _check_blocks(block_ids: Sequence[int], needed: int, num_blocks: int) -> None:
    if len(block_ids) != needed:
        raise RequestError(
            ErrorCode.BLOCKS_NOT_COVERING,
            f"the range needs {needed} ring blocks, {len(block_ids)} were sent",
        )
    # len() and min() and max() instead of a loop: a store may bring a million ids, and this is the event loop.
    if min(block_ids) < 0 or max(block_ids) >= num_blocks:
        raise RequestError(
            ErrorCode.BLOCKS_NOT_COVERING,
            f"ring block ids must be in [0, {num_blocks}), not [{min(block_ids)}, {max(block_ids)}]",
        )


def _family(instance: Instance, key: RangeKey) -> KeyFamily:
    assert key.worker_id is not None
    return KeyFamily(
        model_name=key.model_name,
        world_size=key.world_size,
        kv_rank=kv_rank(key.world_size, key.worker_id),
        cache_salt=key.cache_salt or "",
        layout_id=key.layout_id,
    )


def _bad(message: str) -> RequestError:
    return RequestError(ErrorCode.BAD_PAYLOAD, message)
