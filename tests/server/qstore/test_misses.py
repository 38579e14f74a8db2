"""Why chunks are not there: what is remembered, and for how long."""

from __future__ import annotations

from lmcache_qprotocol.keys import KeyFamily, ObjectKey
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.qstore.misses import Misses


def key(number: int, salt: str = "") -> ObjectKey:
    family = KeyFamily(model_name="m", world_size=1, kv_rank=0, cache_salt=salt)
    return ObjectKey(family=family, chunk_hash=number.to_bytes(32, "big"))


def remembered(misses: Misses, numbers: range, salt: str = "") -> list[int]:
    return [n for n in numbers if misses.reason(key(n, salt)) is not MissReason.NOT_STORED]


def test_the_oldest_is_forgotten_first() -> None:
    misses = Misses(kept=3)
    for number in (0, 1, 2, 0, 3):
        misses.note(key(number), MissReason.EVICTED)
    assert remembered(misses, range(4)) == [0, 2, 3]


def test_long_salts_take_the_room_of_many() -> None:
    misses = Misses(kept=100, chars_kept=1000)
    for number in range(50):
        misses.note(key(number), MissReason.EVICTED)
    for number in range(20):
        misses.note(key(number, "x" * 99), MissReason.POOL_FULL)
    assert remembered(misses, range(50)) == []
    assert remembered(misses, range(20), "x" * 99) == list(range(10, 20))


def test_what_is_noted_again_or_forgotten_is_counted_once() -> None:
    misses = Misses(kept=100, chars_kept=1000)
    for _ in range(100):
        misses.note(key(1, "x" * 99), MissReason.EVICTED)
        misses.note(key(2, "x" * 99), MissReason.EVICTED)
        misses.forget(key(2, "x" * 99))
        misses.forget(key(3))
    assert misses.reason(key(1, "x" * 99)) is MissReason.EVICTED
    for number in range(10, 19):
        misses.note(key(number, "x" * 99), MissReason.EVICTED)
    assert misses.reason(key(1, "x" * 99)) is MissReason.EVICTED
