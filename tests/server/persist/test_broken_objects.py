"""Objects that are not what they were: never served, counted, put aside, and written anew by the next store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from lmcache_qclient.qcache import connect
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.server.persist.l2_folder import (
    file_of,
    objects,
    persist,
    quarantined,
    tier,
    url_of,
    wait_for_index,
)
from tests.server.wire_worker import CHUNK, WireWorker, name_of, rows_of
from tests.worker_client.qcache.engine import Engine, layout_of

HEADER = 4096
Damage = Callable[[Path], None]


def flip(at: int, bit: int = 0) -> Damage:
    """One bit of the byte at this offset; negative from the end."""

    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1 << bit
        path.write_bytes(raw)

    return damage


def replace(old: bytes, new: bytes) -> Damage:
    """Something that the header says."""

    def damage(path: Path) -> None:
        raw = path.read_bytes()
        assert raw.count(old) == 1
        path.write_bytes(raw.replace(old, new))

    return damage


def cut(to: int) -> Damage:
    """Negative: so many bytes of the end."""
    return lambda path: os.truncate(path, to if to >= 0 else path.stat().st_size + to)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def another(of: str) -> Damage:
    """The object of another key, whole and right, under this name: told by a part of its own path."""

    def damage(path: Path) -> None:
        (other,) = (one for one in path.parents[3].rglob("*.safetensors") if of in str(one))
        shutil.copyfile(other, path)

    return damage


def name(number: int) -> bytes:
    return name_of(tuple(range(number, number + CHUNK)))


OTHER = name(999)
DAMAGES: dict[str, Damage] = {
    "first bit of the data": flip(HEADER),
    "last bit of the data": flip(-1, 7),
    "a bit of the header's length": flip(0),
    "a high bit of the header's length": flip(7, 7),
    "a bit of the header": flip(200, 2),
    "a bit of the header's spaces": flip(HEADER - 1, 1),
    "a layer that was not captured": replace(rb"\"layer_ids\":[0,1]", rb"\"layer_ids\":[0,3]"),
    "other rows": replace(b'"rows":"[0,16]"', b'"rows":"[0,15]"'),
    "empty": cut(0),
    "one byte": cut(1),
    "header only": cut(HEADER),
    "in the header": cut(HEADER - 1),
    "one byte short": cut(-1),
    "one byte long": lengthen,
    "another chunk's object": another(OTHER.hex()),
}


def test_what_is_broken_is_a_miss_and_is_put_aside_and_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    numbers = range(len(DAMAGES))
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        for number in numbers:
            assert one.store(name(number), rows_of(number)).stored == 1
        assert one.store(OTHER, rows_of(999)).stored == 1
        persist(one)
        paths = [file_of(folder, one, name(number)) for number in numbers]
    for path, damage in zip(paths, DAMAGES.values(), strict=True):
        damage(path)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert wait_for_index(daemon)["objects"] == len(DAMAGES) + 1
        check_misses(daemon, one, folder, paths)
        assert one.read(OTHER) == rows_of(999)
        for number in numbers:
            assert one.read(name(number)) == "corrupt", "remembered, not looked at again"
            assert one.store(name(number), rows_of(number)).stored == 1
        persist(one)
        now = tier(daemon)
        assert now["written"] == now["missed"]["corrupt"] == now["quarantined"] == len(DAMAGES)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert [one.read(name(number)) for number in numbers] == list(map(rows_of, numbers))
        assert len(quarantined(folder)) == len(DAMAGES), "nobody empties it"


def check_misses(daemon: RunningDaemon, one: WireWorker, folder: Path, paths: list[Path]) -> None:
    """Every damage is found, counted and put aside, and none for a fault of the store."""
    found = {damage: one.read(name(number)) for number, damage in enumerate(DAMAGES)}
    assert found == dict.fromkeys(DAMAGES, "corrupt")
    now = tier(daemon)
    assert now["missed"]["corrupt"] == now["quarantined"] == len(DAMAGES)
    assert (now["missed"]["unavailable"], now["brought"], now["state"]) == (0, 0, "ready")
    assert not any(path.exists() for path in paths)
    assert len(quarantined(folder)) == len(DAMAGES)
    assert len(objects(folder)) == 1


def test_layers_1_9_that_say_1_8_are_never_served(tmp_path: Path) -> None:
    """The bytes would be right, and said to be another layer's."""
    folder, tokens = tmp_path / "l2", tuple(range(3 * CHUNK))
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon:
        engine = Engine(daemon.url, layout_of(layer_ids=(1, 9)))
        engine.store_all(tokens)
        with WireWorker(daemon, register=False) as one:
            persist(one)
        engine.close()
    damage = replace(rb"\"layer_ids\":[1,9]", rb"\"layer_ids\":[1,8]")
    last = max(objects(folder), key=lambda path: rb"[32,48]" in path.read_bytes()[:HEADER])
    damage(last)
    with (
        running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon,
        connect(daemon.url, daemon.http_url, "org/model") as context,
    ):
        result = context.retrieve(tokens)
        assert (result.num_tokens, result.layer_ids) == (2 * CHUNK, (1, 9))
        assert [miss.reason.value for miss in result.missing] == ["corrupt"]
        assert len(quarantined(folder)) == 1


def test_a_model_is_known_though_the_first_objects_of_it_are_broken(tmp_path: Path) -> None:
    folder, tokens = tmp_path / "l2", tuple(range(4 * CHUNK))
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon:
        engine = Engine(daemon.url, layout_of())
        engine.store_all(tokens)
        with WireWorker(daemon, register=False) as one:
            persist(one)
        engine.close()
    for path in objects(folder)[1:]:
        cut(0)(path)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon:
        wait_for_index(daemon)
        (model,) = daemon.status()["models"]
        assert (model["chunks"], model["persisted"]) == (0, 4)


def test_an_object_that_is_put_back_whole_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert one.store(name(1), rows_of(1)).stored == 1
        persist(one)
        path = file_of(folder, one, name(1))
    whole = path.read_bytes()
    flip(HEADER)(path)
    with running_daemon(l2=url_of(folder), chunk_size=CHUNK) as daemon, WireWorker(daemon) as one:
        assert one.read(name(1)) == "corrupt"
        path.write_bytes(whole)
        assert one.read(name(1)) == rows_of(1)
