"""The SDK against the real daemon: what comes back is what was stored, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_qclient.qcache import ItemIdentity, LoraIdentity, MissReason, QCacheContext, connect
from lmcache_qclient.qcache.stitch import bits_dtype
from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.identity import Identity
from lmcache_qprotocol.layout import Layout
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from tests.worker_client.qcache.engine import CHUNK, Engine, expected, layout_of

TOKENS = [7 * number % 1000 for number in range(5 * CHUNK + 3)]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=CHUNK, pool_bytes=4 << 20, allow_inline=True) as running:
        yield running


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[RunningDaemon]:
    """For tests that use a model name of their own."""
    with running_daemon(chunk_size=CHUNK, pool_bytes=16 << 20) as running:
        yield running


def opened(daemon: RunningDaemon, model_name: str | None = None) -> QCacheContext:
    return connect(daemon.url, daemon.http_url, model_name)


def bits(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    raw = tensor.contiguous().view(torch.uint8).numpy()
    return raw.view(bits_dtype(dtype))


def whole(tokens: int, layout: Layout) -> np.ndarray[Any, Any]:
    """Bits of all heads of the first tokens."""
    heads = range(layout.total_heads)
    return expected(TOKENS[:tokens], layout.layer_ids, heads, layout.head_dim, layout.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int8", "float64"])
def test_every_bit_comes_back(shared_daemon: RunningDaemon, dtype: str) -> None:
    layout = layout_of(dtype=dtype, layer_ids=(1, 9, 4))
    engine = Engine(shared_daemon.url, layout, f"bits/{dtype}")
    engine.store(TOKENS, range(5))
    with opened(shared_daemon, f"bits/{dtype}") as context:
        result = context.retrieve(TOKENS)
    engine.close()
    assert result.num_tokens == 5 * CHUNK
    assert result.tensor.dtype == getattr(torch, dtype)
    assert result.tensor.shape == (3, 5 * CHUNK, 4, 8)
    assert result.tensor.is_contiguous()
    assert result.layer_ids == (1, 9, 4)
    assert result.axes == ("layer", "token", "head", "head_dim")
    assert np.array_equal(bits(result.tensor, dtype), whole(5 * CHUNK, layout))
    (tail,) = result.missing
    assert (tail.index, tail.start, tail.end, tail.reason, tail.rank) == (
        5,
        5 * CHUNK,
        len(TOKENS),
        MissReason.TOO_SHORT,
        None,
    )


def test_a_gap_ends_the_prefix_and_is_named(shared_daemon: RunningDaemon) -> None:
    engine = Engine(shared_daemon.url, layout_of(), "gap")
    engine.store(TOKENS, [0, 1, 3])
    with opened(shared_daemon, "gap") as context:
        found = context.lookup(TOKENS)
        result = context.retrieve(TOKENS)
    engine.close()
    assert found.num_tokens == result.num_tokens == 2 * CHUNK
    assert found.missing == result.missing
    assert [(miss.index, miss.reason) for miss in result.missing] == [
        (2, MissReason.NOT_STORED),
        (4, MissReason.NOT_STORED),
        (5, MissReason.TOO_SHORT),
    ]
    assert result.missing[0].rank == 0
    assert np.array_equal(bits(result.tensor, "bfloat16"), whole(2 * CHUNK, layout_of()))


def test_forms_of_token_ids(shared_daemon: RunningDaemon) -> None:
    engine = Engine(shared_daemon.url, layout_of(), "forms")
    engine.store(TOKENS, range(5))
    with opened(shared_daemon, "forms##query") as context:
        want = whole(5 * CHUNK, layout_of())
        for form in (TOKENS, tuple(TOKENS), np.array(TOKENS), torch.tensor(TOKENS)):
            assert np.array_equal(bits(context.retrieve(form).tensor, "bfloat16"), want)
        empty = context.retrieve([])
        with pytest.raises(ValueError, match="2 axes"):
            context.retrieve(torch.tensor([TOKENS]))
    engine.close()
    assert (empty.num_tokens, empty.missing, tuple(empty.tensor.shape)) == (0, (), (3, 0, 4, 8))


def test_salt_lora_and_items_keep_apart(shared_daemon: RunningDaemon) -> None:
    lora = LoraIdentity("adapter", "/path")
    item = ItemIdentity("mm", "digest", 2 * CHUNK + 1)
    engine = Engine(shared_daemon.url, layout_of(), "identity")
    engine.store(TOKENS, range(5), salt="s", identity=Identity(lora, (item,)))
    with opened(shared_daemon, "identity") as context:
        found = context.lookup(TOKENS, cache_salt="s", lora=lora, mm=[item])
        assert found.num_tokens == 5 * CHUNK
        assert context.lookup(TOKENS, cache_salt="s", lora=lora).num_tokens == 2 * CHUNK
        assert context.lookup(TOKENS, cache_salt="s", mm=[item]).num_tokens == 0
        assert context.lookup(TOKENS, lora=lora, mm=[item]).num_tokens == 0
    engine.close()


def test_into_a_tensor_of_the_callers(shared_daemon: RunningDaemon) -> None:
    engine = Engine(shared_daemon.url, layout_of(), "out")
    engine.store(TOKENS, range(3))
    with opened(shared_daemon, "out") as context:
        out = torch.zeros(3, 4 * CHUNK, 4, 8, dtype=torch.bfloat16)
        result = context.retrieve(TOKENS, out=out)
        assert result.tensor.data_ptr() == out.data_ptr()
        assert np.array_equal(bits(result.tensor, "bfloat16"), whole(3 * CHUNK, layout_of()))
        assert not out[:, 3 * CHUNK :].any()
        for bad, words in [
            (torch.zeros(3, 2 * CHUNK, 4, 8, dtype=torch.bfloat16), "shape"),
            (torch.zeros(2, 4 * CHUNK, 4, 8, dtype=torch.bfloat16), "shape"),
            (torch.zeros(3, 4 * CHUNK, 4, 8), "dtype"),
            (torch.zeros(3, 4, 4 * CHUNK, 8, dtype=torch.bfloat16).transpose(1, 2), "contiguous"),
        ]:
            with pytest.raises(ValueError, match=words):
                context.retrieve(TOKENS, out=bad)
    engine.close()


def test_tensor_and_pipeline_parallel_ranks_make_one_tensor(shared_daemon: RunningDaemon) -> None:
    engines = []
    for rank in range(4):
        pp_rank, tp_rank = divmod(rank, 2)
        layout = layout_of(
            layer_ids=(2 * pp_rank, 2 * pp_rank + 1),
            first_head=2 * tp_rank,
            num_heads=2,
            tp_rank=tp_rank,
            tp_size=2,
            pp_rank=pp_rank,
            pp_size=2,
        )
        engines.append(Engine(shared_daemon.url, layout, "ranks", world_size=4, rank=rank))
        engines[-1].store(TOKENS, range(3 if rank == 2 else 5))
    with opened(shared_daemon, "ranks") as context:
        result = context.retrieve(TOKENS)
    for engine in engines:
        engine.close()
    assert result.layer_ids == (0, 1, 2, 3)
    assert result.num_tokens == 3 * CHUNK
    want = expected(TOKENS[: 3 * CHUNK], range(4), range(4), 8, "bfloat16")
    assert np.array_equal(bits(result.tensor, "bfloat16"), want)
    assert [(miss.index, miss.rank) for miss in result.missing] == [(3, 2), (4, 2), (5, None)]


def test_a_rank_that_stored_nothing_is_named(shared_daemon: RunningDaemon) -> None:
    layout = layout_of(first_head=2, num_heads=2, tp_rank=1, tp_size=2)
    engine = Engine(shared_daemon.url, layout, "half", world_size=2, rank=1)
    engine.store(TOKENS, range(5))
    with opened(shared_daemon, "half") as context:
        result = context.retrieve(TOKENS)
    engine.close()
    assert result.num_tokens == 0
    assert tuple(result.tensor.shape) == (3, 0, 4, 8)
    assert {miss.rank for miss in result.missing[:-1]} == {0}
    assert len(result.missing) == 6


def test_leases_are_given_back(shared_daemon: RunningDaemon) -> None:
    engine = Engine(shared_daemon.url, layout_of(), "leases")
    engine.store(TOKENS, range(5))
    with opened(shared_daemon, "leases") as context:
        context.retrieve(TOKENS)
        with pytest.raises(ValueError, match="shape"):
            context.retrieve(TOKENS, out=torch.zeros(1))
        wait_until(lambda: not shared_daemon.status()["leases"]["count"], "leases are given back")
    engine.close()


def test_more_than_one_lease_holds_is_read_in_turns(daemon: RunningDaemon) -> None:
    """A client may lease a quarter of the pool: 1 of 4 MiB; this is 1.2 MiB."""
    layout = layout_of(layer_ids=tuple(range(16)), num_heads=32, total_heads=32, head_dim=32)
    engine = Engine(daemon.url, layout)
    tokens = (TOKENS * 10)[: 4 * CHUNK]
    assert 4 * CHUNK * layout.token_bytes > 1 << 20
    engine.store(tokens, range(4))
    with opened(daemon) as context:
        result = context.retrieve(tokens)
        wait_until(lambda: not daemon.status()["leases"]["count"], "leases are given back")
    engine.close()
    want = expected(tokens, layout.layer_ids, range(32), 32, "bfloat16")
    assert np.array_equal(bits(result.tensor, "bfloat16"), want)


def test_it_survives_a_restart_of_the_server() -> None:
    with running_daemon(chunk_size=CHUNK) as daemon:
        engine = Engine(daemon.url, layout_of())
        engine.store(TOKENS, range(5))
        context = opened(daemon)
        assert context.retrieve(TOKENS).num_tokens == 5 * CHUNK
        engine.close()
        url, http_port = daemon.url, daemon.http_url.rpartition(":")[2]
        daemon.process.kill()
        daemon.process.wait()
    context._session.timeout_s = 0.2
    with pytest.raises(ConnectionError, match="lmcache-qserver start"):
        context.lookup(TOKENS)
    context._session.timeout_s = 10.0
    with running_daemon(chunk_size=CHUNK, url=url, http_port=http_port) as daemon:
        assert context.lookup(TOKENS).num_tokens == 0
        engine = Engine(daemon.url, layout_of())
        engine.store(TOKENS, range(2))
        result = context.retrieve(TOKENS)
        engine.close()
        context.close()
    assert np.array_equal(bits(result.tensor, "bfloat16"), whole(2 * CHUNK, layout_of()))


def test_a_server_that_comes_back_with_another_chunk_size_is_asked_by_that() -> None:
    with running_daemon(chunk_size=CHUNK) as daemon:
        engine = Engine(daemon.url, layout_of())
        engine.store(TOKENS, range(5))
        context = opened(daemon)
        assert context.lookup(TOKENS).num_tokens == 5 * CHUNK
        engine.close()
        url, http_port = daemon.url, daemon.http_url.rpartition(":")[2]
        daemon.process.kill()
        daemon.process.wait()
    with running_daemon(chunk_size=2 * CHUNK, url=url, http_port=http_port) as daemon:
        assert context.lookup(TOKENS).num_tokens == 0, "nothing is known yet"
        engine = Engine(daemon.url, layout_of(), chunk_size=2 * CHUNK)
        assert context.lookup(TOKENS).missing[0].end == 2 * CHUNK
        engine.close()
        context.close()


@pytest.mark.parametrize("salt", [None, 5, b"bytes", "x" * 4097])
def test_a_salt_that_can_not_be_one(shared_daemon: RunningDaemon, salt: Any) -> None:
    engine = Engine(shared_daemon.url, layout_of(), "salted")
    with opened(shared_daemon, "salted") as context, pytest.raises(ValueError, match="cache_salt"):
        context.lookup(TOKENS, cache_salt=salt)
    engine.close()


def test_out_must_be_a_tensor(shared_daemon: RunningDaemon) -> None:
    engine = Engine(shared_daemon.url, layout_of(), "no tensor")
    with opened(shared_daemon, "no tensor") as context, pytest.raises(TypeError, match="ndarray"):
        context.retrieve(TOKENS, out=np.empty((3, 80, 4, 8)))  # type: ignore[arg-type]
    engine.close()


def test_the_layout_is_found_when_the_engine_comes_later(daemon: RunningDaemon) -> None:
    with opened(daemon) as context:
        assert context.layouts == ()
        with pytest.raises(ValueError, match="let the engine run"):
            context.retrieve(TOKENS)
        engine = Engine(daemon.url, layout_of())
        assert context.lookup(TOKENS).num_tokens == 0
        engine.store(TOKENS, range(2))
        assert context.retrieve(TOKENS).num_tokens == 2 * CHUNK
        engine.close()


def test_unknown_and_ambiguous_models(daemon: RunningDaemon) -> None:
    engines = [Engine(daemon.url, layout_of(), name) for name in ("one", "two")]
    with pytest.raises(ValueError, match="several: one, two"):
        opened(daemon)
    with opened(daemon, "three") as context, pytest.raises(ValueError, match=r"three.*one, two"):
        context.retrieve(TOKENS)
    for engine in engines:
        engine.close()


def test_several_layouts_of_one_model(daemon: RunningDaemon) -> None:
    for layer_ids in ((0, 1, 2), (1,)):
        engine = Engine(daemon.url, layout_of(layer_ids=layer_ids))
        engine.store(TOKENS, range(5))
        engine.close()
    with opened(daemon) as context:
        assert context.retrieve(TOKENS).layer_ids == (0, 1, 2), "the widest, when nothing is said"
        for layout in context.layouts:
            result = context.retrieve(TOKENS, layout=layout)
            assert result.layer_ids == layout.layer_ids
            assert result.tensor.shape[0] == len(layout.layer_ids)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_without_a_way_to_the_servers_memory(daemon: RunningDaemon, transport: str) -> None:
    """Bytes come inline, unless the caller wants them by no other way than memory."""
    engine = Engine(daemon.url, layout_of())
    engine.store(TOKENS, range(5))
    with connect(daemon.url, daemon.http_url, transport=transport) as context:
        mapped = context.retrieve(TOKENS).tensor
        daemon_socket = daemon.folder / "lifeline.sock"
        daemon_socket.rename(daemon.folder / "moved.sock")
        context._session._renew()
        assert context.lookup(TOKENS).num_tokens == 5 * CHUNK
        if transport == "auto":
            assert context.transport == "inline"
            inline = context.retrieve(TOKENS).tensor
            assert torch.equal(inline.view(torch.int16), mapped.view(torch.int16))
        else:
            with pytest.raises(RequestError) as caught:
                context.retrieve(TOKENS)
            assert caught.value.code is ErrorCode.LIFELINE_REQUIRED
        (daemon.folder / "moved.sock").rename(daemon_socket)
    engine.close()


def test_nobody_there() -> None:
    with pytest.raises(ConnectionError, match="lmcache-qserver start"):
        connect("tcp://127.0.0.1:9", timeout_s=0.1)
