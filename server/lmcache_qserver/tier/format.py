"""One object: a safetensors file that tells what it is, and a proof that it is still that.

    byte 0                 length of the JSON behind it, u64 little-endian         (safetensors' own frame)
    byte 8                 {"__metadata__": {...}, "q": {"dtype", "shape", "data_offsets"}}, then spaces
    byte `header_bytes`    tensor `q`, [blocks, layers, block_size, heads * head_dim], C order, to the end

`header_bytes` is 4096, or a larger multiple of it where metadata need more (hundreds of layers, long names): data is
always aligned for O_DIRECT and for mapping. Any safetensors library reads the file.

Metadata are strings, as safetensors wants. Numbers and lists in them are JSON:

    checksum        "xxh3-64:" and 16 hex digits over header and data, with 16 spaces in the digits' place
    format          "lmcache-qserver/1"; counts up when a reader of before could misread
    key             blake3 of the whole object key, salt included (`ObjectKey.digest`), hex
    model_name, world_size, kv_rank, chunk_hash, layout_id      of the key; `salt`: its digest, empty for none
    piece           rows [a, b) if the key has them, else null
    parent          hash of the chunk before, hex; empty if the writer did not tell it
    tokens          ids of the chunk's tokens from its start to the last of `rows`; [] if the writer did not tell them
    items           items (pictures, prompt embeddings) that begin among them, their offsets from the chunk's start
    axes            names of `q`'s axes
    layout          the whole `Layout`: feature, layer ids, heads, head_dim, dtype, ranks, revision
    block_size, chunk_size
    rows            rows [a, b) of the chunk that are held; `q` has the blocks in which they lie, other rows are 0
    token_range     [first, last) absolute positions of those rows; null if the writer did not say
    created         UTC, ISO 8601, microseconds
    extra           JSON object of strings, whatever the writer adds

Only one header says the same: reading renders it anew and compares bytes. So a header is accepted if it is exactly what
`encode` makes of its contents, its checksum holds over every byte of the object, its layout has the key's layout id,
its tokens have the key's chunk hash, and the tensor has as many bytes as layout and rows make. All else is Corrupt.
xxh3-64 finds accidents, not forgers.

Pure: no I/O. Large data is read once, for the checksum, with the GIL free, and never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import msgspec
import xxhash

from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.hashing import chunk_hash
from lmcache_qprotocol.identity import ItemIdentity
from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qserver.tier.errors import Corrupt
from lmcache_qserver.tier.paths import Address, address_of, quote

FORMAT = "lmcache-qserver/1"
ALIGNMENT = 4096
MAX_HEADER_BYTES = 1 << 20
"""Layer ids of the largest layout, names and tokens of a chunk fit many times."""
AXES = ("block", "layer", "token_in_block", "head_and_dim")

SAFETENSORS_DTYPE = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Our dtypes in safetensors' words."""

