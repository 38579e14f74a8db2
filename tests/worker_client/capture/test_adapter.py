"""The adapter over a fake connection and a heartbeat that the test plays: who owns a ring block, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch

from lmcache_qclient.capture import adapter as adapter_module
from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.connection import Connection
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.layout import Layout, layout_id
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import DeviceMemory, HelloReply, StoreOutcome, StoreResult
from lmcache_qprotocol.operations import REGISTER_Q_CACHE, STORE_Q, UNREGISTER_Q_CACHE, Operation
from lmcache_qprotocol.reasons import LossReason as Loss

HASH = bytes(range(32))
LAYOUT = Layout(
    feature="transfer_query",
    layer_ids=(0, 1),
    first_head=0,
    num_heads=2,
    total_heads=2,
    head_dim=3,
    dtype="float32",
)


def hello(chunk_size: int = 8) -> HelloReply:
    return HelloReply(
        protocol_version=1,
        boot_id=b"b" * 16,
        session=b"s" * 16,
        features=("transfer_query",),
        chunk_size=chunk_size,
        limits=Limits(),
    )


class FakeLink:
    """Keeps what is sent; the test completes the futures."""

    def __init__(self) -> None:
        self.calls: list[tuple[Operation, Any, float]] = []
        self.sent: list[tuple[Operation, Any]] = []
        self.futures: list[ReplyFuture] = []
        self.answer: Exception | None = None
        self.is_alive: Callable[[], bool] = lambda: True
        self.refuse: Exception | None = None

    def call(
        self,
        operation: Operation,
        payloads: Any,
        timeout_s: float,
        is_alive: Callable[[], bool],
    ) -> None:
        self.calls.append((operation, payloads, timeout_s))
        assert is_alive == self.is_alive, "who waits for an answer learns that the server has died"
        if self.answer is not None:
            raise self.answer

    def submit(self, operation: Operation, payloads: Any) -> ReplyFuture:
        if self.refuse is not None:
            raise self.refuse
        self.sent.append((operation, payloads))
        self.futures.append(ReplyFuture(b"uid"))
        return self.futures[-1]


class FakeLifeline:
    """`open` and `hung_up` differ when the client itself has closed it."""

    def __init__(self) -> None:
        self.open = True
        self.hung_up = False
        self.offers: list[tuple[int, int]] = []

    def is_open(self) -> bool:
        return self.open and not self.hung_up

    def offer_ring(self, fd: int, nbytes: int) -> bytes:
        self.offers.append((fd, nbytes))
        return b"token 16 bytes.."


class FakeConnection:
    def __init__(self) -> None:
        self.link = FakeLink()
        self.lifeline: FakeLifeline | None = FakeLifeline()
        self.hello = hello()
        self.transport = "shm"
        self.no_lifeline_because = "the socket is not there"
        self.closed = False
        self.link.is_alive = self.is_alive

    def is_alive(self) -> bool:
        return self.lifeline is None or self.lifeline.is_open()

    def close(self) -> None:
        self.closed = True


class FakeHeartbeat:
    """Plays the heartbeat's thread when the test says so."""

    def __init__(
        self,
        connection: FakeConnection,
        *,
        interval_s: float,
        on_lost: Callable[[], None],
        on_restored: Callable[[HelloReply], None],
        ping_payloads: Callable[[], tuple[Any, ...]],
    ) -> None:
        self.interval_s = interval_s
        self.on_lost, self.on_restored, self.ping_payloads = on_lost, on_restored, ping_payloads
        self.healthy = True
        self.started = self.stopped = False
        self.asked = 0

    def beat_now(self) -> None:
        self.asked += 1

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        self.stopped = True


