from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from lmcache_qprotocol.codec import decode_reply, encode, encode_request
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import Hello, RangeKey, StoreResult
from lmcache_qprotocol.operations import BY_NAME, OPERATIONS
from lmcache_qserver.wire.bulk_answers import BulkAnswers
from lmcache_qserver.wire.clients import Client, Clients
from lmcache_qserver.wire.counts import OK, UNDECODED, WireCounts
from lmcache_qserver.wire.dispatch import Dispatcher, Handler, Order

BOOT_ID = b"b" * 16
UID = encode(1)
KEY = RangeKey(model_name="m##query", world_size=1, worker_id=0)
STORE = (KEY, 1, ((0,),), b"")
REGISTER = (1, (), "m", 1, "test", None, ())


class Bench:
    """A dispatcher whose handlers are the test's, and whose socket is a list."""

    def __init__(self, outstanding: int = 4, message_bytes: int = 100_000) -> None:
        self.sent: list[tuple[bytes, list[bytes]]] = []
        self.counts = WireCounts()
        self.clients = Clients(lambda session: None)
        self.handlers: dict[str, Handler] = {
            operation.name: Handler(Order.NOW, lambda client, payloads: None)
            for operation in OPERATIONS
        }
        self.dispatcher = Dispatcher(
            self.handlers,
            self.clients,
            self.counts,
            lambda identity, frames: self.sent.append((identity, [*map(bytes, frames)])),
            BulkAnswers(
                asyncio.get_running_loop(), lambda identity, frames: None, cap_bytes=1 << 20
            ),
            boot_id=BOOT_ID,
            limits=Limits(message_bytes=message_bytes, outstanding_requests=outstanding),
            clock=lambda: 0.0,
        )

    def on(
        self, name: str, call: Callable[[Client, tuple[Any, ...]], Any], order: Order = Order.NOW
    ) -> None:
        self.handlers[name] = Handler(order, call, while_stopping=False)

    def native(self, identity: bytes = b"native") -> bytes:
        client = self.clients.seen(identity, 0.0)
        assert client is not None
        self.clients.say_hello(client, Hello(protocol_version=1, client="test"))
        return identity

    def ask(self, identity: bytes, name: str, *payloads: Any) -> None:
        self.dispatcher.handle(identity, encode_request(UID, BY_NAME[name], payloads))

    def code_of_last(self, name: str = "noop") -> ErrorCode:
        with pytest.raises(RequestError) as caught:
            decode_reply(self.sent[-1][1], BY_NAME[name])
        return caught.value.code


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    made.dispatcher.start()
    yield made
    await made.dispatcher.stop()


def boom(client: Client, payloads: tuple[Any, ...]) -> Any:
    raise KeyError("the secret detail")


async def test_a_result_has_three_frames_for_legacy_and_four_for_native_clients(
    bench: Bench,
) -> None:
    bench.on("noop", lambda client, payloads: "OK")
    bench.ask(b"legacy", "noop")
    bench.ask(bench.native(), "noop")
    meta = encode({"boot_id": BOOT_ID})
    assert msgspec.msgpack.decode(bench.sent[1][1][3]) in (
        msgspec.msgpack.decode(meta),
        [BOOT_ID],
    )
    assert bench.sent[0] == (b"legacy", [UID, encode(24), encode("OK")])
    assert bench.sent[1][0] == b"native"
    assert bench.sent[1][1][:3] == [UID, encode(24), encode("OK")]
    assert bench.counts.requests["noop", OK] == 2


async def test_an_unexpected_exception_is_an_internal_error_without_details(bench: Bench) -> None:
    bench.on("noop", boom)
    bench.ask(bench.native(), "noop")
    assert bench.code_of_last() is ErrorCode.INTERNAL
    assert b"secret" not in b"".join(bench.sent[-1][1])
    assert bench.counts.requests["noop", "internal"] == 1


