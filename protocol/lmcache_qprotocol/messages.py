"""The structures that travel. Frozen; strict about types and ranges, blind to unknown fields.

Fields are only ever appended, with a default: an older peer's message stays valid.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from lmcache_qprotocol.errors import ErrorCode
from lmcache_qprotocol.identity import ItemIdentity, LoraIdentity
from lmcache_qprotocol.keys import Hash, KeyFamily, LayoutId, ModelName, Position, Salt, WorldSize
from lmcache_qprotocol.layout import LAYOUT_ID_BYTES, Layout
from lmcache_qprotocol.limits import (
    MAX_CHUNKS,
    MAX_GROUPS,
    MAX_IDENTITIES,
    MAX_ITEMS,
    MAX_LAYERS,
    MAX_NAME_CHARS,
    MAX_OPAQUE,
    MAX_PARTIALS,
    MAX_RECENT_REQUESTS,
    MAX_TOKENS,
    Limits,
)
from lmcache_qprotocol.reasons import LossReason, MissReason

PROTOCOL_VERSION = 1

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
InstanceId = (
    Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | Annotated[str, Meta(max_length=256)]
)
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
BlockId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Nonce = Annotated[int, Meta(ge=1, lt=1 << 31)]
Hashes = Annotated[tuple[Hash, ...], Meta(max_length=MAX_CHUNKS)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
Items = Annotated[tuple[ItemIdentity, ...], Meta(max_length=MAX_ITEMS)]
Checksum = Annotated[bytes, Meta(min_length=8, max_length=8)]
Token16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
OpaqueMap = Annotated[dict[str, msgspec.Raw], Meta(max_length=MAX_OPAQUE)]
"""A legacy map that nobody reads: its values stay bytes and its keys are few, else a frame could
become millions of objects."""


# --- connection -----------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a native client.

    Whoever has said it gets error frames, and `boot_id` with every reply.
    """

    protocol_version: Annotated[int, Meta(ge=1, le=1 << 16)]
    client: Name
    """For logs: program and version."""
    pid: Count = 0
    former_session: Annotated[bytes, Meta(max_length=16)] = b""
    """The session that this client had before, perhaps over another connection: it ends now."""


class HelloReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know of this server.

    Attributes:
        boot_id: 16 random bytes of this server process; another value means that it has been
            restarted.
        session: 16 random bytes that tie a lifeline to this client.
        features: feature names that the server stores.
        chunk_size: tokens per chunk.
        lifeline: file-system path of the Unix socket; empty when there is none.
    """

    protocol_version: int
    boot_id: Token16
    session: Token16
    features: tuple[str, ...]
    chunk_size: Count
    limits: Limits
    lifeline: str = ""


class ReplyMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fourth frame of every reply to a client that has said hello.

    Attributes:
        boot_id: as in `HelloReply`.
        code, message: the error, if the request failed; the result frame is nil then.
    """

    boot_id: Token16
    code: ErrorCode | None = None
    message: str = ""


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that have ended, by how much of what they computed was captured.

    Attributes:
        whole, partial, none: all of it, some of it, nothing.
    """

    whole: Count = 0
    partial: Count = 0
    none: Count = 0


class RequestCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """One ended request's tokens: computed = captured + sum(lost).

    Attributes:
        request_id: the engine's id, cut to the length of a name.
        computed, captured: tokens.
        lost: tokens not stored, by reason.
    """

    request_id: Name
    computed: Count
    captured: Count
    lost: dict[LossReason, Count]


RecentRequests = Annotated[tuple[RequestCoverage, ...], Meta(max_length=MAX_RECENT_REQUESTS)]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's own account of the tokens it computed; rides on `ping` and `unregister_q_cache`.

    Invariant: computed = captured + sum(lost) + pending.

    Attributes:
        computed: tokens whose queries were computed since the worker started.
        captured: of these, tokens that the server has confirmed as stored (or as stored before).
        lost: of these, tokens not stored, by reason.
        pending: of these, tokens in open chunks and in stores under way.
        ring_blocks, ring_used, ring_high_water: ring blocks in all, in use now, and the most ever
            in use.
        requests: ended requests, counted since the worker started.
        recent: those that ended last, oldest first.
        waited_ms: milliseconds that steps have waited for ring blocks since the worker started.
    """

    computed: Count
    captured: Count
    lost: dict[LossReason, Count]
    pending: Count
    ring_blocks: Count = 0
    ring_used: Count = 0
    ring_high_water: Count = 0
    requests: RequestCounts = RequestCounts()
    recent: RecentRequests = ()
    waited_ms: Count = 0


