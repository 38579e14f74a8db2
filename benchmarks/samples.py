"""Times of repeated calls, and what may be said of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def interleaved(
    ours: Callable[[int], object],
    theirs: Callable[[int], object],
    rounds: int,
    first_turn: int = 0,
) -> list[tuple[float, float]]:
    """`rounds` pairs of times; who goes first alternates, so that a drift of the machine hits both.

    Args:
        first_turn: an odd one begins with theirs.
    """
    pairs = []
    for index in range(rounds):
        if (first_turn + index) % 2:
            second = seconds(lambda index=index: theirs(index))  # type: ignore[misc]  # default binds the loop variable
            first = seconds(lambda index=index: ours(index))  # type: ignore[misc]  # as above
        else:
            first = seconds(lambda index=index: ours(index))  # type: ignore[misc]  # as above
            second = seconds(lambda index=index: theirs(index))  # type: ignore[misc]  # as above
        pairs.append((first, second))
    return pairs


def speed_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Median over pairs of (their time / our time): 1.0 is as fast, below is slower."""
    return statistics.median(theirs / ours for ours, theirs in pairs)


def bootstrap_interval(
    pairs: Sequence[tuple[float, float]], draws: int = 2000
) -> tuple[float, float]:
    """95 % interval of `speed_ratio`, by resampling pairs (percentile bootstrap, fixed seed)."""
    chance = random.Random(0)
    ratios = sorted(speed_ratio(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    return ratios[int(draws * 0.025)], ratios[int(draws * 0.975)]
