"""The fourteen faults that LMCache 0.5.6 was shown to have, and that this project must not have: one test each.

Where more is to be tested than the fault itself, the tests of the module concerned do it. Each test here has been seen
to fail with the fault planted (docs/peer-faults.md).
"""

from __future__ import annotations

import ast
import ctypes
import fcntl
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import lmcache_qclient
import lmcache_qprotocol
import lmcache_qserver
from lmcache_qclient.capture import adapter as adapter_module
from lmcache_qclient.capture.in_flight import verdict
from lmcache_qclient.capture.ring import QRingBuffer
from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qclient.qcache import connect
from lmcache_qprotocol.codec import decode_reply, encode, encode_request
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.hashing import NONE_HASH, chunk_hash
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import ChunkQuery, RingDescription, StoreOutcome, StoreProof
from lmcache_qprotocol.operations import BY_NAME
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT, BareClient, small_ring
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from tests.server.ring_writer import RingWriter
from tests.server.wire_worker import (
    CHUNK,
    MODEL,
    NOTHING,
    WireWorker,
    leftovers,
    name_of,
    rows_of,
)
from tests.worker_client.capture.no_host_sync import no_host_sync
from tests.worker_client.capture.test_adapter import Bench, FakeHeartbeat
from tests.worker_client.qcache.engine import Engine, layout_of

A, B, C = (name_of(tuple(range(at, at + CHUNK))) for at in (0, 100, 200))
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=CHUNK, pool_bytes="1MiB") as running:
        yield running


@pytest.fixture
def worker(daemon: RunningDaemon) -> Iterator[WireWorker]:
    with WireWorker(daemon) as made:
        yield made
    wait_until(lambda: not daemon.status()["registered_q_ids"], "the worker's instance is gone")
    assert leftovers(daemon) == NOTHING


def test_fault_01_a_one_frame_message_stops_nothing(
    daemon: RunningDaemon, worker: WireWorker
) -> None:
    with BareClient(daemon.url) as hostile:
        for frames in ([b"\x01"], [b""], [b"\xc1"], [b"\x05"]):
            hostile.send(frames)
        assert hostile.ask("noop").result == "OK"
    assert worker.store(A, rows_of(1), salt="1").stored == 1
    assert worker.read(A, salt="1") == rows_of(1)
    assert daemon.get("/livez") == "ok\n"


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.system, (f"touch {self.path}",)


def test_fault_02_no_payload_is_code_and_others_do_not_get_the_memory(
    daemon: RunningDaemon, worker: WireWorker, tmp_path: Path
) -> None:
    trap = pickle.dumps(Trap(tmp_path / "trapped"))
    pickle.loads(trap)
    assert (tmp_path / "trapped").exists(), "the trap works"
    (tmp_path / "trapped").unlink()
    address = msgspec.msgpack.Ext(1, trap)
    register = (address,), MODEL, 1, "t", {"a": msgspec.Raw(encode(address))}, ()
    assert worker.code("register_q_cache", "trap", *register) == "unsupported_transport"
    store = (worker.key(A), "worker", ((0,),), trap, StoreProof(nonces=(1,)))
    assert worker.code("store_q", *store) == "unsupported_transport"
    for operation in (17, "commit_store", trap):
        worker.client.send([b"\x01", encode(operation)[:64], trap, trap, trap])
        worker.client.receive()
    assert not (tmp_path / "trapped").exists()
    assert _imports_of_code_loaders() == []
    if os.geteuid() == 0:
        os.chmod(daemon.folder, 0o755)
        os.chmod(daemon.lifeline, 0o666)
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, daemon.lifeline], check=False)
        assert done.returncode == 0


AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
lifeline.connect(sys.argv[1])
sys.exit(lifeline.recv(1) != b"")
"""


def _imports_of_code_loaders() -> list[str]:
    """Places in the code of all three packages that could run what a peer has sent."""
    found = []
    for package in (lmcache_qprotocol, lmcache_qserver, lmcache_qclient):
        for path in Path(package.__file__ or "").parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [one.name for one in getattr(node, "names", []) if hasattr(one, "asname")]
                names += [getattr(node, "module", None) or ""]
                if {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(names):
                    found.append(f"{path}:{getattr(node, 'lineno', 0)}")
                if isinstance(node, ast.Name) and node.id in {"eval", "exec"}:
                    found.append(f"{path}:{node.lineno}")
    return found


def test_fault_03_a_failed_request_is_answered_and_its_blocks_can_be_used_again(
    worker: WireWorker,
) -> None:
    key = worker.key(A, salt="3")
    proof = StoreProof(nonces=(1,))
    assert worker.code("store_q", key, "worker", ((99,),), b"", proof) == "blocks_not_covering"
    assert worker.code("store_q", key, "nobody", ((0,),), b"", proof) == "unknown_instance"
    assert worker.code("unregister_q_cache", "nobody") == "unknown_instance"
    answered = ReplyFuture(b"uid")
    answered.set_exception(RequestError(ErrorCode.BLOCKS_NOT_COVERING, "as above"))
    assert verdict(answered).copy_over, "the worker gives the ring blocks back"
    assert worker.store(A, rows_of(3), salt="3").stored == 1


def test_fault_04_a_request_id_that_comes_again_names_no_data(worker: WireWorker) -> None:
    for number, name in enumerate((A, B)):
        outcome = worker.store(name, rows_of(40 + number), salt="4", request_id="chat-1")
        assert outcome.stored == 1
    assert worker.read(A, salt="4") == rows_of(40)
    assert worker.read(B, salt="4") == rows_of(41)
    assert worker.read(C, salt="4") == "not_stored"


@pytest.mark.parametrize("end", ["unregistered", "killed", "reaped"])
def test_fault_05_what_was_not_written_is_not_admitted_when_its_writer_goes(end: str) -> None:
    silence = {"reap_timeout_s": 0.2, "registration_grace_s": 0.2}
    settings: dict[str, Any] = silence if end == "reaped" else {}
    with running_daemon(chunk_size=CHUNK, pool_bytes="1MiB", **settings) as daemon:
        with WireWorker(daemon) as worker:
            nonce = worker.ring.write(0, 0, rows_of(5))
            worker.ring.stamp(1, 0)  # given to the chunk, and never written
            key, stores = worker.key(A, B, salt="5"), 3
            for _ in range(stores):
                payloads = (key, "worker", ((0, 1),), b"", StoreProof(nonces=(nonce, nonce + 1)))
                worker.client.send(encode_request(b"\x01", BY_NAME["store_q"], payloads))
            if end == "unregistered":
                worker.client.send(
                    encode_request(b"\x02", BY_NAME["unregister_q_cache"], ("worker",))
                )
                for _ in range(stores):
                    store = decode_reply(worker.client.receive(), BY_NAME["store_q"]).result
                    assert store.outcome.refused == {LossReason.STAMP_MISMATCH: 2}
        wait_until(lambda: not daemon.status()["registered_q_ids"], "the instance is gone")
        with WireWorker(daemon, "reader", register=False) as reader:
            assert reader.read(A, salt="5") in {"stamp_mismatch", "copy_failed", "not_stored"}
            assert reader.read(B, salt="5") in {"stamp_mismatch", "copy_failed", "not_stored"}
        assert leftovers(daemon) == NOTHING
        assert daemon.status()["pool"]["committed_bytes"] == 0


def test_fault_06_what_is_read_has_the_shape_and_type_that_was_stored(
    daemon: RunningDaemon,
) -> None:
    """No disk tier, so nothing is reloaded; but objects of as many bytes and another shape are never mixed up."""
    wide = msgspec.structs.replace(SMALL_LAYOUT, layer_ids=(0,), num_heads=4, total_heads=4)
    half = msgspec.structs.replace(SMALL_LAYOUT, head_dim=16, dtype="float16")
    shapes = {}
    for layout in (SMALL_LAYOUT, wide, half):
        with WireWorker(daemon, register=False) as worker:
            fd, nbytes, stamps_offset = worker.ring.ring
            description = RingDescription(
                layout=layout,
                num_blocks=4,
                block_size=16,
                chunk_size=CHUNK,
                ring_token=worker.lifeline.offer(fd, nbytes),
                stamps_offset=stamps_offset,
            )
            worker.client.ask(
                "register_q_cache", "worker", (), MODEL, 1, "t", None, (), description
            )
            of_layout: dict[str, Any] = {"salt": "6", "layout_id": layout_id(layout)}
            assert worker.store(A, rows_of(layout.head_dim), **of_layout).stored == 1
            family = msgspec.structs.replace(worker.family("6"), layout_id=layout_id(layout))
            query = ChunkQuery(family=family, chunk_hashes=(A,))
            (found,) = worker.client.ask("retrieve_q", query).result.chunks
            assert worker.pool[found.offset : found.offset + 8] == rows_of(layout.head_dim)[:8]
            shapes[layout] = (found.shape, found.dtype)
            worker.client.ask("unregister_q_cache", "worker")
    assert shapes == {
        SMALL_LAYOUT: ((1, 2, 16, 16), "float32"),
        wide: ((1, 1, 16, 32), "float32"),
        half: ((1, 2, 16, 32), "float16"),
    }


def test_fault_07_a_new_ring_under_an_old_id_replaces_the_old_one(worker: WireWorker) -> None:
    old = worker.ring
    assert worker.store(A, rows_of(70), salt="7").stored == 1
    worker.register(RingWriter(small_ring()))
    old.write(0, 0, rows_of(71))
    worker.ring.write(1, 0, rows_of(99))  # so that nonces differ
    assert worker.store(B, rows_of(72), salt="7").stored == 1
    assert worker.read(B, salt="7") == rows_of(72)
    old.close()


def test_fault_08_a_full_pool_says_so_and_room_is_made_when_it_is_needed() -> None:
    pool: dict[str, Any] = {"chunk_size": CHUNK, "pool_bytes": "1MiB"}
    fits = (1 << 20) // PAGE
    with running_daemon(**pool, eviction="none") as daemon, WireWorker(daemon) as worker:
        assert worker.store(A, rows_of(80)).stored == 1
        for number in range(1, fits):
            assert worker.store(os.urandom(32), rows_of(number)).stored == 1
        refused = worker.store(B, rows_of(82))
        assert (refused.stored, refused.refused) == (0, {LossReason.POOL_FULL: 1})
        assert worker.read(B) == MissReason.POOL_FULL.value
        assert worker.read(A) == rows_of(80)
        assert leftovers(daemon) == NOTHING
    with running_daemon(**pool, eviction="lru") as daemon, WireWorker(daemon) as worker:
        assert worker.store(A, rows_of(80)).stored == 1
        (leased,) = worker.retrieve(A).chunks
        assert worker.store(B, rows_of(81)).stored == 1
        for number in range(2 * fits):
            assert worker.store(os.urandom(32), rows_of(number)).stored == 1, "no poll to wait for"
        assert worker.pool[leased.offset : leased.offset + leased.nbytes] == rows_of(80)
        assert worker.read(A) == rows_of(80)
        assert worker.read(B) == MissReason.EVICTED.value


def test_fault_09_a_duplicate_is_a_success_on_every_path(worker: WireWorker) -> None:
    tokens = tuple(range(CHUNK))
    with_tokens: dict[str, Any] = {"parent_hash": NONE_HASH, "piece_tokens": tokens, "salt": "9"}
    assert worker.store(A, rows_of(9), **with_tokens).stored == 1
    once = StoreOutcome(duplicate=1)
    assert worker.store(A, rows_of(9), salt="9") == once
    assert worker.store(A, rows_of(9), **with_tokens) == once
    assert worker.store(A, rows_of(9), block=3, salt="9", request_id="another") == once
    by_server = worker.key(salt="9", end=CHUNK, token_ids=tokens)
    assert worker.send_store(by_server, (0,), (1,)) == once
    piece: dict[str, Any] = {
        "chunk_hashes": (chunk_hash(NONE_HASH, tokens[:5], 0, ()),),
        "end": 5,
        "parent_hash": NONE_HASH,
        "piece_tokens": tokens[:5],
    }
    nonce = worker.ring.write(0, 0, rows_of(9))
    for outcome in (StoreOutcome(stored=1), once):
        assert worker.send_store(worker.key(salt="9", **piece), (0,), (nonce,)) == outcome
    twice = worker.ring.write(0, 0, rows_of(10))
    both = worker.send_store(worker.key(B, salt="9"), (0,), (twice,))
    assert both == StoreOutcome(stored=1)


def test_fault_10_a_failed_store_reserves_nothing(worker: WireWorker) -> None:
    worker.ring.stamp(0, 0)
    for _ in range(20):
        refused = worker.send_store(worker.key(A, salt="10"), (0,), (5,))
        assert refused.refused == {LossReason.STAMP_MISMATCH: 1}
        assert leftovers(worker.daemon) == NOTHING
    assert worker.read(A, salt="10") == MissReason.STAMP_MISMATCH.value
    assert worker.store(A, rows_of(10), salt="10").stored == 1, "at once, not in 600 s"


def test_fault_11_a_missing_rank_is_told_and_holds_no_lease(daemon: RunningDaemon) -> None:
    whole, half = tuple(range(2 * CHUNK)), tuple(range(500, 500 + 2 * CHUNK))
    engines = [
        Engine(
            daemon.url,
            layout_of(first_head=2 * rank, num_heads=2, tp_rank=rank, tp_size=2),
            "two ranks",
            world_size=2,
            rank=rank,
        )
        for rank in range(2)
    ]
    for engine in engines:
        engine.store(whole, [0, 1])
    engines[0].store(half, [0, 1])
    with connect(daemon.url, daemon.http_url, "two ranks") as context:
        assert context.retrieve(whole).num_tokens == 2 * CHUNK
        found = context.retrieve(half)
        assert found.num_tokens == 0
        assert [(miss.index, miss.rank) for miss in found.missing] == [(0, 1), (1, 1)]
        assert leftovers(daemon)["leases"] == 0
        both = context.retrieve(whole).tensor
        assert both.shape == (3, 2 * CHUNK, 4, 8), "the heads of both ranks"
    for engine in engines:
        engine.close()
    wait_until(lambda: not daemon.status()["registered_q_ids"], "the engines are gone")


def test_fault_12_writing_a_layer_waits_for_no_device() -> None:
    """On CPU tensors, by the guard that names what waits; test_no_host_sync.py guards the whole step path."""
    ring = QRingBuffer(2, 4, 4, 6, torch.float32)
    ring._host_bits = None  # the path that a device takes
    slots, stamps = torch.tensor([0, -1, 5]), torch.tensor([7, 8, 9])
    query = torch.arange(18.0).reshape(3, 6)
    with no_host_sync():
        index = ring.index(slots)
        for layer in range(2):
            ring.write(layer, query, index)
        ring.stamp(slots, stamps)
    assert ring.tensors["lmcache_q_layer_1"][1, 1].tolist() == query[2].tolist()


def test_fault_13_ring_blocks_that_may_still_be_copied_are_not_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_module, "Heartbeat", FakeHeartbeat)
    bench = Bench().register()
    bench.submit()
    bench.lose()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.submit() is None, "unhealthy: not sent"
    assert bench.free == 6, "the server may be copying the first store's two blocks"
    bench.restore()
    bench.adapter.reclaim_finished_q_stores()
    assert bench.free == 8, "it has drained them"


def test_fault_14_readers_can_not_write_to_the_pool_nor_cut_it(worker: WireWorker) -> None:
    worker.store(A, rows_of(14), salt="14")
    size, fd = worker.pool_bytes, worker.pool_fd
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(size)
    for one in (fd, again):
        with pytest.raises(PermissionError):
            mmap.mmap(one, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for length_after in (0, size - PAGE, size + PAGE):
            with pytest.raises(OSError, match=r"Invalid|not permitted"):
                os.ftruncate(one, length_after)
        with pytest.raises(OSError, match=r"Bad file|not permitted"):
            os.pwrite(one, b"x", 0)
        assert libc.fallocate(one, 3, ctypes.c_long(0), ctypes.c_long(size)) == -1, "no holes"
        with pytest.raises(PermissionError):
            fcntl.fcntl(one, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(again)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    assert libc.mprotect(ctypes.c_void_p(address), length, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    libc.munmap(ctypes.c_void_p(address), length)
    assert worker.read(A, salt="14") == rows_of(14)