# --- registering a ring ---------------------------------------------------------------------------


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engine's KV cache groups (legacy field order)."""

    engine_group_id: Count = 0
    layer_indices: Annotated[tuple[Count, ...], Meta(max_length=MAX_LAYERS)] = ()
    tokens_per_block: Count | None = None
    sw_size_tokens: int | None = None
    extra_object_group_tag: str | None = None
    recurrent_state: bool | None = None


GroupInfos = Annotated[tuple[GroupInfo, ...], Meta(max_length=MAX_GROUPS)]


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where a ring on a device lies.

    Attributes:
        uuid: of the device, as its driver tells it.
        handle: interprocess handle of an allocation of the ring's own, which begins with it.
        nbytes: of the allocation.
    """

    uuid: Token16
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    nbytes: Count


class RingDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A block-major ring in memory that went over the lifeline under `ring_token`, or on a device.

    Rows lie at byte 0 as `[num_blocks, num_layers, block_size, hidden_dim]`, num_layers and
    hidden_dim as in `layout`. Stamps (stamps.py) lie at `stamps_offset` as int64 `[num_blocks,
    block_size]`.

    Attributes:
        kind: "shm" is host memory that went over the lifeline, "cuda" memory of an NVIDIA device, "inline" memory that
            the server can't reach: its owner uploads what is to be stored. A server refuses a kind that it does not
            know, and names those that it does.
        device: of a ring on a device; `ring_token` is then any 16 bytes, as it is for "inline", where
            `stamps_offset` says nothing either.
    """

    layout: Layout
    num_blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    chunk_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    ring_token: Token16
    stamps_offset: Count
    kind: Annotated[str, Meta(max_length=32)] = "shm"
    device: DeviceMemory | None = None


# --- storing --------------------------------------------------------------------------------------


class RangeKey(msgspec.Struct, frozen=True, kw_only=True):
    """Legacy key map: a token range [start, end) of one sequence on one rank.

    From `chunk_hashes` on the fields are ours.

    Attributes:
        model_name: with the feature's suffix.
        worker_id: the rank; None in lookups.
        token_ids: the whole prefix up to `end` (legacy); empty when `chunk_hashes` are given.
        start, end: absolute positions. Native: the whole chunks of [start, end), or one piece
            inside one chunk.
        chunk_hashes: one hash per chunk of the range; for a piece one, over the chunk's tokens up
            to `end`.
        layout_id: see layout.py.
        parent_hash, piece_tokens, piece_items: the hash of the chunk before, the chunk's tokens up
            to `end`, and the items that begin among them, their offsets counted from the chunk's
            start. A piece needs them; a single whole chunk may bring them, and can then be found by
            a part of its tokens.
    """

    model_name: ModelName
    world_size: WorldSize
    worker_id: Annotated[int, Meta(ge=0, le=255)] | None = None
    token_ids: TokenIds = ()
    start: Position = 0
    end: Position = 0
    request_id: Name = ""
    cache_salt: Salt | None = ""
    request_configs: OpaqueMap | None = None
    num_kv_readers: int | None = None
    chunk_hashes: Hashes = ()
    layout_id: LayoutId = b""
    parent_hash: Hash | None = None
    piece_tokens: TokenIds = ()
    piece_items: Items = ()

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"the range [{self.start}, {self.end}) ends before it starts")
        if len(self.layout_id) not in (0, LAYOUT_ID_BYTES):
            raise ValueError(f"a layout id has {LAYOUT_ID_BYTES} bytes, or none")


class IdentityClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chunk's tensors depend on besides its token ids and the salt, in words.

    The chunk's hash holds it already, but nobody can read it there. It finds what is stored for the
    same token ids (`identities_q`), and never decides what a reader gets: a reader hashes it anew.

    Attributes:
        plain_parent_hash: the hash of the chunk before, by the token ids alone.
        lora: the adapter.
        items: of the whole sequence, those that begin before the range's end, absolute offsets, in
            order of (offset, kind, digest).
    """

    plain_parent_hash: Hash
    lora: LoraIdentity | None = None
    items: Items = ()


class StoreProof(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a native store brings besides its key.

    Attributes:
        nonces: what the server checks the stamps against, one per chunk (or piece) of the range.
        claim: of the one chunk (or piece); it goes with `parent_hash` and `piece_tokens`.
    """

    nonces: Annotated[tuple[Nonce, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    claim: IdentityClaim | None = None


class StoreOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Third element of a native `store_q` result.

    Attributes:
        stored, duplicate: chunks committed now, and chunks that were there (or on their way)
            already.
        refused: chunks not stored, by reason; the store is refused as a whole when a copy or a
            stamp was wrong.
        message: what the first refusal was about.
    """

    stored: Count = 0
    duplicate: Count = 0
    refused: dict[LossReason, Count] = {}
    message: str = ""


class StoreResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of `store_q`; legacy clients get the first two elements.

    Attributes:
        event: handle of an event to wait for before the ring blocks are reused; empty when no copy
            is pending.
        ok: everything of the range is stored, or was before.
        outcome: details.
    """

    event: Annotated[bytes, Meta(max_length=4096)]
    ok: bool
    outcome: StoreOutcome | None = None


class UploadReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of `begin_upload_q`: either bytes are wanted, or the store is over.

    Attributes:
        upload_id: names the upload in its parts; 0: nothing is to be sent.
        nbytes: how many bytes its parts must have together.
        result: how the store ended, when nothing is to be sent.
    """

    upload_id: Count = 0
    nbytes: Count = 0
    result: StoreResult | None = None


# --- finding --------------------------------------------------------------------------------------


class PartialChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk by its tokens: whatever is stored of it is found, not only the whole chunk.

    Attributes:
        index: its place in the query, see `ChunkQuery`.
        parent_hash: the hash of the chunk before.
        tokens: the asked tokens from the chunk's start, at most `chunk_size`.
        items: the items that begin among them, their offsets counted from the chunk's start.
    """

    index: Count
    parent_hash: Hash
    tokens: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_TOKENS)]
    items: Items = ()


class ChunkQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks of one sequence.

    Attributes:
        chunk_hashes: whole chunks by hash, in order; their places are 0, 1, ...
        partials: chunks by their tokens, places ascending. One whose place is among
            `chunk_hashes` counts when that chunk is not there whole.
        parent_hash: the hash before the first of `chunk_hashes`; by it the persistent tier finds that chunk. None: the
            plain beginning of a sequence.
    """

    family: KeyFamily
    chunk_hashes: Hashes = ()
    partials: Annotated[tuple[PartialChunk, ...], Meta(max_length=MAX_PARTIALS)] = ()
    parent_hash: Hash | None = None

    def __post_init__(self) -> None:
        places = [partial.index for partial in self.partials]
        if any(place >= after for place, after in pairwise(places)):
            raise ValueError("partial chunks come in ascending order of their places")


class Missing(msgspec.Struct, frozen=True):
    """What is not there.

    Attributes:
        index: the chunk's place in the query.
        reason: why.
        rows: the rows [a, b) of a partial chunk that are missing; a chunk with several gaps is
            there several times. None: all that were asked for.
    """

    index: Count
    reason: MissReason
    rows: tuple[Position, Position] | None = None


class LookupReply(msgspec.Struct, frozen=True, kw_only=True):
    """What is there, and what is not.

    Attributes:
        prefix: chunks that are there with all their rows, without a gap from place 0.
        missing: all that is not there, in order.
        tokens: tokens that are there without a gap from place 0.
    """

    prefix: Count
    missing: tuple[Missing, ...] = ()
    tokens: Count = 0


class StoredChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Where a leased chunk lies in the server's pool.

    Attributes:
        index: its place in the query.
        offset, nbytes: bytes in the pool's memory.
        shape: `[blocks, layers, block_size, hidden_dim]`.
        dtype: a name of `DTYPE_BYTES`.
        rows: rows [a, b) of the chunk that the blocks hold, counted from the chunk's start. The
            first block begins at row `a // block_size * block_size`; the rows outside [a, b) are 0.
        generation: of the pool slot; it never comes back with other bytes.
        valid: the rows [a, c) of them that belong to the asked tokens. None: all.
        checksum: XXH3-64 of the `nbytes` bytes, most significant byte first. None: not made yet.
        nonfinite: how many of its rows (of one token in one layer) hold NaN or Inf. None: not
            looked at yet.
        persisted: whether it lies in the persistent tier, too, where it survives the server.
    """

    index: Count
    offset: Count
    nbytes: Count
    shape: tuple[Count, Count, Count, Count]
    dtype: str
    rows: tuple[Count, Count]
    generation: Count
    valid: tuple[Count, Count] | None = None
    checksum: Checksum | None = None
    nonfinite: Count | None = None
    persisted: bool = False


class FlushReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of `flush_q`.

    Attributes:
        persisted: everything that is stored now is in the persistent tier, too.
        waiting: objects that are not yet.
        message: why not; empty if they are.
        lost: objects since the server's start that left its memory before they were written, or could not be: these
            are in no tier. Purged and expired ones are not among them.
    """

    persisted: bool
    waiting: Count
    message: str = ""
    lost: Count = 0


class PurgeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of `purge_q`.

    Attributes:
        dropped: objects that left host memory; readers' leases keep their bytes until they end.
        deleted, deleted_bytes: objects of the persistent tier, and their bytes with headers.
        message: what could not be deleted there, and why; empty if nothing is left.
    """

    dropped: Count
    deleted: Count
    deleted_bytes: Count
    message: str = ""


class RetrieveReply(msgspec.Struct, frozen=True, kw_only=True):
    """A lease over what is there of a query.

    Attributes:
        lease_id: 0 when nothing was leased.
        chunks: the longest prefix without a gap, and what lies behind a gap, in order of index and
            of their first valid rows. A partial chunk may take several.
        missing: all that is not there, with reasons.
        partial: the client's lease cap cut the answer; release this lease, then ask for the rest.
        tokens: tokens that `chunks` hold without a gap from place 0.
        lease_ms: how long the lease lasts from when the request came, if neither its release nor
            the end of its lifeline comes first. 0: not said.
    """

    lease_id: Count
    chunks: tuple[StoredChunk, ...] = ()
    missing: tuple[Missing, ...] = ()
    partial: bool = False
    tokens: Count = 0
    lease_ms: Count = 0


class VerifyReply(msgspec.Struct, frozen=True, kw_only=True):
    """What hashing everything that was stored has found.

    Attributes:
        verified: objects whose bytes agreed with their checksum.
        made: objects that had none before.
        corrupt: objects whose bytes did not agree; they are not stored any more.
        nbytes: bytes hashed.
    """

    verified: Count
    made: Count
    corrupt: Count
    nbytes: Count


class IdentityQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Asks what is stored for these token ids, whatever else the tensors depend on.

    Attributes:
        model_name: with the feature's suffix.
        chunks: `parent_hash` is that of the token ids alone, `index` the chunk's number in the
            sequence; items are ignored.
    """

    model_name: ModelName
    chunks: Annotated[tuple[PartialChunk, ...], Meta(min_length=1, max_length=MAX_PARTIALS)]


class KnownIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An identity under which something is stored, as its writer told it.

    Attributes:
        cache_salt: part of the key.
        lora: the adapter.
        items: with absolute offsets, up to where the token ids agree with the asked ones.
    """

    cache_salt: Salt = ""
    lora: LoraIdentity | None = None
    items: Items = ()


class IdentitiesReply(msgspec.Struct, frozen=True, kw_only=True):
    """Identities that are worth a lookup.

    Attributes:
        identities: all different; those whose tokens agree the furthest first.
        more: there are others, which agree less far or did not fit.
    """

    identities: Annotated[tuple[KnownIdentity, ...], Meta(max_length=MAX_IDENTITIES)]
    more: bool = False
