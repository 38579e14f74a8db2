"""Several at a time: bounded, in order, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lmcache_qserver.upkeep.several import several


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def test_results_come_in_order_and_no_more_than_so_many_are_under_way() -> None:
    under_way = most = 0

    async def work(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(number % 5):
            await asyncio.sleep(0)
        under_way -= 1
        return number

    assert [result async for result in several(numbers(50), work, 4)] == list(range(50))
    assert 1 < most <= 4
    assert [result async for result in several(numbers(0), work, 4)] == []


async def test_an_error_ends_it_and_what_is_under_way() -> None:
    running: set[int] = set()

    async def work(number: int) -> int:
        running.add(number)
        try:
            if number == 2:
                raise KeyError(number)
            await asyncio.sleep(0 if number < 2 else 3600)
        finally:
            running.discard(number)
        return number

    results = several(numbers(50), work, 4)
    assert [await anext(results), await anext(results)] == [0, 1]
    with pytest.raises(KeyError):
        await anext(results)
    assert running == set()
