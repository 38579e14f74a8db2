"""An upload's order, sizes and buffers, without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmcache_qclient.link.upload import PARTS_UNDER_WAY, Bytes, Payload, Uploader
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import (
    RangeKey,
    StoreOutcome,
    StoreProof,
    StoreResult,
    UploadReply,
)
from tests.worker_client.link.fake_connection import FakeLink, connection_over

BULK = 1000
CONTENT = np.random.default_rng(1).integers(0, 256, 10 * BULK - 300, dtype=np.uint8)
STORED = StoreResult(b"", True, StoreOutcome(stored=1))


class Reads:
    """What an upload reads, and in which order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        key = RangeKey(model_name="m##query", world_size=1, worker_id=0, end=4)
        self.payload = Payload(key, "w", StoreProof(nonces=(1,)), self.gather, self.stamps)

    def gather(self, offset: int, out: Bytes) -> None:
        self.order.append("rows")
        out[:] = CONTENT[offset : offset + len(out)]

    def stamps(self) -> npt.NDArray[np.int64]:
        self.order.append("stamps")
        return np.arange(4, dtype=np.int64) + (1 << 32)


def answers(name: str, payloads: tuple[Any, ...]) -> Any:
    if name == "begin_upload_q":
        return UploadReply(upload_id=9, nbytes=len(CONTENT))
    return STORED if name == "end_upload_q" else "none"


def test_rows_go_in_parts_and_stamps_last() -> None:
    link, reads = FakeLink(answers), Reads()
    assert Uploader(connection_over(link, BULK), 1.0).upload(reads.payload) == STORED
    assert reads.order == ["rows"] * 10 + ["stamps"]
    parts = [payloads for name, payloads in link.sent if name == "upload_part_q"]
    assert [(upload, offset) for upload, offset, _ in parts] == [(9, BULK * i) for i in range(10)]
    assert max(len(part) for *_, part in parts) == BULK
    assert b"".join(part for *_, part in parts) == CONTENT.tobytes()
    name, (upload, stamps) = link.sent[-1]
    assert (name, upload) == ("end_upload_q", 9)
    assert stamps == b"".join((i + (1 << 32)).to_bytes(8, "little") for i in range(4))


def test_what_is_stored_already_is_neither_read_nor_sent() -> None:
    duplicate = StoreResult(b"", True, StoreOutcome(duplicate=1))
    link, reads = FakeLink(lambda name, payloads: UploadReply(result=duplicate)), Reads()
    assert Uploader(connection_over(link, BULK), 1.0).upload(reads.payload) == duplicate
    assert reads.order == []
    assert [name for name, _ in link.sent] == ["begin_upload_q"]


def test_no_more_than_some_parts_wait_for_their_answers() -> None:
    """The first answer that does not come in time ends it; until then so many parts were sent, and no more."""
    link, reads = (
        FakeLink(lambda name, payloads: answers(name, payloads) if name[0] == "b" else None),
        Reads(),
    )
    with pytest.raises(ConnectionError, match="part of an upload"):
        Uploader(connection_over(link, BULK), 0.01).upload(reads.payload)
    assert link.most_open == PARTS_UNDER_WAY
    assert reads.order == ["rows"] * PARTS_UNDER_WAY


def test_a_buffer_of_a_failed_upload_is_not_written_again() -> None:
    """ZeroMQ may still read it, and the server take what it finds there for the part that was sent."""
    seen: list[Bytes] = []
    fails = True

    def answer(name: str, payloads: tuple[Any, ...]) -> Any:
        if name == "upload_part_q" and fails:
            return RequestError(ErrorCode.UNKNOWN_UPLOAD, "given up")
        return answers(name, payloads)

    class Watched(Reads):
        def gather(self, offset: int, out: Bytes) -> None:
            super().gather(offset, out)
            seen.append(out)

    link = FakeLink(answer)
    uploader = Uploader(connection_over(link, BULK), 1.0)
    with pytest.raises(RequestError):
        uploader.upload(Watched().payload)
    failed = {one.ctypes.data for one in seen}
    kept = list(seen)  # so that no new buffer gets the memory of an old one
    seen.clear()
    fails = False
    uploader.upload(Watched().payload)
    assert not failed & {one.ctypes.data for one in seen}
    again = {one.ctypes.data for one in seen}
    seen.clear()
    uploader.upload(Watched().payload)
    assert {one.ctypes.data for one in seen} == again, "buffers of answered parts are used again"
    assert kept
