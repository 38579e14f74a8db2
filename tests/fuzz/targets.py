"""What is fuzzed, and what counts as a fault: any exception but a `QServerError`, and broken promises."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from lmcache_qprotocol.codec import decode_payloads, decode_reply, decode_request, encode
from lmcache_qprotocol.errors import QServerError, RequestError
from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash
from lmcache_qprotocol.keys import KeyFamily, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.lifeline import Attach, Attached, OfferRing, decode_packet, encode_packet
from lmcache_qprotocol.messages import (
    PROTOCOL_VERSION,
    ChunkQuery,
    Hello,
    IdentityClaim,
    IdentityQuery,
    PartialChunk,
    RangeKey,
    RingDescription,
    StoreProof,
)
from lmcache_qprotocol.operations import BY_NAME, OPERATIONS
from lmcache_qprotocol.stamps import STAMP_BYTES
from lmcache_qserver.copying import RingGeometry, RingMemory
from lmcache_qserver.qstore.instance import Instance
from lmcache_qserver.qstore.registration_check import check_registration
from lmcache_qserver.qstore.store_check import check_store
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT
from tests.fuzz import server
from tests.fuzz.messages import Message, join, split

GOLDEN = Path(__file__).parents[1] / "golden/messages.json"
CHUNK_SIZE = server.CHUNK_SIZE
DESCRIPTION = RingDescription(
    layout=SMALL_LAYOUT,
    num_blocks=4,
    block_size=16,
    chunk_size=CHUNK_SIZE,
    ring_token=bytes(16),
    stamps_offset=4 * 16 * SMALL_LAYOUT.token_bytes,
)


class Target(NamedTuple):
    """One fuzzing target.

    Attributes:
        run: takes any bytes; raises only if there is a fault.
        seeds: inputs to begin with.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


# --- the codec ----------------------------------------------------------------------------------------------------


def codec(data: bytes) -> None:
    """Requests, and the same frames as replies: a message, or a `QServerError`; what decodes can be encoded again."""
    for frames in split(data):
        try:
            request = decode_request(frames)
        except QServerError:
            pass
        else:
            for payload in request.payloads:
                encode(payload)
        for operation in OPERATIONS:
            try:
                reply = decode_reply(frames, operation)
            except QServerError:
                continue
            encode(reply.result)


def payloads(data: bytes) -> None:
    """Every operation's payloads, whatever the message says that it is."""
    for frames in split(data):
        for operation in OPERATIONS:
            try:
                decoded = decode_payloads(operation, frames[: 2 + len(operation.payloads)])
            except QServerError:
                continue
            assert len(decoded) == len(operation.payloads)


def _golden(*kinds: str) -> list[Message]:
    vectors = json.loads(GOLDEN.read_text())["messages"]
    return [
        [bytes.fromhex(frame) for frame in vector["frames"]]
        for vector in vectors
        if vector["kind"] in kinds
    ]


# --- the dispatcher -----------------------------------------------------------------------------------------------


def dispatcher(data: bytes) -> None:
    """Messages of two clients against a whole server without sockets; see server.py for what must hold."""
    server.run(split(data))


def _conversation() -> list[Message]:
    """Hello, a ring, a chunk, a piece behind it, a lookup, a lease and its release; the server takes two at a time."""
    hello = _request("hello", Hello(protocol_version=PROTOCOL_VERSION, client="fuzz"))
    register = _request("register_q_cache", 1, (), "test/model", 1, "test", None, (), DESCRIPTION)
    tokens = tuple(range(CHUNK_SIZE))
    first = chunk_hash(NONE_HASH, tokens, 0, ())
    key = RangeKey(
        model_name="test/model##query",
        world_size=1,
        worker_id=0,
        end=CHUNK_SIZE,
        chunk_hashes=(first,),
        layout_id=layout_id(SMALL_LAYOUT),
        parent_hash=NONE_HASH,
        piece_tokens=tokens,
    )
    piece = msgspec.structs.replace(
        key,
        start=CHUNK_SIZE + 3,
        end=CHUNK_SIZE + 9,
        chunk_hashes=(chunk_hash(first, tokens[:9], 0, ()),),
        parent_hash=first,
        piece_tokens=tokens[:9],
    )
    claim = IdentityClaim(plain_parent_hash=NONE_HASH)
    store = _request("store_q", key, 1, ((0,),), b"", StoreProof(nonces=(1,), claim=claim))
    store_piece = _request("store_q", piece, 1, ((1,),), b"", StoreProof(nonces=(1,)))
    family = KeyFamily(
        model_name=key.model_name, world_size=1, kv_rank=kv_rank(1, 0), layout_id=key.layout_id
    )
    partial = PartialChunk(index=1, parent_hash=first, tokens=tokens)
    query = ChunkQuery(family=family, chunk_hashes=(first,), partials=(partial,))
    asked = IdentityQuery(
        model_name=key.model_name,
        chunks=(PartialChunk(index=0, parent_hash=NONE_HASH, tokens=tokens),),
    )
    find = [_request("lookup_q", query), _request("retrieve_q", query)]
    end = [_request("identities_q", asked), _request("release_q", (1,))]
    return [hello, register, hello, register, store, store_piece, *find, *end]


