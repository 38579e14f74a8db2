"""A ring's memory is not trusted: every lie about it is refused before it is mapped."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qserver.copying import RingGeometry, RingMemory

GEOMETRY = RingGeometry(num_blocks=4, block_bytes=64, block_size=2, stamps_offset=256)
NBYTES = 256 + 4 * 2 * 8


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def memfd(size: int = NBYTES, seals: int = fcntl.F_SEAL_SHRINK, flags: int = 0) -> int:
    fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_rows_and_stamps_are_where_the_geometry_says() -> None:
    before = open_fds()
    fd = memfd()
    os.pwrite(fd, bytes(range(256)), 0)
    os.pwrite(fd, np.arange(8, dtype=np.int64).tobytes(), 256)
    ring = RingMemory(fd, NBYTES)
    ring.open(GEOMETRY)
    assert open_fds() == before + 1, "that of the mapping"
    assert ring.rows.shape == (4, 64)
    assert ring.rows.tobytes() == bytes(range(256))
    assert ring.stamps.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not ring.rows.flags.writeable
    assert not ring.stamps.flags.writeable
    ring.close()
    assert ring.closed
    assert open_fds() == before
    with pytest.raises(ValueError, match="not open"):
        _ = ring.rows


@pytest.mark.parametrize(
    "geometry",
    [
        RingGeometry(4, 64, 2, 260),
        RingGeometry(4, 64, 2, 248),
        RingGeometry(4, 64, 2, 264),
        RingGeometry(5, 64, 2, 320),
        RingGeometry(4, 64, 2, 1 << 61),
        RingGeometry((1 << 31) - 1, 1 << 60, 1 << 20, 0),
        RingGeometry((1 << 31) - 1, 1 << 60, 1 << 20, 1 << 61),
    ],
    ids=["misaligned", "overlapping", "beyond", "blocks", "far", "product", "product and far"],
)
def test_a_geometry_that_does_not_fit_is_refused(geometry: RingGeometry) -> None:
    ring = RingMemory(memfd(), NBYTES)
    with pytest.raises(RequestError) as caught:
        ring.open(geometry)
    assert caught.value.code is ErrorCode.RING_REFUSED
    ring.close()


def refused(fd: int, nbytes: int = NBYTES) -> str:
    ring = RingMemory(fd, nbytes)
    ring.claimed = True  # else it is closed aside, a moment later
    with pytest.raises(RequestError) as caught:
        ring.open(GEOMETRY)
    ring.close()
    assert caught.value.code is ErrorCode.RING_REFUSED
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    return caught.value.message


def test_memory_that_can_shrink_is_refused() -> None:
    assert "F_SEAL_SHRINK" in refused(memfd(seals=fcntl.F_SEAL_GROW))


def test_memory_smaller_than_announced_is_refused() -> None:
    assert "announced" in refused(memfd(size=NBYTES - 1))


def test_huge_pages_are_refused() -> None:
    try:
        fd = memfd(size=2 << 20, flags=os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    assert "HUGETLB" in refused(fd)


def test_descriptors_that_are_no_memfd_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    refused(os.open(path, os.O_RDWR))
    left, right = socket.socketpair()
    refused(left.detach())
    right.close()


def test_a_used_memory_is_refused() -> None:
    ring = RingMemory(memfd(), NBYTES)
    ring.open(GEOMETRY)
    ring.close()
    ring.close()
    with pytest.raises(RequestError):
        ring.open(GEOMETRY)


def test_a_view_that_lives_on_is_said_and_does_not_fault(caplog: pytest.LogCaptureFixture) -> None:
    ring = RingMemory(memfd(), NBYTES)
    ring.open(GEOMETRY)
    view = ring.rows
    ring.close()
    assert "still alive" in caplog.text
    assert int(view.sum()) == 0
