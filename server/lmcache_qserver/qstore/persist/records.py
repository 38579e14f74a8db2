"""Between an object in the pool and what its file says of it. Pure."""

from __future__ import annotations

import numpy as np

from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qserver.qstore.by_tokens import Content, content_of
from lmcache_qserver.qstore.stored_object import Description, Place, StoredObject
from lmcache_qserver.tier.format import Header, header_of
from lmcache_qserver.tier.paths import Address, name_of


def name_of_stored(stored: StoredObject) -> str:
    """Its name in the persistent tier."""
    return name_of(stored.key, stored.place.parent)


def header_of_stored(stored: StoredObject, created: float) -> Header:
    """What its file is to say.

    Args:
        created: seconds since the epoch.
    """
    content, description = stored.content, stored.description
    return header_of(
        stored.key,
        description.layout,
        description.block_size,
        description.chunk_size,
        stored.rows,
        created,
        start=stored.place.start,
        parent=stored.place.parent,
        tokens=() if content is None else tuple(np.frombuffer(content.tokens, ">u4").tolist()),
        items=() if content is None else content.items,
    )


def description_of(header: Header) -> Description:
    """What the bytes behind the header are."""
    return Description(header.layout, header.block_size, header.chunk_size)


def content_of_header(header: Header) -> Content | None:
    """By what tokens its object is found; None if its writer did not tell them."""
    return content_of(header.parent, header.tokens, header.items) if header.tokens else None


def place_of(header: Header) -> Place:
    """Where its chunk stands in its sequence."""
    return Place(header.parent, header.start)


def key_at(family: KeyFamily, address: Address) -> ObjectKey:
    """The key of an object that lies in the folder of this family's salt."""
    return ObjectKey(family=family, chunk_hash=address.chunk_hash, rows=address.rows)
