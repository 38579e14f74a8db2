"""Copies that two threads share are all done, whoever does them, and a failure is the caller's."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from lmcache_qclient.qcache import copies
from lmcache_qclient.qcache.copies import MIN_SHARED_BYTES, copy_all


def pieces(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Target of zeros and source of chance, large enough to be shared, `[count, bytes]`."""
    source = np.random.default_rng(5).integers(1, 255, (count, MIN_SHARED_BYTES // 4), np.uint8)
    return np.zeros_like(source), source


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 16])
def test_every_byte_arrives(threads: int, count: int) -> None:
    target, source = pieces(count)
    copy_all(list(zip(target, source, strict=True)), threads)
    assert np.array_equal(target, source)


def test_two_threads_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    copyto = np.copyto

    def meet(target: Any, source: Any) -> None:
        both.wait(20)
        copyto(target, source)

    monkeypatch.setattr("lmcache_qclient.qcache.copies.np.copyto", meet)
    target, source = pieces(4)
    copy_all(list(zip(target, source, strict=True)), threads=2)
    assert np.array_equal(target, source)


@pytest.mark.parametrize("wrong", range(4))
def test_a_copy_that_fails_is_told_after_all_threads_are_done(wrong: int) -> None:
    target, source = pieces(4)
    todo: list[copies.Copy] = list(zip(target, source, strict=True))
    todo[wrong] = (target[wrong], source[wrong][:-1])
    with pytest.raises(ValueError, match="broadcast"):
        copy_all(todo, threads=2)
    others = [index for index in range(4) if index != wrong]
    assert np.array_equal(target[others], source[others])
