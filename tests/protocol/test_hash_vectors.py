"""tests/golden/hash_chain.json against the protocol, and against formulae written down twice.

The upper half of this file is the independent script: struct, blake3 and plain_msgpack.py, nothing
of ours. `python -m tests.protocol.test_hash_vectors` writes its results into the JSON
file, whose inputs are written by hand.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.protocol.plain_msgpack import pack

GOLDEN = Path(__file__).parents[1] / "golden" / "hash_chain.json"
ROOT_CONTEXT = "lmcache-qserver 2026-11 lora root v1"
ITEM_CONTEXT = "lmcache-qserver 2026-11 items v1"
KEY_CONTEXT = "lmcache-qserver 2026-11 object key v1"
LAYOUT_CONTEXT = "lmcache-qserver 2026-11 layout v1"
SALT_CONTEXT = "lmcache-qserver 2026-11 salt v1"


def derive(context: str, data: bytes, length: int = 32) -> bytes:
    return bytes(blake3(data, derive_key_context=context).digest(length))


def none_hash() -> bytes:
    return bytes(blake3(struct.pack(">q", 0) + struct.pack(">I", 0)).digest())


def plain_hash(parent: bytes, tokens: list[int]) -> bytes:
    return bytes(blake3(parent + b"".join(struct.pack(">I", token) for token in tokens)).digest())


def chain(vector: dict[str, Any]) -> list[bytes]:
    """Root, then one hash per whole chunk, then the piece that the last tokens are, if any."""
    size, tokens = vector["chunk_size"], tokens_of(vector)
    root = none_hash()
    if vector.get("lora"):
        root = derive(ROOT_CONTEXT, root + pack(vector["lora"][2:] or vector["lora"]))
    hashes = [root]
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        digest = plain_hash(hashes[-1], part)
        items = [
            [offset - start, kind, digest_text]
            for kind, digest_text, offset in vector.get("items", [])
            if start <= offset < start + len(part)
        ]
        if items:
            extras = [[kind, text, offset] for offset, kind, text in sorted(items)]
            digest = derive(ITEM_CONTEXT, digest + pack(extras))
        hashes.append(digest)
    return hashes


def tokens_of(vector: dict[str, Any]) -> list[int]:
    """Token ids of a vector: listed, or `n` of the sequence (i * step + first) mod 2**32."""
    if "tokens" in vector:
        return list(vector["tokens"])
    rule = vector["tokens_rule"]
    return [(i * rule["step"] + rule["first"]) % (1 << 32) for i in range(rule["n"])]


def object_digest(fields: dict[str, Any]) -> bytes:
    order = (
        fields["model_name"],
        fields["world_size"],
        fields["kv_rank"],
        bytes.fromhex(fields["chunk_hash"]),
        fields["cache_salt"],
        bytes.fromhex(fields["layout_id"]),
        fields["rows"],
    )
    return derive(KEY_CONTEXT, pack(order))


def layout_digest(fields: dict[str, Any]) -> bytes:
    order = ["feature", "layer_ids", "first_head", "num_heads", "total_heads", "head_dim", "dtype"]
    order += ["tp_rank", "tp_size", "pp_rank", "pp_size", "model_revision"]
    later = [fields.get(name) for name in ("all_layer_ids", "scales")]
    while later and later[-1] is None:
        later.pop()
    return derive(LAYOUT_CONTEXT, pack([*(fields[name] for name in order), *later]), 16)


def salt_name(salt: str) -> str:
    return derive(SALT_CONTEXT, salt.encode(), 16).hex() if salt else ""


def rank_word(world_size: int, rank: int) -> int:
    return int.from_bytes(bytes([world_size, rank, world_size, rank]), "big")


def filled_in(golden: dict[str, Any]) -> dict[str, Any]:
    """The file's content with every expected value computed anew from its inputs."""
    fresh: dict[str, Any] = json.loads(json.dumps(golden))
    fresh["none_hash"] = none_hash().hex()
    for vector in fresh["chains"]:
        root, *hashes = chain(vector)
        vector["root"] = root.hex()
        whole = len(tokens_of(vector)) // vector["chunk_size"]
        vector["hashes"] = [digest.hex() for digest in hashes[:whole]]
        vector["tail_piece"] = hashes[whole].hex() if len(hashes) > whole else None
    for vector in fresh["layouts"]:
        vector["layout_id"] = layout_digest(vector["layout"]).hex()
    for vector in fresh["object_keys"]:
        vector["digest"] = object_digest(vector["key"]).hex()
    for vector in fresh["salts"]:
        vector["digest"] = salt_name(vector["salt"])
    for vector in fresh["kv_ranks"]:
        vector["kv_rank"] = rank_word(vector["world_size"], vector["rank"])
    return fresh


