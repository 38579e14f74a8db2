"""The step path on a device never waits for it: from the step's begin to its stores, with every layer in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.capture.step_rows import DeviceRows
from lmcache_qprotocol.reasons import LossReason as Loss
from tests.worker_client.capture.no_host_sync import HostSyncError, no_host_sync
from tests.worker_client.capture.test_capture import LAYERS, Worker, query_of

ROWS = torch.arange(6.0)

PLANTED: dict[str, Callable[[], object]] = {
    "item": lambda: ROWS.sum().item(),
    "tolist": lambda: ROWS.tolist(),
    "numpy": lambda: ROWS.numpy(),
    "cpu": lambda: ROWS.cpu(),
    "nonzero": lambda: (ROWS > 1).nonzero(),
    "where without values": lambda: torch.where(ROWS > 1),
    "a mask": lambda: ROWS[ROWS > 1],
    "assignment by a mask": lambda: ROWS.clone().__setitem__(ROWS > 1, 0.0),
    "masked_select": lambda: ROWS.masked_select(ROWS > 1),
    "unique": lambda: torch.unique(ROWS),
    "if": lambda: 1 if (ROWS > 1).any() else 0,
    "int": lambda: int(ROWS[0]),
    "float": lambda: float(ROWS[0]),
    "as an index": lambda: [1, 2][ROWS.to(torch.int64)[0]],
    "equal": lambda: torch.equal(ROWS, ROWS),
    "repeat_interleave": lambda: torch.repeat_interleave(ROWS, torch.ones(6, dtype=torch.int64)),
}


@pytest.mark.parametrize("sync", PLANTED.values(), ids=PLANTED)
def test_the_guard_sees(sync: Callable[[], object]) -> None:
    sync()
    with pytest.raises(HostSyncError), no_host_sync():
        sync()


def as_on_a_device(worker: Worker) -> None:
    """The path that an engine on a GPU takes, on CPU tensors."""
    assert worker.capture.ring is not None
    worker.capture.ring._host_bits = None
    worker.capture._rows_kind = DeviceRows


class Batch:
    """One step's hooks with all tensors made beforehand, as the engine's lie on the device beforehand."""

    def __init__(self, worker: Worker, *parts: RequestStep) -> None:
        self.worker, self.parts = worker, parts
        tokens, slots = worker.batch(list(parts))
        self.slots = torch.from_numpy(slots)
        self.queries = [query_of(tokens, layer) for layer in range(LAYERS)]

    def run(self, *finished: FinishedRequest) -> list[FinishedChunk]:
        """The step, under the guard; returns what would be stored."""
        capture, adapter = self.worker.capture, self.worker.adapter
        sent: list[FinishedChunk] = []
        adapter.submit_q_store_request = sent.append  # type: ignore[method-assign,assignment]  # the server reads later
        try:
            with no_host_sync():
                capture.begin_step(StepMeta(self.parts, finished))
                for name, query in zip(self.worker.names, self.queries, strict=True):
                    capture.save_q_layer(name, query, self.slots)
                capture.batched_submit_qstore_requests(b"")
                capture.reclaim()
        finally:
            del adapter.submit_q_store_request
        for chunk in sent:
            adapter.submit_q_store_request(chunk)
        capture.reclaim()
        return sent


@pytest.fixture
def worker() -> Worker:
    """Chunk 8, block 4, pieces; requests a and b of 40 tokens."""
    worker = Worker(chunk=8, block=4, tails=True)
    as_on_a_device(worker)
    worker.add("a", 40)
    worker.add("b", 40)
    return worker


def test_prefill_decode_and_the_ends_of_requests(worker: Worker) -> None:
    assert len(Batch(worker, worker.part("a", 0, 21), worker.part("b", 0, 8)).run()) == 3
    for position in range(21, 25):
        Batch(worker, worker.part("a", position, position + 1)).run()
    step = Batch(worker, worker.part("b", 8, 11))
    assert len(step.run(FinishedRequest("a", 25))) == 1
    assert worker.check() == [
        ("a", 0, 8),
        ("a", 8, 16),
        ("b", 0, 8),
        ("a", 16, 24),
        ("a", 24, 25),
    ]
    assert worker.lost == {}


def test_a_request_that_is_computed_again(worker: Worker) -> None:
    """Drafts taken back and a resume clear stamps; that waits for nothing either."""
    drafts = worker.part("a", 0, 13)
    Batch(worker, drafts).run()
    again = worker.part("a", 10, 16)
    Batch(worker, again).run()
    assert worker.lost == {Loss.REJECTED_DRAFT: 3}
    assert worker.check() == [("a", 0, 8), ("a", 8, 16)]
    assert worker.all_free()


@pytest.mark.parametrize(
    "sync",
    [
        lambda rows: rows._ring_slots.sum().item(),
        lambda rows: rows._ring_slots[rows._ring_slots >= 0],
        lambda rows: rows._ring_slots.tolist(),
    ],
    ids=["item", "mask", "tolist"],
)
def test_planted_in_the_step_path_it_is_seen(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, sync: Callable[[DeviceRows], object]
) -> None:
    write = DeviceRows.write

    def waiting(self: DeviceRows, layer: int, query: torch.Tensor) -> None:
        sync(self)
        write(self, layer, query)

    monkeypatch.setattr(DeviceRows, "write", waiting)
    with pytest.raises(HostSyncError):
        Batch(worker, worker.part("a", 0, 8)).run()


def test_planted_in_the_ring_it_is_seen(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(self: QRingBuffer, ring_slots: torch.Tensor, stamps: torch.Tensor) -> None:
        kept = ring_slots >= 0
        self.flat_stamps[ring_slots[kept]] = stamps[kept]

    monkeypatch.setattr(QRingBuffer, "stamp", waiting)
    with pytest.raises(HostSyncError):
        Batch(worker, worker.part("a", 0, 8)).run()