class Bench:
    """An adapter over a ring of 8 blocks of 4 tokens; chunk 8."""

    def __init__(self) -> None:
        self.connection = FakeConnection()
        self.adapter = QRingBufferAdapter(
            cast(Connection, self.connection),
            instance_id="worker",
            model_name="org/model",
            world_size=2,
            rank=1,
            account=Account(),
            timeout_s=3.0,
        )
        self.heartbeat = cast(FakeHeartbeat, self.adapter._heartbeat)
        self.ring = QRingBuffer(2, 8, 4, 6, torch.float32)
        self.nonce = 10

    def register(self) -> Bench:
        """The usual start."""
        self.adapter.establish_transfer_context(4)
        self.adapter.register_q_ring(self.ring, LAYOUT)
        return self

    def submit(self, **more: Any) -> int | None:
        """A chunk of 8 tokens in two blocks of the ring."""
        blocks = self.ring.allocate(2)
        assert blocks is not None
        self.nonce += 1
        tally = self.adapter.account.request("r")
        tally.compute(8)
        options: dict[str, Any] = {"request_id": "r", "cache_salt": "salt", **more}
        chunk = FinishedChunk(
            start=16,
            end=24,
            chunk_hash=HASH,
            blocks=tuple(blocks),
            nonce=self.nonce,
            tally=tally,
            **options,
        )
        return self.adapter.submit_q_store_request(chunk)

    def lose(self, error: Exception | None = None) -> None:
        """The heartbeat finds the server gone: unhealthy, all futures fail, `on_lost`."""
        self.heartbeat.healthy = False
        for future in self.connection.link.futures:
            if not future.done():
                future.set_exception(error or ConnectionError("lost the server"))
        self.heartbeat.on_lost()

    def restore(self, chunk_size: int = 8) -> None:
        """The heartbeat has renewed the connection."""
        self.connection.lifeline = FakeLifeline()
        self.heartbeat.on_restored(hello(chunk_size))
        self.heartbeat.healthy = True

    @property
    def free(self) -> int:
        """Free ring blocks."""
        return self.ring.num_free_blocks()

    @property
    def lost(self) -> dict[Loss, int]:
        """Counted losses."""
        return dict(self.adapter.account.lost)


@pytest.fixture(autouse=True)
def _fake_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "Heartbeat", FakeHeartbeat)


@pytest.fixture
def bench() -> Bench:
    """Not registered."""
    return Bench()


# --- registering ----------------------------------------------------------------------------------


def test_a_ring_needs_a_transfer_context(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="register KV caches first"):
        bench.adapter.register_q_ring(bench.ring, LAYOUT)


def test_the_block_size_is_tokens_per_chunk_over_blocks_in_chunk(bench: Bench) -> None:
    context = bench.adapter.establish_transfer_context(2)
    assert (context.tokens_per_chunk, context.blocks_in_chunk) == (8, 4)
    with pytest.raises(ValueError, match="block size"):
        bench.adapter.register_q_ring(bench.ring, LAYOUT)
    assert bench.connection.link.calls == []


def test_registering_describes_the_ring_that_went_over_the_lifeline(bench: Bench) -> None:
    bench.register()
    ((operation, payloads, timeout_s),) = bench.connection.link.calls
    assert operation is REGISTER_Q_CACHE
    assert timeout_s == 3.0
    assert payloads[:4] == ("worker", (), "org/model", 2)
    description = payloads[-1]
    assert (description.num_blocks, description.block_size, description.chunk_size) == (8, 4, 8)
    assert description.layout == LAYOUT
    assert description.ring_token == b"token 16 bytes.."
    assert description.stamps_offset == bench.ring.stamps_offset
    assert bench.connection.lifeline is not None
    assert bench.ring.memory is not None
    assert bench.connection.lifeline.offers == [(bench.ring.memory.fd, bench.ring.nbytes)]


class FakeDeviceMemory:
    """What the adapter needs of a ring on a device."""

    uuid, handle, event_handle, nbytes = b"u" * 16, b"h" * 64, b"e" * 64, 4096


def test_a_ring_on_a_device_goes_by_handle_and_its_stores_name_the_event(bench: Bench) -> None:
    bench.ring.memory = None
    bench.ring.device_memory = cast(Any, FakeDeviceMemory())
    bench.register()
    _, payloads, _ = bench.connection.link.calls[-1]
    description = payloads[-1]
    assert (description.kind, len(description.ring_token)) == ("cuda", 16)
    assert description.device == DeviceMemory(uuid=b"u" * 16, handle=b"h" * 64, nbytes=4096)
    assert bench.connection.lifeline is not None
    assert bench.connection.lifeline.offers == []
    bench.submit()
    _, (_, _, _, event, _) = bench.connection.link.sent[-1]
    assert event == b"e" * 64
    bench.connection.lifeline = None
    with pytest.raises(ConnectionError, match="lifeline"):
        bench.adapter.reregister_q_ring()


def test_without_a_lifeline_it_says_what_to_do(bench: Bench) -> None:
    bench.connection.lifeline = None
    with pytest.raises(ConnectionError, match="mount"):
        bench.register()


@pytest.mark.parametrize(
    "error", [ConnectionError("no answer"), RequestError(ErrorCode.RING_REFUSED, "no")]
)
def test_a_registration_that_fails_is_told(bench: Bench, error: Exception) -> None:
    bench.connection.link.answer = error
    with pytest.raises(type(error)):
        bench.register()


