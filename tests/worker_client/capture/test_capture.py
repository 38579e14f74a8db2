"""Capture from hooks to submitted chunks, over a real ring, with cases from the field (shared/cases.md)."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.capture import QRingBufferCapture
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.features.query import FEATURE as QUERY
from lmcache_qprotocol.hashing import HashChain, chunk_hash, chunk_hashes
from lmcache_qprotocol.reasons import LossReason as Loss
from lmcache_qprotocol.stamps import EMPTY, first_stamp
from tests.worker_client.capture.engine import Chances, Engine, SimRequest
from tests.worker_client.capture.fake_adapter import FakeAdapter
from tests.worker_client.capture.fake_vllm import (
    FullAttentionSpec,
    MambaSpec,
    cache_config,
    caches,
    group,
    layer_names,
    vllm_config,
)

LAYERS, HEADS, HEAD_DIM = 3, 2, 3


def query_of(tokens: np.ndarray, layer: int) -> torch.Tensor:
    """Q = f(token, layer, head, element), exact in float32; float32 `[rows, heads, head_dim]`."""
    head, element = np.arange(HEADS)[:, None], np.arange(HEAD_DIM)
    value = tokens[:, None, None] * 100 + layer * 20 + head * 5 + element
    return torch.from_numpy(value.astype(np.float32))


class Worker:
    """One capture; a batch brings requests' rows in random order, with padding.

    Request `name` has the tokens that `tokens[name]` says; its cache blocks are scattered.
    """

    def __init__(
        self,
        *,
        chunk: int = 256,
        block: int = 16,
        ring_blocks: int | None = None,
        seed: int = 1,
        tails: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.names = layer_names(LAYERS)
        self.adapter = FakeAdapter(chunk)
        self.block = block
        self.tokens: dict[str, np.ndarray] = {}
        self._tables: dict[str, list[int]] = {}
        self._free = self.random.sample(range(1, 9000), 8999)
        self._sent: dict[str, int] = {}
        self.capture = QRingBufferCapture(
            [(QUERY, cast(QRingBufferAdapter, self.adapter))],
            RingSettings(blocks=ring_blocks, tails=tails),
        )
        config = cache_config(group(FullAttentionSpec(block), self.names))
        self.capture.setup_q_ring(caches(self.names), config, vllm_config(block_size=block))

    def add(self, name: str, length: int) -> None:
        """A request with `length` tokens that no other has."""
        first = 1 + 2000 * len(self.tokens)
        self.tokens[name] = np.arange(first, first + length)

    def part(self, name: str, start: int, stop: int) -> RequestStep:
        """Positions [start, stop) of a request."""
        table = self._tables.setdefault(name, [])
        while len(table) * self.block < stop:
            table.append(self._free.pop())
        first = name not in self._sent
        sent = self._sent.get(name, 0)
        self._sent[name] = stop
        return RequestStep(
            name,
            start,
            stop - start,
            tuple(table[start // self.block : (stop - 1) // self.block + 1]),
            stop,
            tuple(int(token) for token in self.tokens[name][sent:stop]),
            first,
            tokens_from=sent,
        )

    def batch(self, parts: list[RequestStep]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and cache slots of the rows, in an order that is nobody's, padded."""
        rows = [
            (
                self.tokens[part.request_id][position],
                self._tables[part.request_id][position // self.block] * self.block
                + position % self.block,
            )
            for part in parts
            for position in range(part.start, part.start + part.count)
        ]
        rows += [(777777, -1)] * self.random.randint(0, 5)
        self.random.shuffle(rows)
        both = np.array(rows, dtype=np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def forward(self, parts: list[RequestStep], layers: list[int] | None = None) -> None:
        """The hooks of one forward pass, layers in the given order."""
        tokens, slots = self.batch(parts)
        padding = np.full(self.random.randint(0, 7), 888888)
        for layer in range(LAYERS) if layers is None else layers:
            query = query_of(np.concatenate([tokens, padding]), layer)
            self.capture.save_q_layer(self.names[layer], query, torch.from_numpy(slots))

    def step(
        self,
        *parts: RequestStep,
        finished: tuple[FinishedRequest, ...] = (),
        event: bytes | None = b"",
    ) -> None:
        """A whole step, stores answered at once."""
        self.capture.begin_step(StepMeta(parts, finished))
        self.forward(list(parts))
        self.capture.batched_submit_qstore_requests(event)
        self.capture.reclaim()

    def end(self, *names: str) -> None:
        """Requests end."""
        self.step(finished=tuple(FinishedRequest(name, len(self.tokens[name])) for name in names))

    def check(self) -> list[tuple[str, int, int]]:
        """Every stored chunk is exact. Returns (request, start, end) of each."""
        size = self.adapter.tokens_per_chunk
        for stored in self.adapter.stored:
            chunk, tokens = stored.chunk, self.tokens[stored.chunk.request_id]
            assert self.capture.ring is not None
            skip = chunk.start % self.capture.ring.block_size
            mine = slice(skip, skip + chunk.tokens)
            for layer in range(LAYERS):
                expected = query_of(tokens[chunk.start : chunk.end], layer)
                expected = expected.reshape(chunk.tokens, -1)
                assert np.array_equal(stored.rows[mine, layer], expected.numpy()), (chunk, layer)
            first = first_stamp(chunk.nonce, chunk.start)
            assert stored.stamps[mine].tolist() == list(range(first, first + chunk.tokens))
            base = chunk.start // size * size
            known = [int(token) for token in tokens[: chunk.end]]
            parent = [HashChain(size).root, *chunk_hashes(known[:base], size)][-1]
            assert chunk.chunk_hash == chunk_hash(parent, known[base:])
        account = self.adapter.account
        assert account.computed == account.captured + account.lost.total() + account.pending
        return [(s.chunk.request_id, s.chunk.start, s.chunk.end) for s in self.adapter.stored]

    @property
    def lost(self) -> dict[Loss, int]:
        """Counted losses without zeros."""
        return {reason: count for reason, count in self.adapter.account.lost.items() if count}

    def all_free(self) -> bool:
        """No ring block is held."""
        ring = self.capture.ring
        return ring is not None and ring.num_free_blocks() == ring.num_blocks


def test_c1_two_requests_in_a_batch_order_unlike_the_metadata() -> None:
    worker = Worker()
    worker.add("a", 300)
    worker.add("b", 520)
    worker.step(worker.part("a", 0, 300), worker.part("b", 0, 520))
    assert worker.check() == [("a", 0, 256), ("b", 0, 256), ("b", 256, 512)]
    worker.end("a", "b")
    assert worker.lost == {Loss.TAIL_OFF: 44 + 8}
    assert worker.all_free()


def test_c2_a_long_prompt_over_steps_then_decode_across_a_chunk_edge() -> None:
    worker = Worker()
    worker.add("a", 1030)
    for start in range(0, 1000, 300):
        worker.step(worker.part("a", start, min(1000, start + 300)))
    assert len(worker.check()) == 3
    for position in range(1000, 1030):
        worker.step(worker.part("a", position, position + 1))
    assert worker.check() == [("a", start, start + 256) for start in range(0, 1024, 256)]
    worker.end("a")
    assert worker.lost == {Loss.TAIL_OFF: 6}
    assert worker.all_free()


def test_c3_a_budget_that_is_no_multiple_of_the_chunk() -> None:
    worker = Worker()
    names = [f"r{number}" for number in range(8)]
    for name in names:
        worker.add(name, 500)
    done = dict.fromkeys(names, 0)
    while min(done.values()) < 500:
        left, parts = 128, []
        for name in worker.random.sample(names, 8):
            take = min(left, 500 - done[name], worker.random.randint(1, 128))
            if take > 0:
                parts.append(worker.part(name, done[name], done[name] + take))
                done[name] += take
                left -= take
        worker.step(*parts)
    assert sorted(worker.check()) == [(name, 0, 256) for name in names]
    worker.end(*names)
    assert worker.lost == {Loss.TAIL_OFF: 8 * 244}
    assert worker.adapter.account.computed == 4000
    assert worker.all_free()


@pytest.mark.parametrize("block", [528, 544, 1568, 1000, 7])
def test_c5_engine_blocks_that_do_not_divide_the_chunk(block: int) -> None:
    worker = Worker(block=block)
    worker.add("a", 1088)
    for start, stop in [(0, 300), (300, 545), (545, 1088)]:
        worker.step(worker.part("a", start, stop))
    assert len(worker.check()) == 4


def test_c19_block_size_one() -> None:
    worker = Worker(chunk=8, block=1)
    worker.add("a", 20)
    worker.step(worker.part("a", 0, 5))
    worker.step(worker.part("a", 5, 20))
    assert worker.check() == [("a", 0, 8), ("a", 8, 16)]
    assert worker.capture.ring is not None
    assert worker.capture.ring.block_size == 1


@pytest.mark.parametrize(("length", "chunks"), [(255, 0), (256, 1), (257, 1), (512, 2), (513, 2)])
def test_c35_one_more_and_one_less_than_a_chunk(length: int, chunks: int) -> None:
    worker = Worker()
    worker.add("a", length)
    worker.step(worker.part("a", 0, length))
    assert len(worker.check()) == chunks
    worker.end("a")
    assert worker.lost.get(Loss.TAIL_OFF, 0) == length - 256 * chunks
    assert worker.all_free()


# --- steps that go wrong --------------------------------------------------------------------------


@pytest.fixture
def worker() -> Worker:
    """Chunk 8, block 4; requests a and b of 40 tokens."""
    worker = Worker(chunk=8, block=4)
    worker.add("a", 40)
    worker.add("b", 40)
    return worker


def goes_on(worker: Worker) -> None:
    """The step after the wrong one is captured as ever."""
    before = len(worker.adapter.stored)
    worker.step(worker.part("a", 8, 16))
    assert worker.check()[before:] == [("a", 8, 16)]


def test_a_missing_layer_costs_the_step(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    worker.forward([part], layers=[0, 2])
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == []
    assert worker.lost == {Loss.LAYER_MISSING: 8}
    assert worker.all_free()
    goes_on(worker)


def test_a_layer_that_comes_twice_costs_the_step(worker: Worker) -> None:
    """As in a forward pass that is cut into two: nobody knows which of both brought the step's rows."""
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    worker.forward([part], layers=[0, 1, 2, 2])
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == []
    assert worker.lost == {Loss.LAYER_MISSING: 8}
    goes_on(worker)


def test_later_layers_may_take_the_short_way(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    assert worker.capture.layer_sink() is None, "the first layer has to find the rows"
    tokens, slots = worker.batch([part])
    for layer, name in enumerate(worker.names):
        sink = worker.capture.layer_sink()
        if sink is None:
            worker.capture.save_q_layer(name, query_of(tokens, layer), torch.from_numpy(slots))
        else:
            sink(name, {"q": query_of(tokens, layer)})
            sink("draft.layers.0.attn", {"q": torch.ones(8, 1, 1)})
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == [("a", 0, 8)]
    assert worker.capture.layer_sink() is None, "the step is over"


def test_what_comes_by_the_short_way_after_a_step_was_given_up_is_not_stored(
    worker: Worker,
) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    tokens, slots = worker.batch([part])
    worker.capture.save_q_layer(worker.names[0], query_of(tokens, 0), torch.from_numpy(slots))
    sink = worker.capture.layer_sink()
    assert sink is not None
    worker.capture.give_up_step(Loss.CAPTURE_DISABLED)
    for layer in (1, 2):
        sink(worker.names[layer], {"q": query_of(tokens, layer)})
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == []
    assert worker.lost == {Loss.CAPTURE_DISABLED: 8}
    assert worker.all_free()
    goes_on(worker)


def test_no_hook_at_all_costs_the_step(worker: Worker) -> None:
    worker.capture.begin_step(StepMeta((worker.part("a", 0, 8),)))
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.lost == {Loss.LAYER_MISSING: 8}
    goes_on(worker)


def test_no_slot_mapping_costs_the_step(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    for layer, name in enumerate(worker.names):
        worker.capture.save_q_layer(name, query_of(worker.tokens["a"][:8], layer), None)
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.lost == {Loss.LAYER_MISSING: 8}
    goes_on(worker)


def test_without_an_event_every_block_goes_back_and_is_counted(worker: Worker) -> None:
    worker.step(worker.part("a", 0, 8), worker.part("b", 0, 5), event=None)
    assert worker.check() == []
    assert worker.lost == {Loss.CAPTURE_DISABLED: 13}
    assert worker.all_free()
    goes_on(worker)


def test_a_step_given_up_in_the_middle_of_the_forward(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    worker.forward([part], layers=[0])
    worker.capture.give_up_step(Loss.CAPTURE_DISABLED)
    worker.forward([part], layers=[1, 2])
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == []
    assert worker.lost == {Loss.CAPTURE_DISABLED: 8}
    assert worker.all_free()
    goes_on(worker)


def test_rows_of_another_width_raise_before_anything_is_handed_out(worker: Worker) -> None:
    worker.capture.begin_step(StepMeta((worker.part("a", 0, 8),)))
    with pytest.raises(ValueError, match="head count"):
        worker.capture.save_q_layer(worker.names[0], torch.ones(8, 2, 4), torch.arange(8))


def test_a_step_that_was_never_closed_does_not_leak_into_the_next(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    worker.forward([part])
    worker.step(worker.part("b", 0, 8))
    assert worker.check() == [("b", 0, 8)]
    assert worker.lost == {Loss.LAYER_MISSING: 8}
    goes_on(worker)


def test_the_plan_is_consumed(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.step(part)
    assert worker.capture.ring is not None
    before = worker.capture.ring.flat.clone()
    real, worker.tokens["a"] = worker.tokens["a"], worker.tokens["a"] + 9
    worker.forward([part])  # a forward that no step announced: a dummy run
    worker.tokens["a"] = real
    worker.capture.batched_submit_qstore_requests(b"")
    assert torch.equal(worker.capture.ring.flat, before)
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == [("a", 0, 8)]
    goes_on(worker)


def test_a_block_given_to_another_chunk_has_no_stamps_before_its_rows(worker: Worker) -> None:
    worker.step(worker.part("a", 0, 8))
    assert worker.capture.ring is not None
    stamps = worker.capture.ring.flat_stamps[:8]
    assert (stamps >= 0).all(), "the last owner's"
    part = worker.part("b", 0, 5)
    worker.capture.begin_step(StepMeta((part,)))
    assert (stamps == EMPTY).all()
    worker.forward([part])
    assert (stamps == EMPTY).all(), "the stamp comes after the last layer"
    worker.capture.batched_submit_qstore_requests(b"")
    assert (stamps[:5] >= 0).all()
    assert (stamps[5:] == EMPTY).all()


def test_one_request_whose_rows_are_elsewhere_does_not_hurt_the_other(worker: Worker) -> None:
    worker.step(worker.part("a", 0, 3), worker.part("b", 0, 3))
    parts = [worker.part("a", 3, 8), worker.part("b", 3, 8)]
    worker.capture.begin_step(StepMeta(tuple(parts)))
    worker.forward(parts[:1])
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == [("a", 0, 8)]
    assert worker.lost == {Loss.UNMATCHED: 8}
    goes_on(worker)


def test_a_query_shorter_than_the_rows_it_must_bring(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    _, slots = worker.batch([part])
    mapping = torch.from_numpy(slots)
    worker.capture.save_q_layer(worker.names[0], torch.ones(len(slots), HEADS, HEAD_DIM), mapping)
    with pytest.raises(ValueError, match="rows"):
        worker.capture.save_q_layer(worker.names[1], torch.ones(3, HEADS, HEAD_DIM), mapping)


def test_a_first_query_shorter_than_the_mapping_leaves_the_request_out(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    mapping = torch.from_numpy(worker.batch([part])[1])
    for name in worker.names:
        worker.capture.save_q_layer(name, torch.ones(3, HEADS, HEAD_DIM), mapping)
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == []
    assert worker.lost == {Loss.UNMATCHED: 8}


def test_layers_in_another_order_each_step(worker: Worker) -> None:
    for (start, stop), order in zip([(0, 5), (5, 16)], [[2, 0, 1], [1, 2, 0]], strict=True):
        part = worker.part("a", start, stop)
        worker.capture.begin_step(StepMeta((part,)))
        worker.forward([part], layers=order)
        worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == [("a", 0, 8), ("a", 8, 16)]


def test_a_layer_that_is_not_ours_is_ignored(worker: Worker) -> None:
    part = worker.part("a", 0, 8)
    worker.capture.begin_step(StepMeta((part,)))
    worker.capture.save_q_layer("draft.layers.0.attn", torch.ones(8, 1, 1), torch.arange(8))
    worker.forward([part])
    worker.capture.batched_submit_qstore_requests(b"")
    assert worker.check() == [("a", 0, 8)]


def test_shutdown_counts_all_and_leaves(worker: Worker) -> None:
    worker.step(worker.part("a", 0, 5))
    worker.capture.begin_step(StepMeta((worker.part("b", 0, 5),)))
    worker.capture.shutdown()
    assert worker.lost == {Loss.TAIL_OFF: 5, Loss.CAPTURE_DISABLED: 5}
    assert worker.adapter.account.pending == 0
    assert worker.adapter.calls[-1] == "shutdown_q_ring"
    assert worker.capture.ring is not None
    assert worker.capture.ring.memory is not None
    assert worker.capture.ring.memory.fd == -1


def test_no_attention_layer_captures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    adapter = FakeAdapter(8)
    capture = QRingBufferCapture([(QUERY, cast(QRingBufferAdapter, adapter))], RingSettings())
    capture.setup_q_ring({}, cache_config(), vllm_config())
    assert "no attention layer" in caplog.text
    assert adapter.ring is None
    capture.begin_step(StepMeta((RequestStep("a", 0, 8, (1,), 8, (), True),)))
    capture.save_q_layer("x", torch.ones(1, 6), torch.arange(1))
    capture.batched_submit_qstore_requests(b"")
    capture.shutdown()
    assert adapter.account.computed == 0


@pytest.mark.parametrize(("ring_blocks", "warned"), [(1, True), (2, False)])
def test_a_ring_smaller_than_a_chunk_is_told_at_start(
    caplog: pytest.LogCaptureFixture, ring_blocks: int, warned: bool
) -> None:
    adapter = FakeAdapter(8)
    capture = QRingBufferCapture(
        [(QUERY, cast(QRingBufferAdapter, adapter))], RingSettings(blocks=ring_blocks)
    )
    names = layer_names(1)
    config = cache_config(group(FullAttentionSpec(4), names))
    capture.setup_q_ring(caches(names), config, vllm_config(block_size=4))
    assert ("smaller than one chunk" in caplog.text) is warned
    assert "nothing can be stored" not in caplog.text  # a piece that fits is stored
    capture.shutdown()


def test_layers_in_no_cache_group_are_told_at_start(caplog: pytest.LogCaptureFixture) -> None:
    adapter = FakeAdapter(8)
    capture = QRingBufferCapture(
        [(QUERY, cast(QRingBufferAdapter, adapter))], RingSettings(blocks=2)
    )
    names = layer_names(3)
    config = cache_config(group(FullAttentionSpec(4), names[:2]))
    capture.setup_q_ring(caches(names), config, vllm_config(block_size=4))
    (record,) = caplog.records
    assert names[2] in record.getMessage()
    assert names[1] not in record.getMessage()
    assert adapter.layout is not None
    assert adapter.layout.layer_ids == (0, 1)
    capture.shutdown()


def test_an_engine_whose_cache_is_elsewhere_is_refused() -> None:
    capture = QRingBufferCapture(
        [(QUERY, cast(QRingBufferAdapter, FakeAdapter(8)))], RingSettings()
    )
    names = layer_names(1)
    config: Any = cache_config(group(FullAttentionSpec(4), names))
    with pytest.raises(NotImplementedError, match="transfer_intermediate_tensors"):
        capture.setup_q_ring(caches(names, "meta"), config, vllm_config())


def test_a_gpu_is_refused_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda", 1)
    with pytest.raises(NotImplementedError, match="allow_untested_gpu"):
        QRingBufferCapture((), RingSettings())._check_device(cuda)
    asked = QRingBufferCapture((), RingSettings(allow_untested_gpu=True))
    asked._check_device(cuda)
    assert "never been tried" in caplog.text
    with pytest.raises(NotImplementedError):
        asked._check_device(torch.device("xpu"))


class FakeDeviceMemory:
    """Says when its event is recorded."""

    event_handle = b"e" * 64

    def __init__(self, ring: QRingBuffer) -> None:
        self.ring = ring
        self.recorded: list[list[int]] = []
        self.closed = False

    def record_event(self, stream: int) -> None:
        self.recorded.append(self.ring.flat_stamps[:4].tolist())

    def close(self) -> None:
        self.closed = True


def test_the_event_is_recorded_behind_the_stamps_once_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    worker = Worker(chunk=4, block=4)
    ring = worker.capture.ring
    assert ring is not None
    memory = FakeDeviceMemory(ring)
    ring.device_memory = cast(Any, memory)
    worker.add("a", 4)
    worker.step(worker.part("a", 0, 4))
    assert len(memory.recorded) == 1
    assert EMPTY not in memory.recorded[0]


@pytest.mark.parametrize("let_go", [True, False])
def test_device_memory_is_freed_only_when_the_server_has_let_go(
    monkeypatch: pytest.MonkeyPatch, let_go: bool
) -> None:
    worker = Worker(chunk=4, block=4)
    ring = worker.capture.ring
    assert ring is not None
    memory = FakeDeviceMemory(ring)
    ring.device_memory = cast(Any, memory)
    monkeypatch.setattr(worker.adapter, "shutdown_q_ring", lambda: let_go)
    worker.capture.shutdown()
    assert memory.closed is let_go
    assert hasattr(ring, "flat") is not let_go


# --- the toy engine over the real ring ------------------------------------------------------------


def _number(row: tuple[int, ...]) -> int:
    """Another number for every sequence of up to nine tokens, nearly so for longer ones; below 160,000."""
    value = 0
    for token in row:
        value = (value * 31 + token + 1) % 159979
    return value


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1 << 32), st.sampled_from([(8, 4), (6, 4), (4, 1)]), st.sampled_from([3, 100])
)
def test_whatever_the_engine_does_a_stored_row_is_right(
    seed: int, sizes: tuple[int, int], ring_blocks: int
) -> None:
    random = Random(seed)
    worker = Worker(chunk=sizes[0], block=sizes[1], ring_blocks=ring_blocks)
    chances = Chances(preempt=0.1, abort=0.02, drafts=0.4, prefix_hit=0.3, stop_early=0.05)
    engine = Engine(random, block_size=sizes[1], budget=9, max_running=3, chances=chances)
    owners: dict[str, SimRequest] = {
        f"r{number}": engine.add(f"r{number}", random.randint(1, 25), 15) for number in range(5)
    }
    while engine.busy:
        step = engine.step()
        worker.capture.begin_step(step.meta)
        items = [*step.rows.items(), (-1, (5,))]
        random.shuffle(items)
        slots = torch.tensor([slot for slot, _ in items])
        tokens = np.array([_number(row) for _, row in items])
        for layer in random.sample(range(LAYERS), LAYERS):
            worker.capture.save_q_layer(worker.names[layer], query_of(tokens, layer), slots)
        worker.capture.batched_submit_qstore_requests(b"")
        worker.capture.reclaim()
    for stored in worker.adapter.stored:
        chunk, owner = stored.chunk, owners[stored.chunk.request_id]
        rows = np.array([_number(owner.row(p)) for p in range(chunk.start, chunk.end)])
        for layer in range(LAYERS):
            expected = query_of(rows, layer).reshape(len(rows), -1).numpy()
            assert np.array_equal(stored.rows[:, layer], expected)
        first = first_stamp(chunk.nonce, chunk.start)
        assert stored.stamps.tolist() == list(range(first, first + chunk.tokens))
    worker.capture.shutdown()
    worker.adapter.reclaim_finished_q_stores()
    assert worker.adapter.account.pending == 0


@pytest.mark.parametrize("length", [255, 256, 257, 513])
def test_c35_with_pieces_every_row_of_an_odd_length_is_stored(length: int) -> None:
    worker = Worker(tails=True)
    worker.add("a", length)
    worker.step(worker.part("a", 0, length))
    worker.end("a")
    edges = [*range(0, length, 256), length]
    assert worker.check() == [("a", *edge) for edge in pairwise(edges)]
    assert worker.lost == {}
    assert worker.all_free()


def test_a_pipeline_stage_without_a_layer_to_store_is_refused() -> None:
    """A reader would wait for it for ever; where there is one stage, there is nothing to wait for."""
    names = layer_names(2)
    adapter = cast(QRingBufferAdapter, FakeAdapter(256))
    capture = QRingBufferCapture([(QUERY, adapter)], RingSettings())
    groups = cache_config(group(MambaSpec(16), names))
    capture.setup_q_ring(caches(names), groups, vllm_config())
    assert capture.tracks == ()
    with pytest.raises(NotImplementedError, match="fewer stages"):
        capture.setup_q_ring(caches(names), groups, vllm_config(pp=2))