async def test_a_legacy_client_gets_the_failing_result_where_there_is_one(bench: Bench) -> None:
    bench.on("store_q", boom)
    bench.on("ping", boom)
    bench.ask(b"legacy", "store_q", *STORE)
    bench.ask(b"legacy", "ping", 1)
    assert bench.sent[0][1] == [UID, encode(5), encode([b"", False])]
    assert bench.sent[1][1] == [UID, encode(22), encode(False)]


async def test_a_legacy_client_gets_silence_where_an_answer_would_mean_success(
    bench: Bench,
) -> None:
    bench.on("unregister_q_cache", boom)
    bench.ask(b"legacy", "unregister_q_cache", 1)
    bench.dispatcher.handle(b"legacy", [UID, encode(9999)])
    assert bench.sent == []
    assert bench.counts.silenced == 2
    assert bench.counts.requests[UNDECODED, "unknown_operation"] == 1


async def test_a_bad_payload_of_a_legacy_store_gets_the_failing_result(bench: Bench) -> None:
    bench.dispatcher.handle(b"legacy", [UID, encode(5), b"\xc1", b"\xc1", b"\xc1", b"\xc1"])
    assert bench.sent[0][1] == [UID, encode(5), encode([b"", False])]


async def test_an_operation_that_only_native_clients_know_gets_error_frames_before_hello(
    bench: Bench,
) -> None:
    bench.dispatcher.handle(b"new", [UID, encode("hello"), encode({})])
    assert bench.code_of_last("hello") is ErrorCode.BAD_PAYLOAD


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([UID, encode(9999)], ErrorCode.UNKNOWN_OPERATION),
        ([UID, b"\xc1"], ErrorCode.BAD_FRAME),
        ([UID, encode("noop"), encode(1)], ErrorCode.WRONG_ARITY),
        ([UID, encode("ping"), encode(1.5)], ErrorCode.BAD_PAYLOAD),
        ([UID, encode("noop")] + [encode(1)] * 40, ErrorCode.BAD_FRAME),
        ([UID, encode("noop"), b"x" * 100_001], ErrorCode.TOO_LARGE),
    ],
)
async def test_bad_frames_cost_a_native_client_an_error(
    bench: Bench, frames: list[bytes], code: ErrorCode
) -> None:
    bench.dispatcher.handle(bench.native(), frames)
    assert bench.code_of_last() is code


@pytest.mark.parametrize("frames", [[], [UID], [b"", b""], [b"x" * 65, encode(24)]])
async def test_a_message_without_frames_to_echo_is_counted_and_dropped(
    bench: Bench, frames: list[bytes]
) -> None:
    bench.dispatcher.handle(bench.native(), frames)
    assert bench.sent == []
    assert bench.counts.unanswerable == 1


async def test_registrations_are_served_one_at_a_time_in_order(bench: Bench) -> None:
    began: list[int] = []
    gates = [asyncio.Event() for _ in range(3)]
    running = 0

    async def register(client: Client, payloads: tuple[Any, ...]) -> None:
        nonlocal running
        running += 1
        assert running == 1
        began.append(payloads[0])
        await gates[payloads[0]].wait()
        running -= 1

    bench.on("register_q_cache", register, Order.IN_TURN)
    for number in range(3):
        bench.ask(b"abc"[number : number + 1], "register_q_cache", number, *REGISTER[1:])
    for number in (2, 1, 0):
        gates[number].set()
    await bench.dispatcher.finish()
    assert began == [0, 1, 2]
    assert [identity for identity, _ in bench.sent] == [b"a", b"b", b"c"]