_LENGTH_BYTES = 8
_OPENING = b'{"__metadata__":{"checksum":"xxh3-64:'
_DIGITS = slice(_LENGTH_BYTES + len(_OPENING), _LENGTH_BYTES + len(_OPENING) + 16)
_BLANK = b" " * 16


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an object says of itself.

    Attributes:
        key_digest: 32 bytes, of the whole key.
        model_name: of the key, with the feature's suffix.
        salt: digest of the key's salt, 32 hex digits; empty for none.
        piece: the key's rows; None for a whole chunk.
        rows: rows [a, b) of the chunk that are held.
        start: absolute position of the chunk's first token; None if unknown.
        created: seconds since the epoch.
        parent: hash of the chunk before; empty if unknown.
        tokens: of the chunk, from its start to the end of `rows`; empty if unknown.
        items: those that begin among `tokens`, offsets from the chunk's start.
    """

    key_digest: bytes
    model_name: str
    salt: str
    world_size: int
    kv_rank: int
    chunk_hash: bytes
    layout_id: bytes
    piece: tuple[int, int] | None
    layout: Layout
    block_size: int
    chunk_size: int
    rows: tuple[int, int]
    start: int | None
    created: float
    parent: bytes = b""
    tokens: tuple[int, ...] = ()
    items: tuple[ItemIdentity, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> Address:
        """Where it belongs."""
        return Address(
            model_folder=quote(self.model_name),
            salt=self.salt,
            world_size=self.world_size,
            kv_rank=self.kv_rank,
            layout_id=self.layout_id,
            chunk_hash=self.chunk_hash,
            rows=self.piece,
            parent=self.parent,
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of `q`: [blocks, layers, block_size, heads * head_dim]."""
        blocks = -(-self.rows[1] // self.block_size) - self.rows[0] // self.block_size
        return blocks, len(self.layout.layer_ids), self.block_size, self.layout.hidden_dim

    @property
    def data_bytes(self) -> int:
        """Of `q`."""
        return self.shape[0] * self.block_size * self.layout.token_bytes

    def check(self) -> None:
        """Whether its parts fit each other.

        Raises:
            ValueError: they do not.
        """
        first, last = self.rows
        if self.block_size < 1 or self.chunk_size < 1 or not 0 <= first < last <= self.chunk_size:
            raise ValueError(f"rows {self.rows} do not lie in a chunk of {self.chunk_size}")
        if self.piece not in (None, self.rows) or (
            self.piece is None and self.rows != (0, self.chunk_size)
        ):
            raise ValueError(f"an object of key rows {self.piece} can't hold rows {self.rows}")
        if self.layout_id and self.layout_id != layout_id(self.layout):
            raise ValueError("the layout is not the key's")
        if self.tokens or self.items:
            self._check_tokens()

    def _check_tokens(self) -> None:
        if not self.parent or len(self.tokens) != self.rows[1]:
            raise ValueError(f"there are {len(self.tokens)} tokens for rows {self.rows}")
        if any(not 0 <= item.offset < len(self.tokens) for item in self.items):
            raise ValueError("an item begins outside of the tokens")
        if chunk_hash(self.parent, self.tokens, 0, self.items) != self.chunk_hash:
            raise ValueError("the tokens are not those that the key's hash names")


def header_of(
    key: ObjectKey,
    layout: Layout,
    block_size: int,
    chunk_size: int,
    rows: tuple[int, int],
    created: float,
    start: int | None = None,
    parent: bytes = b"",
    tokens: tuple[int, ...] = (),
    items: tuple[ItemIdentity, ...] = (),
    extra: Mapping[str, str] | None = None,
) -> Header:
    """The header of a key's object; arguments as in `Header`.

    Raises:
        ValueError: they do not fit each other.
    """
    family = key.family
    header = Header(
        key_digest=key.digest(),
        model_name=family.model_name,
        salt=address_of(key).salt,
        world_size=family.world_size,
        kv_rank=family.kv_rank,
        chunk_hash=key.chunk_hash,
        layout_id=family.layout_id,
        piece=key.rows,
        layout=layout,
        block_size=block_size,
        chunk_size=chunk_size,
        rows=rows,
        start=start,
        created=created,
        parent=parent,
        tokens=tokens,
        items=items,
        extra=dict(extra or {}),
    )
    header.check()
    return header


def encode(header: Header, data: memoryview) -> bytes:
    """The bytes that stand in front of `data`; together they are the object.

    Args:
        data: `header.data_bytes` bytes, contiguous.

    Raises:
        ValueError: data of another length, or a header of more than MAX_HEADER_BYTES.
    """
    if data.nbytes != header.data_bytes:
        raise ValueError(f"rows and layout make {header.data_bytes} bytes, not {data.nbytes}")
    blank = _render(header)
    return blank[: _DIGITS.start] + _checksum(blank, data) + blank[_DIGITS.stop :]


def header_bytes(beginning: memoryview) -> int:
    """How long the header is, out of the object's first 8 bytes or more.

    Raises:
        Corrupt: no object of ours begins so.
    """
    if beginning.nbytes < _LENGTH_BYTES:
        raise Corrupt("the object has no header")
    length = _LENGTH_BYTES + int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if length % ALIGNMENT or not ALIGNMENT <= length <= MAX_HEADER_BYTES:
        raise Corrupt("the object's header has an impossible length")
    return length


def read_header(head: memoryview) -> Header:
    """What an object's header says; nothing of it is proven by this.

    Args:
        head: exactly the header's bytes.

    Raises:
        Corrupt: it is not a header that `encode` makes.
    """
    if header_bytes(head) != head.nbytes:
        raise Corrupt("the object's header is cut off")
    raw = bytes(head)
    try:
        header = _parse(raw[_LENGTH_BYTES:])
        header.check()
        again = _render(header)
    except (ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise Corrupt(f"the object's header makes no sense: {_short(error)}") from None
    if _blanked(raw) != again:
        raise Corrupt("the object's header is not as it was written")
    return header


class Proof:
    """The proof of an object that comes piece by piece, so that it need not lie in memory as a whole.

    Attributes:
        header: what the object says; proven only when `finish` has returned.

    Args:
        head: exactly the header's bytes.
        key: whose object it must be; None for whoever's.

    Raises:
        Corrupt: it is not a header that `encode` makes.
    """

    def __init__(self, head: memoryview, key: ObjectKey | None = None) -> None:
        self.header = read_header(head)
        self._key = key
        raw = bytes(head)
        self._digits = raw[_DIGITS]
        self._state = xxhash.xxh3_64(_blanked(raw))
        self._nbytes = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes behind the header, contiguous; an observer for `ChunkStore.get_into`.

        Raises:
            Corrupt: there are more than the header says.
        """
        self._nbytes += data.nbytes
        if self._nbytes > self.header.data_bytes:
            raise self._wrong_length()
        self._state.update(data)

    def finish(self) -> Header:
        """The header of an object that is whole, unchanged and the key's.

        Raises:
            Corrupt: it is not.
        """
        if self._nbytes != self.header.data_bytes:
            raise self._wrong_length()
        if self._state.hexdigest().encode() != self._digits:
            raise Corrupt("the object's bytes have changed since they were written")
        header, key = self.header, self._key
        if key is not None and (
            header.key_digest != key.digest() or header.address != address_of(key, header.parent)
        ):
            raise Corrupt("the object is another key's")
        return header

    def _wrong_length(self) -> Corrupt:
        return Corrupt(
            f"the object has {self._nbytes} bytes of data instead of {self.header.data_bytes}"
        )


def decode(head: memoryview, data: memoryview, key: ObjectKey | None = None) -> Header:
    """The header of an object that is proven to be whole, unchanged and, if one is given, the key's.

    Args:
        head: exactly the header's bytes.
        data: exactly the bytes behind it, contiguous.

    Raises:
        Corrupt: it is not; the message says what was found first.
    """
    proof = Proof(head, key)
    proof.update(data)
    return proof.finish()


# --- the JSON -----------------------------------------------------------------------------------------------------


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """Fields in the order in which they are written; the checksum first, so that its place is fixed."""

    checksum: str
    format: str
    key: str
    model_name: str
    salt: str
    world_size: str
    kv_rank: str
    chunk_hash: str
    layout_id: str
    piece: str
    parent: str
    tokens: str
    items: str
    axes: str
    layout: str
    block_size: str
    chunk_size: str
    rows: str
    token_range: str
    created: str
    extra: str


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, int, int, int]
    data_offsets: tuple[int, int]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    q: _Tensor


_Range = tuple[int, int] | None


def _render(header: Header) -> bytes:
    """The whole header, with its checksum blank."""
    layout = header.layout
    first = None if header.start is None else header.start + header.rows[0]
    metadata = _Metadata(
        checksum=f"xxh3-64:{_BLANK.decode()}",
        format=FORMAT,
        key=header.key_digest.hex(),
        model_name=header.model_name,
        salt=header.salt,
        world_size=_json(header.world_size),
        kv_rank=_json(header.kv_rank),
        chunk_hash=header.chunk_hash.hex(),
        layout_id=header.layout_id.hex(),
        piece=_json(header.piece),
        parent=header.parent.hex(),
        tokens=_json(header.tokens),
        items=_json(header.items),
        axes=_json(AXES),
        layout=_json(layout),
        block_size=_json(header.block_size),
        chunk_size=_json(header.chunk_size),
        rows=_json(header.rows),
        token_range=_json(
            None if first is None else (first, first + header.rows[1] - header.rows[0])
        ),
        created=_iso(header.created),
        extra=_json(dict(header.extra)),
    )
    tensor = _Tensor(SAFETENSORS_DTYPE[layout.dtype], header.shape, (0, header.data_bytes))
    text = msgspec.json.encode(_File(metadata, tensor))
    length = -(-(_LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header has at most {MAX_HEADER_BYTES} bytes, not {length}")
    text = text.ljust(length - _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _parse(text: bytes) -> Header:
    """The other way round; what it lets through is rendered and compared."""
    metadata = msgspec.json.decode(text, type=_File).metadata
    rows = _typed(metadata.rows, tuple[int, int])
    token_range = _typed(metadata.token_range, _Range)
    return Header(
        key_digest=bytes.fromhex(metadata.key),
        model_name=metadata.model_name,
        salt=metadata.salt,
        world_size=_typed(metadata.world_size, int),
        kv_rank=_typed(metadata.kv_rank, int),
        chunk_hash=bytes.fromhex(metadata.chunk_hash),
        layout_id=bytes.fromhex(metadata.layout_id),
        piece=_typed(metadata.piece, _Range),
        layout=_typed(metadata.layout, Layout),
        block_size=_typed(metadata.block_size, int),
        chunk_size=_typed(metadata.chunk_size, int),
        rows=rows,
        start=None if token_range is None else token_range[0] - rows[0],
        created=datetime.fromisoformat(metadata.created).timestamp(),
        parent=bytes.fromhex(metadata.parent),
        tokens=_typed(metadata.tokens, tuple[int, ...]),
        items=_typed(metadata.items, tuple[ItemIdentity, ...]),
        extra=_typed(metadata.extra, dict[str, str]),
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _typed(text: str, kind: Any) -> Any:
    return msgspec.json.decode(text.encode(), type=kind)


def _iso(created: float) -> str:
    return datetime.fromtimestamp(created, timezone.utc).isoformat(timespec="microseconds")


def _blanked(raw: bytes) -> bytes:
    return raw[: _DIGITS.start] + _BLANK + raw[_DIGITS.stop :]


def _checksum(blanked: bytes, data: memoryview) -> bytes:
    """16 hex digits."""
    state = xxhash.xxh3_64(blanked)
    state.update(data)
    return state.hexdigest().encode()


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


assert SAFETENSORS_DTYPE.keys() == DTYPE_BYTES.keys(), (
    "every dtype of the protocol has a name in safetensors"
)
