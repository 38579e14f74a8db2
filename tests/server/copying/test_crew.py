"""A shared copy is complete when it returns, and a helper that hangs is nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_qserver.copying import crew as crew_module
from lmcache_qserver.copying.crew import MIN_SHARED_BYTES, SEGMENT_BYTES, Crew, Segment, cut

NBYTES = 2 * MIN_SHARED_BYTES
DEADLINE_S = 20.0


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(1, 8)
    yield crew
    crew.close()


def buffers() -> tuple[Any, Any]:
    source = np.random.default_rng(3).integers(1, 255, NBYTES, np.uint8)
    return np.zeros_like(source), source


def hold_helpers(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> threading.Event:
    """Helpers wait at the gate before their first copy; set when one has come there."""
    arrived = threading.Event()
    plain = crew_module._copy

    def copy(target: Any, source: Any, segment: Segment) -> None:
        if threading.current_thread().name.startswith("copy-helper"):
            arrived.set()
            assert gate.wait(DEADLINE_S)
        else:
            assert arrived.wait(DEADLINE_S)
        plain(target, source, segment)

    monkeypatch.setattr(crew_module, "_copy", copy)
    return arrived


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 5 * SEGMENT_BYTES))
def test_segments_are_the_range_again(target: int, source: int, nbytes: int) -> None:
    at = 0
    for segment in cut(target, source, nbytes):
        assert (segment.target, segment.source) == (target + at, source + at)
        assert 0 < segment.nbytes <= SEGMENT_BYTES
        at += segment.nbytes
    assert at == nbytes


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_every_byte_arrives(helpers: int) -> None:
    crew = Crew(helpers, 8)
    target, source = buffers()
    half = NBYTES // 2
    # The halves change places, so that the two offsets differ.
    crew.copy(target, source, [*cut(0, half, half), *cut(half, 0, half)])
    assert np.array_equal(target[:half], source[half:])
    assert np.array_equal(target[half:], source[:half])
    assert crew.free == helpers
    crew.close()


def test_a_copy_is_over_only_when_the_helpers_part_is(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    arrived = hold_helpers(monkeypatch, gate)
    target, source = buffers()
    lane = threading.Thread(target=crew.copy, args=(target, source, list(cut(0, 0, NBYTES))))
    lane.start()
    assert arrived.wait(DEADLINE_S)
    lane.join(0.1)
    assert lane.is_alive(), "it returned while a helper still had a segment"
    gate.set()
    lane.join(DEADLINE_S)
    assert np.array_equal(target, source)
    assert crew.free == 1


def test_a_hanging_helper_is_not_given_to_another_lane(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    arrived = hold_helpers(monkeypatch, gate)
    target, source = buffers()
    hung = threading.Thread(target=crew.copy, args=(target, source, list(cut(0, 0, NBYTES))))
    hung.start()
    assert arrived.wait(DEADLINE_S)
    assert crew.free == 0
    other, source = buffers()
    crew.copy(other, source, list(cut(0, 0, NBYTES)))
    assert np.array_equal(other, source)
    gate.set()
    hung.join(DEADLINE_S)


@pytest.mark.parametrize("place", [0, 7])
def test_a_copy_that_fails_raises_here_and_frees_the_helper(crew: Crew, place: int) -> None:
    target, source = buffers()
    segments = list(cut(0, 0, NBYTES))
    segments[place] = Segment(0, NBYTES - 5, SEGMENT_BYTES)  # more than there is
    with pytest.raises(ValueError, match="broadcast"):
        crew.copy(target, source, segments)
    assert crew.free == 1


def test_a_small_copy_wakes_nobody(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_take", lambda: pytest.fail("a helper was taken"))
    target, source = buffers()
    crew.copy(target, source, list(cut(0, 0, MIN_SHARED_BYTES - 1)))
    assert np.array_equal(target[: MIN_SHARED_BYTES - 1], source[: MIN_SHARED_BYTES - 1])


def test_a_crew_of_none_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", lambda **_: pytest.fail("a thread was started"))
    target, source = buffers()
    Crew(0, 8).copy(target, source, list(cut(0, 0, NBYTES)))
    assert np.array_equal(target, source)


def test_a_helper_is_taken_only_where_a_processor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes that keep both processors busy gain nothing from helpers, and pay for their turns."""
    crew = Crew(2, processors=2)
    entered, gate = threading.Event(), threading.Event()
    plain = crew_module._copy
    helped: list[object] = []
    plainly_begin = crew_module._Helper.begin

    def begin(helper: Any, work: Any) -> None:
        helped.append(work)
        plainly_begin(helper, work)

    monkeypatch.setattr(crew_module._Helper, "begin", begin)

    def copy(target: Any, source: Any, segment: Segment) -> None:
        if threading.current_thread().name == "other lane":
            entered.set()
            assert gate.wait(DEADLINE_S)
        plain(target, source, segment)

    monkeypatch.setattr(crew_module, "_copy", copy)
    small = np.zeros(8, np.uint8), np.ones(8, np.uint8), [Segment(0, 0, 8)]
    other = threading.Thread(target=crew.copy, args=small, name="other lane")
    other.start()
    assert entered.wait(DEADLINE_S)
    target, source = buffers()
    crew.copy(target, source, list(cut(0, 0, NBYTES)))
    assert np.array_equal(target, source)
    assert not helped
    gate.set()
    other.join(DEADLINE_S)
    crew.copy(target, source, list(cut(0, 0, NBYTES)))
    assert len(helped) == 1
    assert crew.free == 2
    crew.close()


@pytest.mark.parametrize("helpers", [0, 1])
@pytest.mark.parametrize("nbytes", [1000, MIN_SHARED_BYTES + 12345])
def test_what_is_looked_at_behind_is_the_whole_target_in_order(helpers: int, nbytes: int) -> None:
    source = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    target = np.zeros_like(source)
    crew = Crew(helpers, 4)
    seen: list[bytes] = []
    for _ in range(20):
        target[:] = 0
        seen.clear()
        crew.copy(target, source, list(cut(0, 0, nbytes)), lambda part: seen.append(part.tobytes()))
        assert b"".join(seen) == source.tobytes()
    crew.close()


def test_a_segment_is_looked_at_only_when_it_has_been_copied(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper holds a segment back: nothing from it on may be looked at."""
    gate = threading.Event()
    arrived = hold_helpers(monkeypatch, gate)
    target, source = buffers()
    seen: list[bytes] = []
    lane = threading.Thread(
        target=crew.copy,
        args=(target, source, list(cut(0, 0, NBYTES)), lambda part: seen.append(part.tobytes())),
    )
    lane.start()
    assert arrived.wait(DEADLINE_S)
    lane.join(0.1)
    assert len(seen) < NBYTES // SEGMENT_BYTES
    gate.set()
    lane.join(DEADLINE_S)
    assert b"".join(seen) == source.tobytes()
