"""Upper bounds that both sides know; `hello` announces them."""

from __future__ import annotations

import msgspec

MIB = 1 << 20

MAX_FRAMES = 16
"""Frames of one message, routing identity not counted."""
MAX_UID_BYTES = 64
MAX_NAME_CHARS = 512
MAX_SALT_CHARS = 4096
MAX_SOURCE_CHARS = 4096
"""Where a LoRA adapter comes from."""
MAX_TOKENS = 1 << 21
MAX_CHUNKS = 1 << 14
MAX_LAYERS = 4096
MAX_GROUPS = 256
"""KV cache groups of one engine; lists of ring blocks in one store."""
MAX_PARTIALS = 64
"""Partial chunks in one query."""
MAX_ITEMS = 4096
"""Items that begin in one chunk; items of one sequence that a store tells of."""
MAX_IDENTITIES = 256
"""Identities in one answer."""
MAX_OPAQUE = 1024
"""Entries of a map that nobody reads."""
MAX_RECENT_REQUESTS = 32
"""Requests that one worker's report tells one by one."""
MAX_BULK_BYTES = 16 * MIB
"""One bulk frame."""
MAX_POSITION = (1 << 31) - 1
"""A stamp holds a position in 31 bits."""


class Limits(msgspec.Struct, frozen=True):
    """What the server accepts; part of the reply to `hello`.

    Attributes:
        message_bytes: largest message, all its frames together; a larger frame costs the connection.
        chunks_per_request: most chunk hashes in one request.
        outstanding_requests: most unanswered requests of one client.
        bulk_bytes: longest bulk frame, either way; 0: no bytes travel inline.
        bulk_outstanding_bytes: most bytes of bulk answers that one client has asked for and not read yet.
        upload_ms: an upload that is not complete so long after its begin is given up.
    """

    message_bytes: int = 16 * MIB
    chunks_per_request: int = MAX_CHUNKS
    outstanding_requests: int = 1024
    bulk_bytes: int = 0
    bulk_outstanding_bytes: int = 0
    upload_ms: int = 0
