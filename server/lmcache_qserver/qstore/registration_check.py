"""What a registration must satisfy before a byte of its ring is touched. Pure."""

from __future__ import annotations

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RingDescription
from lmcache_qserver.copying import RingGeometry

MAX_WORLD_SIZE = 255
"""A rank is one byte in a key."""


def check_registration(
    model_name: str,
    world_size: int,
    description: RingDescription,
    ring_bytes: int,
    chunk_size: int,
    features: tuple[str, ...],
) -> None:
    """All but what only the kernel can tell (seals, real size), which the lane asks.

    Args:
        ring_bytes: size of the ring's memory, as announced; of no account for one that is out of reach.
        chunk_size: tokens per chunk on this server.
        features: what this server stores.

    Raises:
        RequestError: bad_payload for names and numbers, ring_refused for what is said about the ring.
    """
    if not model_name or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise RequestError(
            ErrorCode.BAD_PAYLOAD,
            f"a ring needs a model name and a world size in [1, {MAX_WORLD_SIZE}], not {model_name!r}, {world_size}",
        )
    if description.layout.feature not in features:
        raise RequestError(
            ErrorCode.BAD_PAYLOAD,
            f"this server does not store {description.layout.feature!r}, only {', '.join(features)}",
        )
    if description.chunk_size != chunk_size:
        raise RequestError(
            ErrorCode.RING_REFUSED,
            f"the ring is made for chunks of {description.chunk_size} tokens, this server has {chunk_size}: take the "
            "chunk size from its answer to hello",
        )
    if chunk_size % description.block_size:
        raise RequestError(
            ErrorCode.RING_REFUSED,
            f"blocks of {description.block_size} tokens do not divide a chunk of {chunk_size}: use their greatest "
            "common divisor",
        )
    if description.kind != "inline":
        RingGeometry.of(description).check(ring_bytes)
