"""Registers an instance out of its server's reach, uploads half of a chunk, says so, and waits to be killed.

`python -m tests.e2e.half_an_upload URL`
"""

from __future__ import annotations

import json
import signal
import sys

from lmcache_qprotocol.hashing import chunk_hashes
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import RangeKey, RingDescription, StoreProof
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT, BareClient


def main() -> None:
    """Do it."""
    with BareClient(sys.argv[1]) as client:
        hello = client.hello()
        description = RingDescription(
            layout=SMALL_LAYOUT,
            num_blocks=1,
            block_size=16,
            chunk_size=hello.chunk_size,
            ring_token=bytes(16),
            stamps_offset=0,
            kind="inline",
        )
        client.ask("register_q_cache", "half", (), "half", 1, "test", None, (), description)
        key = RangeKey(
            model_name="half##query",
            world_size=1,
            worker_id=0,
            end=hello.chunk_size,
            chunk_hashes=tuple(chunk_hashes(range(hello.chunk_size), hello.chunk_size)),
            layout_id=layout_id(SMALL_LAYOUT),
        )
        begun = client.ask("begin_upload_q", key, "half", StoreProof(nonces=(1,))).result
        part = bytes(min(hello.limits.bulk_bytes, begun.nbytes // 2))
        client.ask("upload_part_q", begun.upload_id, 0, memoryview(part))
        print(json.dumps({"nbytes": begun.nbytes, "upload_ms": hello.limits.upload_ms}), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