def test_reregistering_without_a_ring_is_nothing(bench: Bench) -> None:
    bench.adapter.reregister_q_ring()
    bench.restore()
    assert bench.connection.link.calls == []


# --- storing --------------------------------------------------------------------------------------


def test_a_store_names_key_blocks_and_nonce(bench: Bench) -> None:
    bench.register()
    assert not bench.heartbeat.started
    assert bench.submit() == 0
    assert bench.heartbeat.started
    ((operation, payloads),) = bench.connection.link.sent
    key, instance, groups, event, proof = payloads
    assert operation is STORE_Q
    assert (key.model_name, key.world_size, key.worker_id) == ("org/model##query", 2, 1)
    assert (key.start, key.end, key.chunk_hashes) == (16, 24, (HASH,))
    assert (key.cache_salt, key.layout_id, key.request_id) == ("salt", layout_id(LAYOUT), "r")
    assert (instance, groups, event, proof.nonces) == ("worker", ((0, 1),), b"", (11,))
    assert bench.submit() == 1, "sequence numbers count up"
    assert bench.adapter.stores_under_way == 2
    assert bench.adapter.account.pending == 16


def test_a_request_id_longer_than_the_wire_takes_is_cut(bench: Bench) -> None:
    bench.register().submit(request_id="x" * 5000)
    assert len(bench.connection.link.sent[0][1][0].request_id) == 512


REFUSED = StoreOutcome(refused={Loss.POOL_FULL: 1}, message="full")
ENDS = [
    (StoreResult(b"", True, StoreOutcome(stored=1)), None),
    (StoreResult(b"", True, StoreOutcome(duplicate=1)), None),
    (StoreResult(b"", True), None),
    (StoreResult(b"", False, REFUSED), Loss.POOL_FULL),
    (StoreResult(b"", False), Loss.COPY_FAILED),
    (StoreResult(b"", False, StoreOutcome()), Loss.COPY_FAILED),
    (RequestError(ErrorCode.UNKNOWN_INSTANCE, "who?"), Loss.SERVER_UNAVAILABLE),
]


@pytest.mark.parametrize(("end", "reason"), ENDS)
def test_an_answer_gives_the_blocks_back_at_once_and_counts(
    bench: Bench, end: StoreResult | Exception, reason: Loss | None
) -> None:
    bench.register().submit()
    assert bench.adapter.reclaim_finished_q_stores() == 0
    assert bench.free == 6, "no answer yet"
    (future,) = bench.connection.link.futures
    if isinstance(end, Exception):
        future.set_exception(end)
    else:
        future.set_result(end)
    assert bench.adapter.reclaim_finished_q_stores() == 1
    assert bench.free == 8
    assert bench.adapter.account.captured == (8 if reason is None else 0)
    assert bench.lost == ({} if reason is None else {reason: 8})
    assert bench.adapter.account.pending == 0
    assert bench.adapter.reclaim_finished_q_stores() == 0


def test_a_server_that_does_not_know_us_is_pinged_at_once(bench: Bench) -> None:
    """The ping is answered with false, and the heartbeat registers again: not only when the next ping is due."""
    bench.register()
    for error in (RequestError(ErrorCode.BUSY, "later"), ConnectionError("gone")):
        bench.submit()
        bench.connection.link.futures[-1].set_exception(error)
    bench.adapter.reclaim_finished_q_stores()
    assert bench.heartbeat.asked == 0
    bench.submit()
    bench.connection.link.futures[-1].set_exception(RequestError(ErrorCode.UNKNOWN_INSTANCE, "?"))
    bench.adapter.reclaim_finished_q_stores()
    assert bench.heartbeat.asked == 1


def test_stores_end_in_any_order(bench: Bench) -> None:
    bench.register()
    for _ in range(3):
        bench.submit()
    bench.connection.link.futures[1].set_result(StoreResult(b"", True))
    assert bench.adapter.reclaim_finished_q_stores() == 1
    assert bench.ring.allocate(4) == [2, 3, 6, 7]
    assert bench.adapter.stores_under_way == 2


