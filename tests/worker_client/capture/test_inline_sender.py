"""The thread that gathers ring blocks: what it reads, and when it has done with them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_qclient.capture.in_flight import verdict
from lmcache_qclient.capture.inline_sender import InlineSender, RingRows
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import RangeKey, StoreOutcome, StoreProof, StoreResult, UploadReply
from lmcache_qprotocol.reasons import LossReason
from tests.worker_client.link.fake_connection import FakeLink, connection_over

BLOCKS, BLOCK, LAYERS, HIDDEN = 8, 4, 3, 5
BLOCK_BYTES = LAYERS * BLOCK * HIDDEN * 4
STORED = StoreResult(b"", True, StoreOutcome(stored=1))


@pytest.fixture
def ring() -> QRingBuffer:
    """Every element unlike every other, and every stamp."""
    made = QRingBuffer(LAYERS, BLOCKS, BLOCK, HIDDEN, torch.float32)
    made.flat[:] = torch.arange(made.flat.numel(), dtype=torch.float32).view(made.flat.shape)
    made.flat_stamps[:] = torch.arange(len(made.flat_stamps))
    return made


def key(start: int, end: int) -> RangeKey:
    return RangeKey(model_name="m##query", world_size=1, worker_id=0, start=start, end=end)


@pytest.mark.parametrize("part", [1, 7, BLOCK_BYTES, BLOCK_BYTES + 3, 3 * BLOCK_BYTES])
def test_blocks_are_gathered_one_behind_the_other(ring: QRingBuffer, part: int) -> None:
    rows = RingRows(ring, (6, 1, 2), 21, 30)
    found = np.zeros(3 * BLOCK_BYTES, np.uint8)
    for offset in range(0, len(found), part):
        rows.gather(offset, found[offset : offset + part])
    blocks = ring.flat[:-1].view(BLOCKS, LAYERS, BLOCK, HIDDEN)[[6, 1, 2]]
    assert found.tobytes() == blocks.numpy().tobytes()


def test_stamps_are_those_of_the_rows_as_they_are_when_asked_for(ring: QRingBuffer) -> None:
    rows = RingRows(ring, (6, 1, 2), 21, 30)
    assert rows.stamps().tolist() == [25, 26, 27, 4, 5, 6, 7, 8, 9]
    ring.flat_stamps[26] = -1
    assert rows.stamps()[1] == -1


def sender_over(answer: Any, healthy: bool = True) -> tuple[InlineSender, FakeLink]:
    link = FakeLink(answer)
    return InlineSender(connection_over(link, 64), 5.0, lambda: healthy), link


def submit(sender: InlineSender, ring: QRingBuffer) -> Any:
    return sender.submit(key(0, 8), "w", StoreProof(nonces=(1,)), ring, (0, 1))


def answers(name: str, payloads: tuple[Any, ...]) -> Any:
    if name == "begin_upload_q":
        return UploadReply(upload_id=9, nbytes=2 * BLOCK_BYTES)
    return STORED if name == "end_upload_q" else "none"


def test_a_store_is_done_when_it_is_answered_and_not_before(ring: QRingBuffer) -> None:
    """While the thread reads the blocks, and until the server has said what became of them, they are not free."""
    go, asked = threading.Event(), threading.Event()

    def slow(name: str, payloads: tuple[Any, ...]) -> Any:
        if name == "upload_part_q":
            asked.set()
            assert go.wait(10)
        return answers(name, payloads)

    sender, link = sender_over(slow)
    future = submit(sender, ring)
    assert asked.wait(10)
    assert not future.done()
    go.set()
    assert future.result(10) == STORED
    assert [name for name, _ in link.sent][-1] == "end_upload_q"
    sender.close()
    sender.join()


def test_an_upload_that_was_given_up_is_a_failed_copy(ring: QRingBuffer) -> None:
    given_up = RequestError(ErrorCode.UNKNOWN_UPLOAD, "too late")
    sender, _ = sender_over(
        lambda name, payloads: given_up if name == "end_upload_q" else answers(name, payloads)
    )
    found = verdict(_done(submit(sender, ring)), True)
    assert (found.reason, found.copy_over) == (LossReason.COPY_FAILED, True)
    sender.close()


def _done(future: Any) -> Any:
    future.exception(10)
    return future


def test_a_lost_server_leaves_no_block_behind(ring: QRingBuffer) -> None:
    """Without an answer nobody knows what a server reads that has the ring; here it has none."""
    sender, _ = sender_over(lambda name, payloads: ConnectionError("gone"))
    future = _done(submit(sender, ring))
    assert verdict(future, True).copy_over
    assert verdict(future, True).reason is LossReason.SERVER_UNAVAILABLE
    assert not verdict(future).copy_over
    sender.close()


def test_nothing_is_sent_to_a_server_that_is_not_there(ring: QRingBuffer) -> None:
    sender, link = sender_over(answers, healthy=False)
    assert isinstance(_done(submit(sender, ring)).exception(), ConnectionError)
    assert link.sent == []
    sender.close()


def test_what_is_queued_at_the_end_fails(ring: QRingBuffer) -> None:
    go, begun = threading.Event(), threading.Event()

    def slow(name: str, payloads: tuple[Any, ...]) -> Any:
        begun.set()
        assert go.wait(10)
        return answers(name, payloads)

    sender, _ = sender_over(slow)
    first, second = submit(sender, ring), submit(sender, ring)
    assert begun.wait(10)
    sender.close()
    go.set()
    assert isinstance(_done(second).exception(), ConnectionError)
    assert _done(first).result() == STORED
    assert isinstance(_done(submit(sender, ring)).exception(), ConnectionError)