def load() -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())
    return golden


# --- tests ----------------------------------------------------------------------------------------


def test_the_file_holds_what_the_independent_formulae_give() -> None:
    golden = load()
    assert filled_in(golden) == golden


def test_none_hash() -> None:
    from lmcache_qprotocol.hashing import NONE_HASH

    assert load()["none_hash"] == NONE_HASH.hex()


def test_chains() -> None:
    from lmcache_qprotocol.hashing import HashChain, chunk_hash, chunk_hashes
    from lmcache_qprotocol.identity import Identity, ItemIdentity, LoraIdentity

    golden = load()
    assert {vector["chunk_size"] for vector in golden["chains"]} == {1, 4, 16, 256}
    for vector in golden["chains"]:
        lora = LoraIdentity(*vector["lora"]) if vector.get("lora") else None
        items = tuple(ItemIdentity(*item) for item in vector.get("items", []))
        identity, tokens = Identity(lora, items), tokens_of(vector)
        ours = HashChain(vector["chunk_size"], identity)
        ours.extend(tokens)
        assert ours.root.hex() == vector["root"], vector["name"]
        assert [digest.hex() for digest in ours.hashes] == vector["hashes"], vector["name"]
        assert chunk_hashes(tokens, vector["chunk_size"], identity) == ours.hashes
        if vector["tail_piece"] is not None:
            start = len(ours.hashes) * vector["chunk_size"]
            parent = ours.parent(len(ours.hashes))
            tail = chunk_hash(parent, ours.open_tokens, start, items)
            assert tail.hex() == vector["tail_piece"], vector["name"]


def test_layout_ids() -> None:
    import msgspec

    from lmcache_qprotocol.layout import Layout, layout_id

    for vector in load()["layouts"]:
        layout = msgspec.convert(vector["layout"], Layout)
        assert layout_id(layout).hex() == vector["layout_id"], vector["name"]


def test_object_keys() -> None:
    from lmcache_qprotocol.keys import KeyFamily, ObjectKey

    for vector in load()["object_keys"]:
        fields = vector["key"]
        family = KeyFamily(
            model_name=fields["model_name"],
            world_size=fields["world_size"],
            kv_rank=fields["kv_rank"],
            cache_salt=fields["cache_salt"],
            layout_id=bytes.fromhex(fields["layout_id"]),
        )
        rows = None if fields["rows"] is None else (fields["rows"][0], fields["rows"][1])
        key = ObjectKey(family=family, chunk_hash=bytes.fromhex(fields["chunk_hash"]), rows=rows)
        assert key.digest().hex() == vector["digest"], vector["name"]


def test_salts_and_ranks() -> None:
    from lmcache_qprotocol.keys import kv_rank, salt_digest

    golden = load()
    for vector in golden["salts"]:
        assert salt_digest(vector["salt"]) == vector["digest"]
    for vector in golden["kv_ranks"]:
        assert kv_rank(vector["world_size"], vector["rank"]) == vector["kv_rank"]


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("usage: python -m tests.protocol.test_hash_vectors   (rewrites the golden file)")
    GOLDEN.write_text(json.dumps(filled_in(load()), indent=1, ensure_ascii=True) + "\n")
