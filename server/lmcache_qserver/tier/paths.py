"""From a key to an object's name, and back as far as a name tells.

    v1 / MODEL / LAYOUT-wWORLD-rRANK / SALT / PP / PARENT-HASH[.A-B].safetensors

    MODEL    the key's model name. What is not [A-Za-z0-9_.-], and a dot in front, is =XX for each byte of UTF-8.
             What would be longer than 96 characters is its beginning, `~`, and 32 hex digits of its blake3.
    LAYOUT   the layout id, 32 hex digits; `legacy` for none.
    WORLD    world size, decimal.  RANK  kv_rank, 8 hex digits.
    SALT     32 hex digits of the salt's digest; `nosalt` for none. A salt itself never becomes part of a name.
    PARENT   the hash of the chunk before, 64 hex digits; 64 zeros where the writer did not tell it.
    PP       the first two digits of PARENT, of HASH where that is unknown: 256 folders, so none grows too large.
    HASH     the chunk hash, 64 hex digits.  A-B  for a piece: rows [A, B).

What hangs on one parent lies in one folder, so what continues a sequence can be listed, whoever stored it: no index is
kept anywhere. All of the key but the plain salt (and a very long model name) can be read off a name;
`v1/MODEL/` and `v1/MODEL/LAYOUT-wWORLD-rRANK/SALT/` are prefixes to list or purge by. Two keys have two names, unless
digests collide; the object's own header holds the whole key's digest besides, and decides.

Broken objects are kept below `quarantine/`, in folders of these names; see `kept_name` of chunk_store.py.

Nothing that a client sends becomes part of a path in any other way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from lmcache_qprotocol.keys import ObjectKey, salt_digest

VERSION = "v1"
NO_SALT = "nosalt"
NO_LAYOUT = "legacy"
SUFFIX = ".safetensors"
MAX_MODEL_CHARS = 96
MODEL_CONTEXT = "lmcache-qserver 2026-11 model folder v1"

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
NO_PARENT = "0" * 64
_NAME = re.compile(
    rf"{VERSION}/(?P<model>[^/]+)/(?P<layout>[0-9a-f]{{32}}|{NO_LAYOUT})-w(?P<world>[1-9][0-9]{{0,2}})"
    rf"-r(?P<rank>[0-9a-f]{{8}})/(?P<salt>[0-9a-f]{{32}}|{NO_SALT})/[0-9a-f]{{2}}"
    r"/(?P<parent>[0-9a-f]{64})-(?P<hash>[0-9a-f]{64})"
    rf"(?:\.(?P<a>[0-9]{{1,10}})-(?P<b>[0-9]{{1,10}}))?{re.escape(SUFFIX)}"
)


@dataclass(frozen=True, slots=True)
class Address:
    """An object key with its salt hashed: what may be written down.

    Attributes:
        model_folder: the quoted model name.
        salt: its digest, 32 hex digits; empty for none.
        layout_id: 16 bytes, or none.
        rows: of a piece; None for a whole chunk.
        parent: hash of the chunk before, 32 bytes; none where it is unknown.
    """

    model_folder: str
    salt: str
    world_size: int
    kv_rank: int
    layout_id: bytes
    chunk_hash: bytes
    rows: tuple[int, int] | None
    parent: bytes = b""

    @property
    def name(self) -> str:
        """The object's name."""
        rows = "" if self.rows is None else f".{self.rows[0]}-{self.rows[1]}"
        parent = self.parent.hex() or NO_PARENT
        return f"{self.folder}/{parent}-{self.chunk_hash.hex()}{rows}{SUFFIX}"

    @property
    def folder(self) -> str:
        """Where it lies, together with all that hangs on its parent."""
        first = self.parent if any(self.parent) else self.chunk_hash
        return f"{self.salt_folder}/{first[:1].hex()}"

    @property
    def salt_folder(self) -> str:
        """Where all of its layout and salt lies."""
        return f"{self.layout_folder}/{self.salt or NO_SALT}"

    @property
    def layout_folder(self) -> str:
        """Where all of its model, layout and rank lies."""
        layout = self.layout_id.hex() or NO_LAYOUT
        return f"{VERSION}/{self.model_folder}/{layout}-w{self.world_size}-r{self.kv_rank:08x}"

    @property
    def model_name(self) -> str | None:
        """With the feature's suffix; None if it was too long for a name."""
        return unquote(self.model_folder)


def address_of(key: ObjectKey, parent: bytes = b"") -> Address:
    """The key's address.

    Args:
        parent: see `Address`.
    """
    family = key.family
    return Address(
        model_folder=quote(family.model_name),
        salt=salt_digest(family.cache_salt),
        world_size=family.world_size,
        kv_rank=family.kv_rank,
        layout_id=family.layout_id,
        chunk_hash=key.chunk_hash,
        rows=key.rows,
        parent=parent,
    )


def name_of(key: ObjectKey, parent: bytes = b"") -> str:
    """The name of a key's object; `parent` as in `Address`."""
    return address_of(key, parent).name


def parse_name(name: str) -> Address | None:
    """What a name tells; None for a name that no key has."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    salt, layout, a, b = match["salt"], match["layout"], match["a"], match["b"]
    address = Address(
        model_folder=match["model"],
        salt="" if salt == NO_SALT else salt,
        world_size=int(match["world"]),
        kv_rank=int(match["rank"], 16),
        layout_id=b"" if layout == NO_LAYOUT else bytes.fromhex(layout),
        chunk_hash=bytes.fromhex(match["hash"]),
        rows=None if a is None else (int(a), int(b)),
        parent=b"" if match["parent"] == NO_PARENT else bytes.fromhex(match["parent"]),
    )
    # Leading zeros, a fan-out folder of another hash, a model quoted otherwise: not a name that we give.
    is_ours = address.name == name and _is_quoted(address.model_folder)
    return (
        address if is_ours and (address.rows is None or address.rows[0] < address.rows[1]) else None
    )


def links_of(name: str) -> tuple[str, str, str]:
    """(salt's folder, PARENT, HASH) of a name that is known to be ours: cut out, for those who have very many."""
    folder, _, last = name.rpartition("/")
    return folder[:-3], last[:64], last[65:129]


def model_prefix(model_name: str) -> str:
    """What all names of a model begin with, without the last slash; the model name is that of keys."""
    return f"{VERSION}/{quote(model_name)}"


def salt_segment(salt: str) -> str:
    """The folder of a salt."""
    return salt_digest(salt) or NO_SALT


def quote(model_name: str) -> str:
    """A model name as one segment of a path."""
    raw = model_name.encode()
    quoted = "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in raw)
    if quoted.startswith("."):
        quoted = f"=2E{quoted[1:]}"
    if len(quoted) <= MAX_MODEL_CHARS:
        return quoted
    digest = blake3(raw, derive_key_context=MODEL_CONTEXT).hexdigest(16)
    return f"{quoted[: MAX_MODEL_CHARS - 33]}~{digest}"


def unquote(folder: str) -> str | None:
    """The model name; None if the segment holds only its beginning."""
    if "~" in folder:
        return None
    raw = re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), folder.encode())
    return raw.decode(errors="replace")


def _is_quoted(folder: str) -> bool:
    name = unquote(folder)
    if name is not None:
        return quote(name) == folder
    return re.fullmatch(r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]{62}~[0-9a-f]{32}", folder) is not None