async def test_outstanding_requests_are_bounded_per_client(bench: Bench) -> None:
    gate = asyncio.Event()

    async def store(client: Client, payloads: tuple[Any, ...]) -> StoreResult:
        await gate.wait()
        return StoreResult(b"", True)

    bench.on("store_q", store, Order.BESIDE)
    greedy = bench.native(b"greedy")
    for _ in range(5):
        bench.ask(greedy, "store_q", *STORE)
    assert len(bench.sent) == 1
    assert bench.code_of_last("store_q") is ErrorCode.BUSY
    bench.ask(bench.native(b"modest"), "store_q", *STORE)
    gate.set()
    await bench.dispatcher.finish()
    assert len(bench.sent) == 6
    bench.ask(greedy, "store_q", *STORE)
    await bench.dispatcher.finish()
    assert len(bench.sent) == 7
    assert bench.counts.requests["store_q", OK] == 6


async def test_outstanding_bytes_are_bounded_and_cost_no_decoding(bench: Bench) -> None:
    gate = asyncio.Event()

    async def store(client: Client, payloads: tuple[Any, ...]) -> StoreResult:
        await gate.wait()
        return StoreResult(b"", True)

    bench.dispatcher._limits = Limits(message_bytes=100_000, outstanding_requests=1000)
    bench.on("store_q", store, Order.BESIDE)
    greedy = bench.native(b"greedy")
    large = msgspec.structs.replace(KEY, token_ids=(70_000,) * 15_000)
    for _ in range(5):
        bench.ask(greedy, "store_q", large, *STORE[1:])
    bench.ask(greedy, "store_q", *STORE)
    assert len(bench.sent) == 0
    bench.dispatcher.handle(greedy, [UID, encode(5), b"\xc1" * 50_000])
    assert bench.code_of_last("store_q") is ErrorCode.BUSY
    bench.ask(greedy, "ping", None)
    assert bench.counts.requests["ping", OK] == 1
    gate.set()
    await bench.dispatcher.finish()
    bench.ask(greedy, "store_q", large, *STORE[1:])
    await bench.dispatcher.finish()
    assert bench.counts.requests["store_q", OK] == 7


async def test_a_stopping_server_refuses_new_work(bench: Bench) -> None:
    bench.on("store_q", boom, Order.BESIDE)
    bench.dispatcher.refuse_new_work()
    bench.ask(bench.native(), "store_q", *STORE)
    assert bench.code_of_last("store_q") is ErrorCode.SHUTTING_DOWN
    bench.ask(b"native", "ping", None)
    assert bench.counts.requests["ping", OK] == 1


async def test_what_goes_beside_outlives_the_dispatcher_and_is_not_answered(bench: Bench) -> None:
    """A store that was cancelled half way would leave its copy without an owner."""
    gate = asyncio.Event()
    ended: list[str] = []

    async def store(client: Client, payloads: tuple[Any, ...]) -> StoreResult:
        await gate.wait()
        ended.append("store")
        return StoreResult(b"", True)

    bench.on("store_q", store, Order.BESIDE)
    bench.ask(bench.native(), "store_q", *STORE)
    (beside,) = bench.dispatcher._beside
    await bench.dispatcher.stop()
    gate.set()
    await beside
    assert ended == ["store"]
    assert not bench.sent


async def test_a_result_that_cannot_be_encoded_is_an_internal_error(bench: Bench) -> None:
    async def store(client: Client, payloads: tuple[Any, ...]) -> object:
        return object()

    bench.on("store_q", store, Order.BESIDE)
    bench.ask(bench.native(), "store_q", *STORE)
    await bench.dispatcher.finish()
    assert bench.code_of_last("store_q") is ErrorCode.INTERNAL


async def test_a_fault_of_the_server_is_logged_once_in_a_while(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that has found one can't flood the log, nor hide another operation's."""
    bench.on("noop", boom)
    bench.on("ping", boom)
    client = bench.native()
    for _ in range(100):
        bench.ask(client, "noop")
    bench.ask(client, "ping", None)
    assert len(bench.sent) == 101, "each is answered"
    assert bench.counts.requests["noop", "internal"] == 100
    faults = [record for record in caplog.records if record.exc_info]
    assert [record.__dict__["told"]["operation"] for record in faults] == ["noop", "ping"]
    assert all(record.levelname == "ERROR" for record in faults)