def _request(name: str, *values: object) -> Message:
    operation = BY_NAME[name]
    return [b"\x01", encode(operation.legacy_id or name), *map(encode, values)]


def _dialogues() -> list[bytes]:
    requests, beginning = _golden("request"), _conversation()[:6]
    return [
        join(_conversation()),
        join(requests[:16]),
        *(join([*beginning, frames, frames]) for frames in requests),
    ]


# --- the lifeline -------------------------------------------------------------------------------------------------


def packets(data: bytes) -> None:
    """A packet of the lifeline, or a `QServerError`; what decodes is encoded to what decodes to the same."""
    try:
        packet = decode_packet(data)
    except QServerError:
        return
    assert decode_packet(encode_packet(packet)) == packet


def _packets() -> list[bytes]:
    some = (Attach(bytes(16)), Attached(1 << 40), OfferRing(bytes(16), 4096))
    return [encode_packet(packet) for packet in some]


# --- the gates of registering and storing -------------------------------------------------------------------------


def gates(data: bytes) -> None:
    """A ring of the described size, and stores from it: what passes never reaches beyond the ring's memory."""
    messages = split(data)
    if not messages:
        return
    try:
        description = msgspec.msgpack.decode((messages[0] or [b""])[0], type=RingDescription)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    for nbytes in (0, 1 << 16, 1 << 40, (1 << 62) - 1):
        try:
            check_registration(
                "test/model", 1, description, nbytes, CHUNK_SIZE, ("transfer_query",)
            )
        except RequestError:
            continue
        geometry = RingGeometry.of(description)
        assert geometry.rows_bytes == (
            description.num_blocks * description.block_size * description.layout.token_bytes
        )
        assert geometry.rows_bytes <= geometry.stamps_offset <= nbytes
        assert geometry.stamps_offset + geometry.stamps_bytes <= nbytes
        assert (
            geometry.stamps_bytes == description.num_blocks * description.block_size * STAMP_BYTES
        )
        for frames in messages[1:]:
            _store(description, nbytes, frames)


def _store(description: RingDescription, nbytes: int, frames: Sequence[bytes]) -> None:
    instance = Instance(
        instance_id=1,
        client=None,
        model_name="test/model",
        world_size=1,
        description=description,
        ring=RingMemory(-1, nbytes),
        lane=None,  # type: ignore[arg-type]  # a check runs nothing
        last_seen=0.0,
    )
    try:
        key, _, groups, event, proof = decode_payloads(
            BY_NAME["store_q"], [b"\x01", b"\x05", *frames]
        )
        store = check_store(instance, key, groups, event, proof, CHUNK_SIZE)
    except QServerError:
        return
    assert all(0 <= block < description.num_blocks for block in store.block_ids)
    first, end = store.rows
    assert 0 <= first < end <= CHUNK_SIZE
    chunks = store.chunks(store.told_chain or store.chain_of_tokens())
    assert len(chunks) == store.num_chunks == len(store.nonces)
    covered = description.block_size * len(store.block_ids)
    assert covered >= key.end - key.start
    for chunk in chunks:
        blocks = len(chunk.block_ids) * description.block_size
        assert blocks >= end - first // description.block_size * description.block_size
        assert store.object_bytes == blocks * description.layout.token_bytes


def _gates() -> list[bytes]:
    ring = [encode(DESCRIPTION)]
    stores = [frames[2:] for frames in _golden("request") if frames[1] == b"\x05"]
    stores += [frames[2:] for frames in _conversation() if frames[1] == b"\x05"]
    return [join([ring, *stores]), *(join([ring, store]) for store in stores)]


TARGETS: dict[str, Target] = {
    "codec": Target(codec, lambda: [join([frames]) for frames in _golden("request", "reply")]),
    "payloads": Target(payloads, lambda: [join([frames]) for frames in _golden("request")]),
    "dispatcher": Target(dispatcher, _dialogues),
    "packets": Target(packets, _packets),
    "gates": Target(gates, _gates),
}
