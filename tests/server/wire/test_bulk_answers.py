"""Pinned bytes on their way: counted until ZeroMQ is done with them, and never longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.qstore.reading import PinnedBytes
from lmcache_qserver.wire.bulk_answers import BulkAnswers, Tracker
from lmcache_qserver.wire.clients import Client
from tests.server.qstore.world import until


@dataclass
class Track:
    done: bool = False


@dataclass
class Wire:
    """Takes answers, and is done with them when a test says so."""

    trackers: list[Track] = field(default_factory=list)
    is_gone: bool = False

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> Tracker | None:
        if self.is_gone:
            return None
        self.trackers.append(Track())
        return self.trackers[-1]


def pinned(released: list[int], nbytes: int = 40) -> PinnedBytes:
    return PinnedBytes(np.zeros(nbytes, np.uint8), lambda: released.append(nbytes))


async def test_a_client_has_so_much_on_its_way_and_no_more() -> None:
    wire, released = Wire(), list[int]()
    bulk = BulkAnswers(asyncio.get_running_loop(), wire.send, cap_bytes=100)
    client, other = Client(b"a", 0.0), Client(b"b", 0.0)
    for _ in range(2):
        bulk.check_room(client, 40)
        bulk.send(client, [], pinned(released))
    with pytest.raises(RequestError) as caught:
        bulk.check_room(client, 40)
    assert caught.value.code is ErrorCode.BUSY
    bulk.check_room(other, 40)
    wire.trackers[0].done = True
    bulk.check_room(client, 40)
    assert (released, client.bulk_bytes, bulk.nbytes) == ([40], 40, 40)
    bulk.close()
    assert released == [40, 40]


async def test_one_answer_may_be_larger_than_the_cap_if_it_is_alone() -> None:
    bulk = BulkAnswers(asyncio.get_running_loop(), Wire().send, cap_bytes=100)
    bulk.check_room(Client(b"a", 0.0), 500)


async def test_bytes_are_unpinned_by_themselves() -> None:
    wire, released = Wire(), list[int]()
    bulk = BulkAnswers(asyncio.get_running_loop(), wire.send, cap_bytes=100)
    client = Client(b"a", 0.0)
    bulk.send(client, [], pinned(released))
    await asyncio.sleep(0.03)
    assert released == []
    wire.trackers[0].done = True
    await until(lambda: bool(released))
    assert client.bulk_bytes == 0


async def test_what_can_not_be_delivered_is_unpinned_at_once() -> None:
    released = list[int]()
    bulk = BulkAnswers(asyncio.get_running_loop(), Wire(is_gone=True).send, cap_bytes=100)
    client = Client(b"a", 0.0)
    bulk.send(client, [], pinned(released))
    assert (released, client.bulk_bytes) == ([40], 0)
