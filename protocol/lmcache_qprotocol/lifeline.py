"""Messages of the lifeline: the Unix socket beside the ZeroMQ endpoint.

It is a SOCK_SEQPACKET socket: one packet is one msgpack map, with at most one file descriptor
beside it. It passes memory by descriptor, and its closing tells either side that the other is dead.
A client attaches with the session of its `hello`, then may offer rings; the server answers every
packet with one packet, in order.

    attach {session}                  → attached {pool_bytes} + descriptor of the pool, read-only
    offer_ring {ring_token, nbytes}   → accepted {}
        + descriptor of a memfd sealed against shrinking
    anything that can't be served     → refused {code, message}
"""

from __future__ import annotations

import msgspec

from lmcache_qprotocol.errors import ErrorCode, ProtocolError
from lmcache_qprotocol.messages import Count, Token16

MAX_PACKET_BYTES = 4096


class Attach(msgspec.Struct, frozen=True, tag_field="kind", tag="attach"):
    """Ties this connection to the client that got `session` in its HelloReply."""

    session: Token16


class Attached(msgspec.Struct, frozen=True, tag_field="kind", tag="attached"):
    """Beside it comes the pool's descriptor; map `pool_bytes` of it for reading."""

    pool_bytes: Count


class OfferRing(msgspec.Struct, frozen=True, tag_field="kind", tag="offer_ring"):
    """Beside it comes the ring's descriptor; `register_q_cache` names it by `ring_token` later."""

    ring_token: Token16
    nbytes: Count


class Accepted(msgspec.Struct, frozen=True, tag_field="kind", tag="accepted"):
    """The offer has been taken."""


class Refused(msgspec.Struct, frozen=True, tag_field="kind", tag="refused"):
    """The packet can't be served; the connection stays open."""

    code: ErrorCode
    message: str


Packet = Attach | Attached | OfferRing | Accepted | Refused

_decoder = msgspec.msgpack.Decoder(Packet)


def encode_packet(packet: Packet) -> bytes:
    """One packet's bytes."""
    return msgspec.msgpack.encode(packet)


def decode_packet(data: bytes) -> Packet:
    """A packet from its bytes.

    Raises:
        ProtocolError(bad_payload): not a packet of the lifeline.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(ErrorCode.BAD_PAYLOAD, f"not a lifeline packet: {error}") from None
