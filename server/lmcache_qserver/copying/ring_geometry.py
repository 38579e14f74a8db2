"""Where rows and stamps lie in a ring's memory.

    byte 0                                          stamps_offset
    ├ rows: uint8 [num_blocks, block_bytes] ─┤ (gap) ├ stamps: int64 [num_blocks, block_size] ─┤ (anything)

A block is `[num_layers, block_size, hidden_dim]` elements, contiguous; to a copy it is `block_bytes` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RingDescription
from lmcache_qprotocol.stamps import STAMP_BYTES


@dataclass(frozen=True, slots=True)
class RingGeometry:
    """The bytes of a ring, free of what they mean."""

    num_blocks: int
    block_bytes: int
    block_size: int
    """Tokens of one block."""
    stamps_offset: int

    @classmethod
    def of(cls, description: RingDescription) -> RingGeometry:
        """The geometry that a worker described; nothing is checked yet."""
        return cls(
            num_blocks=description.num_blocks,
            block_bytes=description.block_size * description.layout.token_bytes,
            block_size=description.block_size,
            stamps_offset=description.stamps_offset,
        )

    @property
    def rows_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_blocks * self.block_bytes

    @property
    def stamps_bytes(self) -> int:
        """Bytes of all stamps."""
        return self.num_blocks * self.block_size * STAMP_BYTES

    def check(self, nbytes: int) -> None:
        """Call it before any view is made.

        Args:
            nbytes: bytes of the ring's memory.

        Raises:
            RequestError(ring_refused): rows and stamps overlap, are misaligned, or reach beyond the memory.
        """
        if self.stamps_offset % STAMP_BYTES:
            raise _refused(
                f"stamps_offset {self.stamps_offset} is no multiple of {STAMP_BYTES}: align the stamps"
            )
        if self.stamps_offset < self.rows_bytes:
            raise _refused(
                f"stamps at {self.stamps_offset} overlap the rows, which end at {self.rows_bytes}: "
                "put the stamps behind the rows"
            )
        if self.stamps_offset + self.stamps_bytes > nbytes:
            raise _refused(
                f"rows and stamps need {self.stamps_offset + self.stamps_bytes} bytes, the memory has {nbytes}: "
                "offer a larger one, or describe fewer blocks"
            )


def _refused(message: str) -> RequestError:
    return RequestError(ErrorCode.RING_REFUSED, message)
