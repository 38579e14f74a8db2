"""Copying out of a simulated device: pieces, several chunks, refusals, and what is given back in which order."""

from __future__ import annotations

import numpy as np
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.stamps import EMPTY, first_stamp
from lmcache_qserver.copying import ChunkCopy, StampFault
from lmcache_qserver.device.api import DeviceError
from lmcache_qserver.device.ring_copy import MAX_EVENTS, MIN_STAMPS, RingCopy
from lmcache_qserver.device.sim_api import SimDevice
from tests.server.device.sim_world import (
    BLOCK_SIZE,
    EVENT,
    GEOMETRY,
    LAYERS,
    NBYTES,
    RING,
    SimRun,
    content,
)


def chunk_of(one: SimRun, number: int, blocks: tuple[int, ...]) -> ChunkCopy:
    return ChunkCopy(blocks, first_stamp(number + 1, 0), one.pool[number], layers=LAYERS)


def test_several_chunks_in_one_copy_and_the_first_wrong_one_is_named() -> None:
    one = SimRun(1)
    one.worker.write(0, (0, 1, 2))
    one.worker.write(1, (6, 4, 5))
    chunks = [chunk_of(one, 0, (0, 1, 2)), chunk_of(one, 1, (6, 4, 5))]
    assert one.copier.copy(chunks, EVENT) is None
    for number in range(2):
        assert one.pool[number].tobytes() == content(number).tobytes()
    wrong = [chunks[0], chunk_of(one, 2, (6, 4, 5))]
    fault = one.copier.copy(wrong, EVENT)
    assert fault == StampFault(1, 0, first_stamp(3, 0), first_stamp(2, 0))
    assert one.end().broken == []


def test_a_piece_brings_its_own_rows_only() -> None:
    one = SimRun(2)
    one.worker.write(0, (0, 1, 2))
    skip, rows = 1, 2 * BLOCK_SIZE - 2
    slot = one.pool[0][: 2 * GEOMETRY.block_bytes]
    piece = ChunkCopy((0, 1), first_stamp(1, skip), slot, skip=skip, rows=rows, layers=LAYERS)
    assert one.copier.copy([piece], EVENT) is None
    expected = content(0)[:2].copy()
    expected[0, :, :skip] = 0
    expected[1, :, -1:] = 0
    assert slot.tobytes() == expected.tobytes()
    one.end()


def test_the_buffer_of_stamps_grows_with_what_is_asked() -> None:
    blocks = MIN_STAMPS // BLOCK_SIZE + 1
    one = SimRun(3)
    one.worker.write(0, (0, 1, 2))
    one.store(0, (0, 1, 2), one.pool[0])
    many = np.zeros(blocks * GEOMETRY.block_bytes, np.uint8)
    one.device.register_host(many)
    fault = one.copier.copy([ChunkCopy((0,) * blocks, first_stamp(1, 0), many)], EVENT)
    assert fault is not None
    assert fault.row == BLOCK_SIZE
    one.device.unregister_host(many)
    assert one.end().broken == []


def test_events_are_opened_once_and_a_bounded_number_is_kept() -> None:
    one = SimRun(4)
    opened: list[bytes] = []
    resolve = one.device._resolve

    def counted(handle: bytes) -> object:
        opened.append(handle)
        return resolve(handle) if handle in (RING, EVENT) else np.zeros(16, np.uint8)

    one.device._resolve = counted  # type: ignore[assignment]  # any handle is an event's here
    one.worker.write(0, (0, 1, 2))
    events = [EVENT, *(bytes([index + 1]) * 64 for index in range(MAX_EVENTS))]
    before = one.device.held["events"]
    for event in (EVENT, EVENT, *events, events[-1]):
        one.store(0, (0, 1, 2), one.pool[0])
        one.copier.copy([chunk_of(one, 0, (0, 1, 2))], event)
    assert one.device.held["events"] == before + MAX_EVENTS
    assert len(opened) < 2 * len(events)
    one.end()


def test_closing_drops_the_memory_then_empties_the_cache_then_collects() -> None:
    one = SimRun(5)
    one.write_and_store(0, 0)
    one.copier.close()
    assert one.device.calls == ["drop_memory", "empty_cache", "ipc_collect"]
    assert one.device.mapped_bytes == 0
    assert one.device.held == {"streams": 1, "events": 1, "mappings": 0, "pinned": 1}


def test_closing_waits_for_what_is_still_queued() -> None:
    for seed in range(30):
        one = SimRun(seed)
        one.copier._queue_rows(chunk_of(one, 0, (0, 2, 4)))
        one.copier.close()
        assert one.device.violations == []


def test_collecting_before_the_last_reference_is_gone_keeps_the_memory_mapped() -> None:
    """The order that the test above asks for is not a matter of taste."""
    one = SimRun(6)
    one.device.ipc_collect()
    one.device.empty_cache()
    assert one.copier._memory is not None
    one.device.drop_memory(one.copier._memory)
    assert one.device.mapped_bytes == NBYTES


def test_a_ring_that_is_not_what_was_said_is_refused() -> None:
    device = SimDevice(7, {RING: np.zeros(NBYTES - 1, np.uint8)}.__getitem__)
    for handle, words in ((RING, "announced"), (b"short", "64 bytes")):
        copier = RingCopy(device, GEOMETRY, NBYTES, handle)
        with pytest.raises(RequestError) as caught:
            copier.open()
        assert caught.value.code is ErrorCode.RING_REFUSED
        assert words in caught.value.message
        copier.close()
    assert device.held == {"streams": 0, "events": 0, "mappings": 0, "pinned": 0}


def test_a_handle_that_the_device_refuses_is_refused_and_a_lost_device_is_not() -> None:
    for sticky, expected in ((False, RequestError), (True, DeviceError)):

        def refuse(handle: bytes, sticky: bool = sticky) -> object:
            raise DeviceError("no", sticky=sticky)

        device = SimDevice(8, refuse)  # type: ignore[arg-type]  # it never answers
        with pytest.raises(expected):
            RingCopy(device, GEOMETRY, NBYTES, RING).open()


def test_an_error_comes_when_nothing_is_under_way_any_more() -> None:
    one = SimRun(9)
    one.worker.write(0, (0, 1, 2))
    queued = 0
    queue = one.device.copy_to_host

    def refuse_the_third(*arguments: object) -> None:
        nonlocal queued
        queued += 1
        if queued == 3:
            raise DeviceError("no more")
        queue(*arguments)  # type: ignore[arg-type]  # passed on as they came

    one.device.copy_to_host = refuse_the_third  # type: ignore[method-assign,assignment]  # counts calls
    with pytest.raises(DeviceError):
        one.copier.copy([chunk_of(one, 0, (0, 2, 4))], EVENT)
    assert not one.device.will_write(one.pool.reshape(-1))
    one.end()


def test_a_lost_device_context_is_sticky() -> None:
    one = SimRun(10)
    one.worker.write(0, (0, 1, 2))
    one.device._events[one.worker.event][1] = -1
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            one.copier.copy([chunk_of(one, 0, (0, 1, 2))], EVENT)
        assert caught.value.sticky


def test_the_ring_is_empty_where_nothing_was_written() -> None:
    one = SimRun(11)
    fault = one.copier.copy([chunk_of(one, 0, (0, 1, 2))], EVENT)
    assert fault == StampFault(0, 0, first_stamp(1, 0), EMPTY)
    one.end()
