"""Strided copies, shared by two threads when they are large: together they copy at twice the speed of one.

A thread takes the next copy off one list until it is empty. The helper is started for the occasion: there is nothing to
close, and nothing that a fork would leave without its threads.
"""

from __future__ import annotations

import _thread
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Copy = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""(target, source) of one shape and dtype; any strides."""

MIN_SHARED_BYTES = 4 << 20
"""Below, starting a thread costs more than it saves."""


def copy_all(copies: Sequence[Copy], threads: int) -> None:
    """Do all copies; their targets do not overlap. Returns when the last byte is there.

    Args:
        threads: more than one: a second one helps if it is worth it.
    """
    shared = iter(list(copies))
    nbytes = sum(target.nbytes for target, _ in copies)
    if threads < 2 or len(copies) < 2 or nbytes < MIN_SHARED_BYTES:
        _work(shared)
        return
    errors: list[BaseException] = []
    working = _thread.allocate_lock()
    working.acquire()
    _thread.start_new_thread(_help, (shared, working, errors))
    try:
        _work(shared)
    finally:
        working.acquire()
    if errors:
        raise errors[0]


def _work(copies: Iterator[Copy]) -> None:
    for target, source in copies:
        np.copyto(target, source)


def _help(copies: Iterator[Copy], working: Any, errors: list[BaseException]) -> None:
    try:
        _work(copies)
    except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
        errors.append(error)
    finally:
        working.release()
