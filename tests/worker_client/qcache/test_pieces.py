"""Pieces against the real daemon: what is retrieved and what is missing, to the token, by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_qclient.qcache import connect
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.worker_client.qcache.engine import CHUNK, Engine, layout_of
from tests.worker_client.qcache.test_retrieve import bits

Stored = tuple[tuple[int, ...], int, int]
"""Tokens of a sequence, and the positions [start, end) that were stored of it."""

names = count()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=CHUNK, pool_bytes=64 << 20) as running:
        yield running


def there(stored: list[Stored], asked: tuple[int, ...]) -> set[int]:
    """Positions of `asked` of which some stored row has all the same tokens up to it."""
    found = set()
    for tokens, start, end in stored:
        agreed = next(
            (at for at, (a, b) in enumerate(zip(tokens, asked, strict=False)) if a != b),
            min(len(tokens), len(asked)),
        )
        found |= set(range(start, min(end, agreed)))
    return found


def gaps(positions: set[int], length: int) -> list[tuple[int, int]]:
    """What is missing of [0, length), cut at chunk edges."""
    runs: list[tuple[int, int]] = []
    for at in range(length):
        if at in positions:
            continue
        if runs and runs[-1][1] == at and at % CHUNK:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[Stored], tuple[int, ...]]:
    """Sequences that share beginnings of any length, what is stored of them, and one that is asked for."""
    base = tuple(draw(st.lists(st.integers(0, 3), min_size=3 * CHUNK, max_size=3 * CHUNK)))

    def branch() -> tuple[int, ...]:
        at = draw(st.integers(0, 3 * CHUNK))
        return (*base[:at], *(9 - token for token in base[at:]))

    stored = []
    for _ in range(draw(st.integers(1, 7))):
        tokens = branch()
        chunk = draw(st.integers(0, 2))
        first = draw(st.integers(0, CHUNK - 1))
        end = draw(st.integers(first + 1, CHUNK))
        first, end = draw(st.sampled_from([(first, end), (0, end), (0, CHUNK)]))
        stored.append((tokens, chunk * CHUNK + first, chunk * CHUNK + end))
    return stored, branch()[: draw(st.integers(1, 3 * CHUNK))]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(sequences())
def test_what_is_there_is_found_and_what_is_missing_is_named_to_the_token(
    daemon: RunningDaemon, case: tuple[list[Stored], tuple[int, ...]]
) -> None:
    stored, asked = case
    name = f"pieces-{next(names)}"
    engine = Engine(daemon.url, layout_of(), name)
    for tokens, start, end in stored:
        engine.store_piece(tokens, start, end)
    with connect(daemon.url, daemon.http_url, name) as context:
        said = context.lookup(asked)
        result = context.retrieve(asked)
    engine.close()
    found = there(stored, asked)
    missing = gaps(found, len(asked))
    assert [(miss.start, miss.end) for miss in result.missing] == missing
    assert result.num_tokens == (missing[0][0] if missing else len(asked))
    assert (said.num_tokens, said.missing) == (result.num_tokens, result.missing)
    want = engine.values(asked[: result.num_tokens]).reshape(3, result.num_tokens, 4, 8)
    assert np.array_equal(bits(result.tensor, "bfloat16"), want)


def test_ranks_hold_different_pieces(daemon: RunningDaemon) -> None:
    tokens = tuple(range(2 * CHUNK + 5))
    for rank, end in ((0, 3), (1, 4)):
        layout = layout_of(first_head=2 * rank, num_heads=2, tp_rank=rank, tp_size=2)
        engine = Engine(daemon.url, layout, "two ranks", world_size=2, rank=rank)
        engine.store(tokens, [0])
        engine.store_piece(tokens, CHUNK, CHUNK + 7)
        engine.store_piece(tokens, CHUNK + 6, 2 * CHUNK)
        engine.store_piece(tokens, 2 * CHUNK, 2 * CHUNK + end)
        engine.close()
    with connect(daemon.url, daemon.http_url, "two ranks") as context:
        result = context.retrieve(tokens)
    assert result.num_tokens == 2 * CHUNK + 3
    assert [(miss.start, miss.end, miss.rank, miss.reason) for miss in result.missing] == [
        (2 * CHUNK + 3, 2 * CHUNK + 5, 0, MissReason.TOO_SHORT),
        (2 * CHUNK + 4, 2 * CHUNK + 5, 1, MissReason.TOO_SHORT),
    ]


def test_more_chunks_in_pieces_than_one_request_asks_for(daemon: RunningDaemon) -> None:
    tokens = tuple(range(70 * CHUNK + 3))
    engine = Engine(daemon.url, layout_of(), "many")
    for index in range(70):
        engine.store_piece(tokens, index * CHUNK, index * CHUNK + 9)
        engine.store_piece(tokens, index * CHUNK + 8, (index + 1) * CHUNK)
    with connect(daemon.url, daemon.http_url, "many") as context:
        result = context.retrieve(tokens)
    engine.close()
    assert result.num_tokens == 70 * CHUNK
    want = engine.values(tokens[: 70 * CHUNK]).reshape(3, 70 * CHUNK, 4, 8)
    assert np.array_equal(bits(result.tensor, "bfloat16"), want)
