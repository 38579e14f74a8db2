"""The ZeroMQ socket under hostile messages: one answer to each that can be answered, and no harm to others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_qprotocol.codec import encode
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.limits import MAX_UID_BYTES
from lmcache_qprotocol.messages import ReplyMeta
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT, BareClient
from lmcache_qserver.testing.daemon import RunningDaemon
from tests.server.fuzz.attacks import any_message, at_the_limits
from tests.server.fuzz.bystander import Bystander

MESSAGES = st.lists(any_message, min_size=1, max_size=8)
META = msgspec.msgpack.Decoder(ReplyMeta)
BOUNDED = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class HostileClient:
    """Sends what it is given, and waits for the answers that are due."""

    def __init__(self, url: str, *, native: bool) -> None:
        self.client = BareClient(url)
        self.native = native
        self._numbers = itertools.count(1)
        self._due: set[bytes] = set()
        if native:
            self.client.hello()

    def send(self, frames: list[bytes]) -> bytes | None:
        """The uid under which an answer is due; None when the message can't be answered."""
        if len(frames) < 2 or not 0 < len(frames[1]) <= MAX_UID_BYTES:
            self.client.send(frames or [b""])
            return None
        uid = encode(next(self._numbers))
        self.client.send([uid, *frames[1:]])
        return uid

    def exchange(self, messages: list[list[bytes]]) -> None:
        """All due answers come, each once, and none of them tells of a fault of the server.

        What a legacy client gets no answer to is up to the server; some answers are later than those behind them.
        """
        due = {uid for uid in map(self.send, messages) if uid is not None}
        end = self.send([b"", b"\x18"])
        assert end is not None
        self._due |= {*due, end}
        awaited = {*due, end} if self.native else {end}
        while awaited & self._due:
            uid, _, *rest = self.client.receive()
            assert uid in self._due, "an answer came twice, or to nobody"
            self._due.remove(uid)
            if len(rest) > 1:
                code = META.decode(rest[1]).code
                assert code is None or code.value != "internal", (uid, messages)

    def close(self) -> None:
        self.client.socket.close()


@pytest.fixture(params=["native", "legacy"])
def hostile(
    request: pytest.FixtureRequest, daemon: RunningDaemon, bystander: Bystander
) -> Iterator[HostileClient]:
    made = HostileClient(daemon.url, native=request.param == "native")
    yield made
    made.close()


@BOUNDED
@given(messages=MESSAGES)
def test_hostile_messages(
    bystander: Bystander, hostile: HostileClient, messages: list[list[bytes]]
) -> None:
    hostile.exchange(messages)
    bystander.check()


def test_lists_at_their_limits_and_beyond(daemon: RunningDaemon, bystander: Bystander) -> None:
    hostile = HostileClient(daemon.url, native=True)
    for name, payloads, code in at_the_limits(layout_id(SMALL_LAYOUT)):
        hostile.client.send([b"\x01", encode(name), *map(encode, payloads)])
        meta = META.decode(hostile.client.receive()[3])
        told = "ok" if meta.code is None else meta.code.value
        assert told == code, (name, meta)
        bystander.check()
    hostile.close()


def test_a_map_that_nobody_reads_is_not_built(daemon: RunningDaemon, bystander: Bystander) -> None:
    """16 MB of two million keys would take 400 MB and two seconds of the loop."""
    keys = b"".join(b"\xa4%04x\xc0" % number for number in range(1 << 16)) * 40
    count = (40 << 16).to_bytes(4, "big")
    hostile = HostileClient(daemon.url, native=True)
    rest = [encode(value) for value in (1, (), "m", 1, "t")]
    hostile.client.send([b"\x01", b"\x03", *rest, b"\xdf" + count + keys, encode(())])
    hostile.client.socket.setsockopt(zmq.RCVTIMEO, 1000)
    answer = META.decode(hostile.client.receive()[3])
    assert answer.code is not None
    assert answer.code.value == "bad_payload"
    hostile.close()
    bystander.check_resources()
