"""tests/golden/messages.json against the codec, byte for byte and in both directions.

A round trip passes when a field is renamed on both sides; exact bytes do not. Each message of
the file has its twin in `REQUESTS`, `REPLIES` or `PACKETS`: what its frames decode to, and what
encodes to them.

`python -m tests.protocol.test_message_vectors` packs the file's `plain` values anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache_qprotocol import codec, lifeline
from lmcache_qprotocol import messages as m
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.identity import ItemIdentity, LoraIdentity
from lmcache_qprotocol.keys import KeyFamily
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.operations import BY_NAME, OPERATIONS, SILENCE
from lmcache_qprotocol.reasons import LossReason, MissReason
from tests.protocol.plain_msgpack import from_json, pack

GOLDEN = Path(__file__).parents[1] / "golden" / "messages.json"

BOOT_ID, SESSION, RING_TOKEN = b"\xb0" * 16, b"\x5e" * 16, b"\x71" * 16
META = m.ReplyMeta(BOOT_ID)
LAYOUT_ID = bytes.fromhex("0123456789abcdef0123456789abcdef")
HASHES = (b"\x11" * 32, b"\x22" * 32)
MODEL = "org/model##query"

LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=(0, 1, 9),
    first_head=8,
    num_heads=8,
    total_heads=16,
    head_dim=64,
    dtype="bfloat16",
    tp_rank=1,
    tp_size=2,
    model_revision="0123abc",
)
RING = m.RingDescription(
    layout=LAYOUT,
    num_blocks=1024,
    block_size=16,
    chunk_size=256,
    ring_token=RING_TOKEN,
    stamps_offset=1 << 33,
)
DEVICE_RING = msgspec.structs.replace(
    RING,
    kind="cuda",
    device=m.DeviceMemory(uuid=b"\xd1" * 16, handle=b"\x4a" * 64, nbytes=(1 << 33) + 131080),
)
GROUP = m.GroupInfo(
    layer_indices=(0, 1), tokens_per_block=16, sw_size_tokens=-1, recurrent_state=False
)
REPORT = m.WorkerReport(
    computed=1000,
    captured=790,
    lost={reason: place for place, reason in enumerate(LossReason, 1)},
    pending=105,
    ring_blocks=1024,
    ring_used=17,
    ring_high_water=300,
)
CHUNKS_KEY = m.RangeKey(
    model_name=MODEL,
    world_size=2,
    worker_id=1,
    start=256,
    end=768,
    request_id="req-2",
    chunk_hashes=HASHES,
    layout_id=LAYOUT_ID,
)
REQUESTS_REPORT = m.WorkerReport(
    computed=12,
    captured=9,
    lost={LossReason.RING_FULL: 3},
    pending=0,
    requests=m.RequestCounts(whole=1, partial=2, none=3),
    recent=(
        m.RequestCoverage(
            request_id="req-2", computed=4, captured=1, lost={LossReason.RING_FULL: 3}
        ),
    ),
)
WAITED_REPORT = m.WorkerReport(computed=0, captured=0, lost={}, pending=0, waited_ms=70_000)
PIECE_KEY = msgspec.structs.replace(
    CHUNKS_KEY,
    start=259,
    end=262,
    chunk_hashes=HASHES[:1],
    parent_hash=b"\xaa" * 32,
    piece_tokens=(0, 1, 2, 3, 4294967295, 5),
    piece_items=(ItemIdentity("mm", "sha256:ab", 2),),
)
LEGACY_KEY = m.RangeKey(
    model_name=MODEL,
    world_size=1,
    worker_id=0,
    token_ids=(0, 1, 200, 70000, 4294967295, 5, 6, 7),
    start=4,
    end=8,
    request_id="req-1",
    cache_salt="tenant-a",
    num_kv_readers=1,
)
QUERY = m.ChunkQuery(
    family=KeyFamily(
        model_name=MODEL,
        world_size=2,
        kv_rank=0x02010201,
        cache_salt="tenant-a",
        layout_id=LAYOUT_ID,
    ),
    chunk_hashes=HASHES,
    partials=(
        m.PartialChunk(
            index=1,
            parent_hash=HASHES[0],
            tokens=(0, 1, 4294967295),
            items=(ItemIdentity("embeds", "d", 1),),
        ),
        m.PartialChunk(index=2, parent_hash=HASHES[1], tokens=(5,)),
    ),
    parent_hash=b"\x33" * 32,
)
LOOKUP_REPLY = m.LookupReply(
    prefix=1,
    missing=tuple(
        m.Missing(place, reason, (3, 200) if reason is MissReason.TOO_SHORT else None)
        for place, reason in enumerate(MissReason, 1)
    ),
    tokens=300,
)
STORED_CHUNK = m.StoredChunk(
    index=0,
    offset=1 << 40,
    nbytes=4718592,
    shape=(16, 3, 16, 512),
    dtype="bfloat16",
    rows=(3, 256),
    generation=9,
    valid=(3, 17),
    checksum=bytes.fromhex("0123456789abcdef"),
    nonfinite=5,
    persisted=True,
)
HINTS = {
    "kv_layout": msgspec.Raw(b"\xa3NHD"),
    "n": msgspec.Raw(b"\x92\x01\x81\xa1a\xc3"),
}
CPU_SHM = msgspec.msgpack.Ext(1, b"\x81\xa4type\xa7cpu_shm")

REQUESTS: dict[str, tuple[Any, ...]] = {
    "hello": (
        m.Hello(
            protocol_version=1, client="lmcache_qclient 0.1.0", pid=4242, former_session=SESSION
        ),
    ),
    "register_q_cache native": (4242, (), MODEL, 2, "vllm", {}, (GROUP,), RING),
    "register_q_cache native, a ring on a device": (
        4242,
        (),
        MODEL,
        2,
        "vllm",
        {},
        (GROUP,),
        DEVICE_RING,
    ),
    "register_q_cache native, inline": (
        4242,
        (),
        MODEL,
        2,
        "vllm",
        {},
        (),
        msgspec.structs.replace(RING, ring_token=bytes(16), stamps_offset=0, kind="inline"),
    ),
    "register_q_cache legacy": ("uuid-1", (CPU_SHM,), MODEL, 1, "vllm", HINTS, (GROUP,)),
    "register_q_cache legacy, no hints, no groups": (-(1 << 63), (), "m", 1, "", None, ()),
    "unregister_q_cache native": (4242, REPORT),
    "unregister_q_cache legacy": (4242,),
    "store_q native, two chunks": (
        CHUNKS_KEY,
        4242,
        ((0, 1, 300), (2147483647,)),
        b"",
        m.StoreProof(nonces=(1, 2147483647)),
    ),
    "store_q native, a piece": (PIECE_KEY, 4242, ((5,),), b"", m.StoreProof(nonces=(3,))),
    "store_q native, a piece with its identity": (
        PIECE_KEY,
        4242,
        ((5,),),
        b"",
        m.StoreProof(
            nonces=(3,),
            claim=m.IdentityClaim(
                plain_parent_hash=b"\xbb" * 32,
                lora=LoraIdentity("sql", "/adapters/sql", "blake3:00"),
                items=(ItemIdentity("embeds", "e", 7), ItemIdentity("mm", "sha256:ab", 258)),
            ),
        ),
    ),
    "store_q legacy": (LEGACY_KEY, 4242, ((3, 4),), b"\xe0\xe1"),
    "begin_upload_q": (PIECE_KEY, 4242, m.StoreProof(nonces=(3,))),
    "upload_part_q": (12, 1 << 24, memoryview(bytes(range(7)))),
    "end_upload_q": (12, memoryview(bytes.fromhex("03010000030000000401000003000000"))),
    "get_chunk_size native": (),
    "get_chunk_size legacy": (),
    "ping native": (4242, REPORT),
    "ping native, requests": (4242, REQUESTS_REPORT),
    "ping native, waited": (4242, WAITED_REPORT),
    "ping legacy": (None,),
    "noop native": (),
    "noop legacy": (),
    "noop by name": (),
    "get_experimental native": (),
    "get_experimental legacy": (),
    "lookup_q": (QUERY,),
    "retrieve_q": (QUERY,),
    "fetch_q": (12, 1, 1 << 21, 4718592),
    "release_q": ((1, 12, 1 << 40),),
    "verify_q": (),
    "flush_q": (5000,),
    "purge_q": ("org/model", "tenant-a"),
    "purge_q of all salts": ("org/model", None),
    "identities_q": (
        m.IdentityQuery(
            model_name=MODEL,
            chunks=(
                m.PartialChunk(index=0, parent_hash=HASHES[0], tokens=(0, 1, 4294967295)),
                m.PartialChunk(index=300, parent_hash=HASHES[1], tokens=(5,)),
            ),
        ),
    ),
}

REPLIES: dict[str, Any] = {
    "hello reply": m.HelloReply(
        protocol_version=1,
        boot_id=BOOT_ID,
        session=SESSION,
        features=("transfer_query",),
        chunk_size=256,
        limits=Limits(bulk_bytes=16773120, bulk_outstanding_bytes=67108864, upload_ms=60000),
        lifeline="/run/lmcache-qserver/lifeline.sock",
    ),
    "register_q_cache native reply": None,
    "register_q_cache legacy reply": None,
    "unregister_q_cache native reply": None,
    "unregister_q_cache legacy reply": None,
    "store_q native reply": m.StoreResult(b"", True, m.StoreOutcome(stored=1, duplicate=1)),
    "store_q native reply, refused": m.StoreResult(
        b"",
        False,
        m.StoreOutcome(
            stored=1,
            refused={LossReason.POOL_FULL: 1},
            message="the pool is full of leased objects",
        ),
    ),
    "store_q legacy reply": m.StoreResult(b"\xe0", True),
    "store_q legacy failure": m.StoreResult(b"", False),
    "begin_upload_q reply": m.UploadReply(upload_id=12, nbytes=4718592),
    "begin_upload_q reply, stored before": m.UploadReply(
        result=m.StoreResult(b"", True, m.StoreOutcome(duplicate=1))
    ),
    "upload_part_q reply": None,
    "end_upload_q reply": m.StoreResult(b"", True, m.StoreOutcome(stored=1)),
    "get_chunk_size native reply": 256,
    "get_chunk_size legacy reply": 256,
    "ping native reply": True,
    "ping legacy reply": True,
    "ping legacy failure": False,
    "noop native reply": "OK",
    "noop legacy reply": "OK",
    "get_experimental native reply": ("transfer_query",),
    "get_experimental legacy reply": ("transfer_query",),
    "lookup_q reply": LOOKUP_REPLY,
    "lookup_q reply without hello": LOOKUP_REPLY,
    "retrieve_q reply": m.RetrieveReply(
        lease_id=12,
        chunks=(STORED_CHUNK,),
        missing=(m.Missing(1, MissReason.EVICTED, (0, 256)),),
        partial=True,
        tokens=17,
        lease_ms=60000,
    ),
    "fetch_q reply": memoryview(bytes(range(7))),
    "release_q reply": None,
    "verify_q reply": m.VerifyReply(verified=300, made=1, corrupt=0, nbytes=1 << 40),
    "flush_q reply": m.FlushReply(persisted=False, waiting=3, message="not all", lost=2),
    "purge_q reply": m.PurgeReply(dropped=2, deleted=300, deleted_bytes=1 << 40),
    "identities_q reply": m.IdentitiesReply(
        identities=(
            m.KnownIdentity(
                cache_salt="tenant-a",
                lora=LoraIdentity("sql", "/adapters/sql"),
                items=(ItemIdentity("mm", "sha256:ab", 258),),
            ),
            m.KnownIdentity(),
        ),
        more=True,
    ),
}

PACKETS: dict[str, lifeline.Packet] = {
    "attach": lifeline.Attach(SESSION),
    "attached": lifeline.Attached(1 << 34),
    "offer_ring": lifeline.OfferRing(RING_TOKEN, 123456789),
    "accepted": lifeline.Accepted(),
    "refused": lifeline.Refused(ErrorCode.RING_REFUSED, "seal it with F_SEAL_SHRINK"),
}


def load() -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["messages"]
    return messages


def packed(message: dict[str, Any]) -> list[str]:
    """The frames of a message by the independent packer; a bulk frame is what it is."""
    return [
        value["$bulk"]
        if isinstance(value, dict) and "$bulk" in value
        else pack(from_json(value)).hex()
        for value in message["plain"]
    ]


def of_kind(kind: str) -> list[Any]:
    return [
        pytest.param(
            message,
            [bytes.fromhex(frame) for frame in message.get("frames", ())],
            id=message["name"],
        )
        for message in load()
        if message["kind"] == kind
    ]


def test_frames_are_what_an_independent_packer_makes_of_the_plain_values() -> None:
    assert [message["frames"] for message in load()] == [packed(message) for message in load()]


@pytest.mark.parametrize(("message", "frames"), of_kind("request"))
def test_request(message: dict[str, Any], frames: list[bytes]) -> None:
    payloads = REQUESTS[message["name"]]
    operation = BY_NAME[message["operation"]]
    request = codec.decode_request(frames)
    assert (request.uid, request.op_frame) == (frames[0], frames[1])
    assert request.operation is operation
    assert request.payloads == payloads + (None,) * (len(operation.payloads) - len(payloads))
    if message["directions"] == "both":
        assert codec.encode_request(frames[0], operation, payloads) == frames


@pytest.mark.parametrize(("message", "frames"), of_kind("reply"))
def test_reply(message: dict[str, Any], frames: list[bytes]) -> None:
    result = REPLIES[message["name"]]
    meta = META if message["client"] == "native" else None
    reply = codec.decode_reply(frames, BY_NAME[message["operation"]])
    assert reply == (frames[0], result, meta)
    assert codec.encode_result(frames[0], frames[1], result, meta) == frames


@pytest.mark.parametrize(("message", "frames"), of_kind("error"))
def test_error(message: dict[str, Any], frames: list[bytes]) -> None:
    code = ErrorCode(message["name"].removeprefix("error "))
    with pytest.raises(RequestError) as caught:
        codec.decode_reply(frames, BY_NAME[message["operation"]])
    assert caught.value.code is code
    assert caught.value.message == f"what to do about {code.value}"
    meta = m.ReplyMeta(BOOT_ID, code, caught.value.message)
    assert codec.encode_error(frames[0], frames[1], meta) == frames


@pytest.mark.parametrize(("message", "frames"), of_kind("packet"))
def test_packet(message: dict[str, Any], frames: list[bytes]) -> None:
    packet = PACKETS[message["name"]]
    assert lifeline.decode_packet(frames[0]) == packet
    assert lifeline.encode_packet(packet) == frames[0]


def test_legacy_failures_are_what_the_table_says() -> None:
    for message in load():
        if message["name"].endswith("legacy failure"):
            failure = BY_NAME[message["operation"]].legacy_failure
            assert REPLIES[message["name"]] == failure
    loud = {operation.name for operation in OPERATIONS if operation.legacy_failure is not SILENCE}
    named = {x["operation"] for x in load() if x["name"].endswith("legacy failure")}
    assert loud == named


def test_a_native_store_outcome_never_reaches_a_legacy_client() -> None:
    result = m.StoreResult(b"", True, m.StoreOutcome(stored=1))
    assert codec.encode_result(b"\x07", b"\x05", result, None) == [
        b"\x07",
        b"\x05",
        b"\x92\xc4\x00\xc3",
    ]


def test_every_message_of_the_protocol_has_a_vector() -> None:
    messages = load()
    names = [message["name"] for message in messages]
    assert len(names) == len(set(names))
    by_kind = {
        kind: {x["name"] for x in messages if x["kind"] == kind}
        for kind in ("request", "reply", "error", "packet")
    }
    assert by_kind["request"] == set(REQUESTS)
    assert by_kind["reply"] == set(REPLIES)
    assert by_kind["packet"] == set(PACKETS)
    assert by_kind["error"] == {f"error {code.value}" for code in ErrorCode}
    assert set(map(type, PACKETS.values())) == set(lifeline.Packet.__args__)
    seen = {(x["kind"], x["client"], x["operation"]) for x in messages}
    for operation in OPERATIONS:
        clients = ["native"] if operation.legacy_id is None else ["native", "legacy"]
        for client in clients:
            assert ("request", client, operation.name) in seen
            assert ("reply", client, operation.name) in seen


def test_the_ten_fields_of_a_legacy_key_are_written_down_once_by_hand() -> None:
    """op 5, key map of ten fields, instance id 4242, one group of ring blocks, no event."""
    key = (
        "8a"  # a map of ten
        "aa6d6f64656c5f6e616d65"
        "a86d23237175657279"  # model_name: "m##query"
        "aa776f726c645f73697a65"
        "01"  # world_size: 1
        "a9776f726b65725f6964"
        "00"  # worker_id: 0
        "a9746f6b656e5f696473"
        "92"
        "05"
        "ceffffffff"  # token_ids: [5, 2**32 - 1]
        "a57374617274"
        "00"  # start: 0
        "a3656e64"
        "02"  # end: 2
        "aa726571756573745f6964"
        "a172"  # request_id: "r"
        "aa63616368655f73616c74"
        "a0"  # cache_salt: ""
        "af726571756573745f636f6e66696773"
        "c0"  # request_configs: nil
        "ae6e756d5f6b765f72656164657273"
        "c0"  # num_kv_readers: nil
    )
    frames = [bytes.fromhex(x) for x in ("07", "05", key, "cd1092", "91920304", "c400")]
    request = codec.decode_request(frames)
    assert request.operation.name == "store_q"
    assert request.payloads == (
        m.RangeKey(
            model_name="m##query",
            world_size=1,
            worker_id=0,
            token_ids=(5, (1 << 32) - 1),
            end=2,
            request_id="r",
        ),
        4242,
        ((3, 4),),
        b"",
        None,
    )


if __name__ == "__main__":
    content = json.loads(GOLDEN.read_text())
    for entry in content["messages"]:
        entry["frames"] = packed(entry)
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")