def test_a_refusal_is_logged_once_a_reason(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.register()
    for _ in range(3):
        bench.submit()
        bench.connection.link.futures[-1].set_result(StoreResult(b"", False, REFUSED))
        bench.adapter.reclaim_finished_q_stores()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pool_full" in caplog.text


def test_unhealthy_gives_the_blocks_straight_back(bench: Bench) -> None:
    bench.register()
    bench.heartbeat.healthy = False
    assert bench.submit() is None
    assert bench.free == 8
    assert bench.lost == {Loss.SERVER_UNAVAILABLE: 8}
    assert bench.connection.link.sent == []


def test_a_store_that_cannot_be_encoded_costs_its_chunk_only(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.register()
    bench.connection.link.refuse = UnicodeEncodeError(
        "utf-8", "secret-salt\ud800", 11, 12, "surrogates"
    )
    assert bench.submit() is None
    assert bench.free == 8
    assert bench.lost == {Loss.CAPTURE_DISABLED: 8}
    assert "can't be encoded" in caplog.text
    assert "secret" not in caplog.text, "the text may be a salt"


# --- a server that is gone ------------------------------------------------------------------------


def test_blocks_of_a_lost_store_are_not_reused_before_the_copy_is_over(bench: Bench) -> None:
    bench.register().submit()
    bench.lose()
    for _ in range(3):
        bench.adapter.reclaim_finished_q_stores()
        assert bench.free == 6
    assert bench.lost == {Loss.SERVER_UNAVAILABLE: 8}, "counted once, and at once"
    bench.restore()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 8


class FakeSender:
    def __init__(self) -> None:
        self.stores: list[tuple[Any, ...]] = []
        self.futures: list[Future[StoreResult]] = []

    def submit(self, *store: Any) -> Future[StoreResult]:
        self.stores.append(store)
        self.futures.append(Future())
        return self.futures[-1]


def test_a_ring_out_of_reach_is_described_and_its_stores_are_uploaded(bench: Bench) -> None:
    bench.connection.transport, bench.connection.lifeline = "inline", None
    sender = FakeSender()
    bench.adapter._sender = cast(Any, sender)
    bench.register().submit()
    ((_, payloads, _),) = bench.connection.link.calls
    description = payloads[-1]
    assert (description.kind, description.device, description.stamps_offset) == ("inline", None, 0)
    ((key, instance_id, proof, ring, blocks),) = sender.stores
    assert (key.start, key.end) == (16, 24)
    assert (instance_id, ring) == (bench.adapter.instance_id, bench.ring)
    assert len(proof.nonces) == 1
    assert len(blocks) == 2
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 6, "the sender may still read them"
    sender.futures[0].set_exception(ConnectionError("lost"))
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 8, "nobody else does"
    assert bench.lost == {Loss.SERVER_UNAVAILABLE: 8}


def test_a_dead_server_copies_nothing(bench: Bench) -> None:
    bench.register().submit()
    assert bench.connection.lifeline is not None
    bench.connection.lifeline.hung_up = True
    bench.lose()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 8


def test_a_lifeline_that_we_closed_ourselves_tells_nothing(bench: Bench) -> None:
    """The server hangs, maybe in the copy; `renew` closes the lifeline and gets no answer."""
    bench.register().submit()
    bench.lose()
    assert bench.connection.lifeline is not None
    bench.connection.lifeline.open = False
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 6


def test_a_failed_return_keeps_the_quarantine(bench: Bench) -> None:
    bench.register().submit()
    bench.lose()
    bench.connection.link.answer = ConnectionError("its lane still copies")
    with pytest.raises(ConnectionError):
        bench.restore()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 6


def test_a_return_frees_only_what_was_sent_before_it(bench: Bench) -> None:
    """An idle engine reclaims late: the earlier return says nothing of a store sent after it."""
    bench.register()
    bench.lose()
    bench.restore()
    bench.submit()
    bench.lose()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 6


def test_a_return_before_the_first_reclaim_is_not_forgotten(bench: Bench) -> None:
    bench.register().submit()
    bench.adapter.reclaim_finished_q_stores()
    bench.lose()
    bench.restore()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 8


def test_a_store_that_was_never_sent_needs_no_quarantine(bench: Bench) -> None:
    """The link refuses at once when too many requests are outstanding: such a future has no uid."""
    bench.register()
    refused = ReplyFuture()
    refused.set_exception(ConnectionError("too many"))
    bench.connection.link.submit = lambda operation, payloads: refused  # type: ignore[method-assign]
    bench.submit()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 8
    assert bench.lost == {Loss.SERVER_UNAVAILABLE: 8}


def test_a_return_registers_the_same_ring_again(bench: Bench) -> None:
    bench.register()
    bench.lose()
    bench.restore()
    first, second = bench.connection.link.calls
    assert second[0] is REGISTER_Q_CACHE
    assert second[1] == first[1]


def test_a_server_that_comes_back_with_another_chunk_size_is_refused(bench: Bench) -> None:
    bench.register()
    bench.lose()
    with pytest.raises(ConnectionError, match="chunk size 16"):
        bench.restore(chunk_size=16)
    assert len(bench.connection.link.calls) == 1


# --- reports and the end --------------------------------------------------------------------------


def test_pings_carry_the_last_report(bench: Bench) -> None:
    bench.register().submit()
    instance, report = bench.heartbeat.ping_payloads()
    assert (instance, report.computed) == ("worker", 0), "a snapshot, not the live account"
    bench.adapter.update_report()
    _, report = bench.heartbeat.ping_payloads()
    assert (report.computed, report.pending, report.captured) == (8, 8, 0)
    assert (report.ring_blocks, report.ring_used, report.ring_high_water) == (8, 2, 2)


def test_while_steps_run_the_report_is_renewed_now_and_then(bench: Bench) -> None:
    bench.register()
    seen = []
    for step in range(10):  # a step takes a tenth of a second
        bench.adapter.account.request("r").compute(1)
        bench.adapter.renew_report(1000 + step / 10)
        seen.append(bench.heartbeat.ping_payloads()[1].computed)
    assert seen == [1, 1, 1, 4, 4, 4, 7, 7, 7, 10]


def test_a_stale_report_is_told_at_once(bench: Bench) -> None:
    bench.register()
    assert not bench.adapter.report_is_stale
    bench.submit()
    assert bench.adapter.report_is_stale
    bench.adapter.tell_report()
    assert bench.heartbeat.asked == 1
    assert bench.heartbeat.ping_payloads()[1].pending == 8
    assert not bench.adapter.report_is_stale
    bench.connection.link.futures[0].set_result(StoreResult(b"", True))
    bench.adapter.reclaim_finished_q_stores()
    assert bench.adapter.report_is_stale, "pending has become captured"


def test_waiting_for_any_store_ends_with_the_first_answer_or_in_time(bench: Bench) -> None:
    bench.register()
    bench.adapter.wait_for_any_store(0.0)
    bench.submit()
    bench.submit()
    bench.adapter.wait_for_any_store(0.01)
    assert bench.adapter.reclaim_finished_q_stores() == 0
    bench.connection.link.futures[1].set_result(StoreResult(b"", True))
    bench.adapter.wait_for_any_store(60.0)
    assert bench.adapter.reclaim_finished_q_stores() == 1


def test_shutdown_reclaims_reports_and_leaves(bench: Bench) -> None:
    bench.register().submit()
    bench.connection.link.futures[0].set_result(StoreResult(b"", True))
    assert bench.adapter.shutdown_q_ring(), "the server has let go of the ring"
    operation, (instance, report), _ = bench.connection.link.calls[-1]
    assert operation is UNREGISTER_Q_CACHE
    assert (instance, report.captured, report.pending, report.ring_used) == ("worker", 8, 0, 0)
    assert bench.heartbeat.stopped
    assert bench.connection.closed


@pytest.mark.parametrize(
    "error", [ConnectionError("no answer"), RequestError(ErrorCode.UNKNOWN_INSTANCE, "who?")]
)
def test_shutdown_warns_and_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    bench.register().submit()
    bench.connection.link.answer = error
    with caplog.at_level(logging.WARNING):
        assert not bench.adapter.shutdown_q_ring(deadline_s=0.01)  # the store is never answered
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert bench.connection.closed


def test_shutdown_counts_stores_without_an_answer(bench: Bench) -> None:
    bench.register().submit()
    bench.submit()
    bench.connection.link.futures[0].set_result(StoreResult(b"", True))
    bench.adapter.shutdown_q_ring(deadline_s=0.01)
    _, (_, report), _ = bench.connection.link.calls[-1]
    assert (report.computed, report.captured, report.pending) == (16, 8, 0)
    assert report.lost == {Loss.SERVER_UNAVAILABLE: 8}
    assert bench.adapter.stores_under_way == 0


def test_shutdown_without_a_ring_unregisters_nothing(bench: Bench) -> None:
    bench.adapter.shutdown_q_ring()
    assert bench.connection.link.calls == []
    assert bench.connection.closed


def test_waiting_for_a_store(bench: Bench) -> None:
    sequence = bench.register().submit()
    assert sequence is not None
    with pytest.raises(TimeoutError):
        bench.adapter.wait_for_store(sequence, 0.0)
    bench.connection.link.futures[0].set_result(StoreResult(b"", True))
    bench.adapter.wait_for_store(sequence, 0.0)
    bench.adapter.wait_for_store(999, 0.0)
