"""Edited tensors, stored back through the SDK into the real daemon: what comes back is what was stored, to the bit."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_qclient.qcache import (
    ItemIdentity,
    Layout,
    LoraIdentity,
    LossReason,
    MissReason,
    QCacheContext,
    StoreConflict,
    StoreRefused,
    connect,
)
from lmcache_qclient.qcache.part_store import PartStore
from lmcache_qclient.qcache.tensors import torch_dtype
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from tests.worker_client.qcache.engine import CHUNK, Engine, expected, layout_of
from tests.worker_client.qcache.test_retrieve import bits

TOKENS = [7 * number % 1000 for number in range(5 * CHUNK + 3)]
OBJECTS = 6
"""Five chunks and a tail, of one rank."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """For tests that use a model name of their own."""
    with running_daemon(chunk_size=CHUNK, pool_bytes=16 << 20, allow_inline=True) as running:
        yield running


def opened(daemon: RunningDaemon, model_name: str, **options: Any) -> QCacheContext:
    return connect(daemon.url, daemon.http_url, model_name, **options)


def announced(daemon: RunningDaemon, model_name: str, **layout: Any) -> Engine:
    """An engine of one rank that has stored nothing yet."""
    return Engine(daemon.url, layout_of(**layout), model_name)


def values(
    tokens: int = len(TOKENS),
    seed: int = 1,
    dtype: str = "bfloat16",
    layers: int = 3,
    heads: int = 4,
    head_dim: int = 8,
) -> torch.Tensor:
    """Any bits, NaN and all."""
    shape = (layers, tokens, heads, head_dim * torch_dtype(dtype).itemsize)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, shape, generator=generator)
    return raw.to(torch.uint8).view(torch_dtype(dtype))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float32", "float64", "float8_e4m3fn", "int8", "int64", "bool"]
)
def test_every_bit_comes_back_and_so_does_any_prefix(daemon: RunningDaemon, dtype: str) -> None:
    model = f"round trip/{dtype}"
    engine = announced(daemon, model, dtype=dtype, layer_ids=(1, 9, 4))
    tensor = values(dtype=dtype)
    with opened(daemon, model) as cache:
        stored = cache.store(TOKENS, tensor, cache_salt="edit")
        assert (stored.num_tokens, stored.stored, stored.duplicate) == (len(TOKENS), OBJECTS, 0)
        assert stored.nbytes == tensor.nbytes
        found = cache.retrieve(TOKENS, cache_salt="edit")
        assert found.layer_ids == (1, 9, 4)
        assert not found.missing
        assert same(found.tensor, tensor)
        for length in (1, CHUNK - 1, CHUNK, 2 * CHUNK + 5, 5 * CHUNK + 1):
            front = cache.retrieve(TOKENS[:length], cache_salt="edit").tensor
            assert same(front, tensor[:, :length])
        assert cache.lookup(TOKENS).num_tokens == 0, "stored under its salt alone"
    engine.close()


def test_all_ranks_of_tp_and_pp_get_their_part(daemon: RunningDaemon) -> None:
    engines = []
    for rank, (pp_rank, tp_rank) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        layout = layout_of(
            layer_ids=((0, 1, 2), (3, 4))[pp_rank],
            first_head=2 * tp_rank,
            num_heads=2,
            tp_rank=tp_rank,
            tp_size=2,
            pp_rank=pp_rank,
            pp_size=2,
        )
        engines.append(Engine(daemon.url, layout, "tp pp", world_size=4, rank=rank))
    for engine in engines:
        engine.store_all(TOKENS)
    tensor = values(layers=5)
    with opened(daemon, "tp pp") as cache:
        original = cache.retrieve(TOKENS)
        stored = cache.store(TOKENS, tensor, cache_salt="edit")
        assert (stored.stored, stored.nbytes) == (4 * OBJECTS, tensor.nbytes)
        assert same(cache.retrieve(TOKENS, cache_salt="edit").tensor, tensor)
        assert same(cache.retrieve(TOKENS).tensor, original.tensor), "the engine's is as it was"
        assert original.num_tokens == len(TOKENS)
    for engine in engines:
        engine.close()


def test_layers_of_unlike_shapes_are_a_list(daemon: RunningDaemon) -> None:
    layers = (0, 1, 2, 3)
    for shape in ({"layer_ids": (0, 2)}, {"layer_ids": (1, 3), "head_dim": 16}):
        engine = announced(daemon, "unlike", all_layer_ids=layers, **shape)
        engine.store_all([1, 2, 3])
        engine.close()
    tensors = [values(layers=2), values(layers=2, head_dim=16)]
    with opened(daemon, "unlike") as cache:
        stored = cache.store(TOKENS, tensors, cache_salt="edit")
        assert stored.stored == 2 * OBJECTS
        found = cache.retrieve(TOKENS, cache_salt="edit")
        for group, tensor in zip(found.groups, tensors, strict=True):
            assert same(group.tensor, tensor)
        with pytest.raises(
            ValueError, match=r"2 shapes of layers.*\[2, 83, 4, 8\].*\[2, 83, 4, 16"
        ):
            cache.store(TOKENS, tensors[0], cache_salt="edit")


def test_other_values_under_one_salt_are_refused_and_the_first_stay(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "conflict")
    first = values(seed=1)
    other = first.clone()
    other.view(torch.int16)[1, 2 * CHUNK + 4, 3, 7] ^= 1
    with opened(daemon, "conflict") as cache:
        cache.store(TOKENS, first, cache_salt="s")
        with pytest.raises(StoreConflict, match="Choose another cache_salt") as caught:
            cache.store(TOKENS, other, cache_salt="s")
        assert (caught.value.token, caught.value.chunk) == (2 * CHUNK + 4, 2)
        assert caught.value.stored.stored == 0, "nothing was sent"
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, first)
        cache.store(TOKENS, other, cache_salt="another")
        assert same(cache.retrieve(TOKENS, cache_salt="another").tensor, other)
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, first)
    engine.close()


@pytest.mark.parametrize("length", [5 * CHUNK + 2, 4 * CHUNK + 5, len(TOKENS)])
def test_a_tail_of_another_length_is_another_object_and_a_conflict_all_the_same(
    daemon: RunningDaemon, length: int
) -> None:
    """Its key is free, but who asks for these tokens would get the other one's rows."""
    model = f"tails/{length}"
    engine = announced(daemon, model)
    first = values()
    changed = first[:, :length].clone()
    changed.view(torch.int16)[0, length - 1, 0, 0] ^= 1
    with opened(daemon, model) as cache:
        cache.store(TOKENS, first, cache_salt="s")
        with pytest.raises(StoreConflict) as caught:
            cache.store(TOKENS[:length], changed, cache_salt="s")
        assert caught.value.token == length - 1
        assert same(cache.retrieve(TOKENS[:length], cache_salt="s").tensor, first[:, :length])
    engine.close()


@pytest.mark.parametrize("rows", [(0, 9), (5, 9), (0, CHUNK)])
def test_what_lies_behind_a_gap_is_compared_too(
    daemon: RunningDaemon, rows: tuple[int, int]
) -> None:
    model = f"gap/{rows}"
    engine = announced(daemon, model)
    engine.store_piece(TOKENS, 3 * CHUNK + rows[0], 3 * CHUNK + rows[1], cache_salt="s")
    with opened(daemon, model) as cache:
        with pytest.raises(StoreConflict) as caught:
            cache.store(TOKENS, values(), cache_salt="s")
        assert caught.value.token == 3 * CHUNK + rows[0]
        assert caught.value.stored.stored == 0
    engine.close()


def test_who_stores_other_values_meanwhile_is_noticed(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = announced(daemon, "meanwhile")
    register = PartStore.__enter__

    def be_late(self: PartStore) -> PartStore:
        monkeypatch.undo()
        with opened(daemon, "meanwhile") as other:
            other.store(TOKENS[:CHUNK], values(CHUNK), cache_salt="s")
        return register(self)

    with opened(daemon, "meanwhile") as cache:
        monkeypatch.setattr(PartStore, "__enter__", be_late)
        with pytest.raises(StoreConflict) as caught:
            cache.store(TOKENS, values(seed=2), cache_salt="s")
        stored = caught.value.stored
        assert (caught.value.token, stored.stored, stored.duplicate) == (0, OBJECTS - 1, 1)
    engine.close()


def test_the_same_again_is_a_duplicate_and_more_of_it_is_added(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "again")
    tensor = values()
    with opened(daemon, "again") as cache:
        begin = 3 * CHUNK + 5
        first = cache.store(TOKENS[:begin], tensor[:, :begin], cache_salt="s")
        assert (first.stored, first.duplicate) == (4, 0)
        again = cache.store(TOKENS[:begin], tensor[:, :begin], cache_salt="s")
        assert (again.stored, again.duplicate, again.nbytes) == (0, 4, 0)
        more = cache.store(TOKENS, tensor, cache_salt="s")
        assert (more.stored, more.duplicate) == (3, 3)
        assert more.nbytes == tensor[:, : 2 * CHUNK + 3].nbytes
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, tensor)
    engine.close()


def test_a_rank_that_is_refused_is_named_with_its_chunks() -> None:
    """The second stage's chunks are larger than the pool."""
    with running_daemon(chunk_size=CHUNK, pool_bytes=1 << 20) as daemon:
        stages = [(0,), tuple(range(1, 40))]
        engines = [
            Engine(
                daemon.url,
                layout_of(layer_ids=layers, head_dim=256, pp_rank=rank, pp_size=2),
                "full",
                world_size=2,
                rank=rank,
            )
            for rank, layers in enumerate(stages)
        ]
        tensor = values(2 * CHUNK, layers=40, head_dim=256)
        with opened(daemon, "full") as cache:
            with pytest.raises(
                StoreRefused, match=r"chunk 0 \(tokens 0 to 16\) of rank 1: pool_full"
            ) as caught:
                cache.store(TOKENS[: 2 * CHUNK], tensor, cache_salt="s")
            assert "larger than the whole pool" in str(caught.value)
            assert "stored before: 2 objects new" in str(caught.value)
            assert caught.value.stored.stored == 2
            first = caught.value.refused[0]
            assert (first.index, first.rank, first.reason) == (0, 1, LossReason.POOL_FULL)
            wait_until(lambda: len(daemon.status()["q_context_meta"]) == 2, "ours is gone again")
        for engine in engines:
            engine.close()


def test_a_pool_that_drops_the_beginning_for_the_end_is_told_of() -> None:
    with running_daemon(chunk_size=CHUNK, pool_bytes=1 << 20) as daemon:
        engine = announced(daemon, "small", head_dim=512)
        tokens = list(range(10 * CHUNK))
        tensor = values(len(tokens), head_dim=512)
        assert tensor.nbytes > 1 << 20
        with opened(daemon, "small") as cache:
            with pytest.raises(StoreRefused, match="--pool-bytes") as caught:
                cache.store(tokens, tensor, cache_salt="s")
            assert {one.reason for one in caught.value.refused} == {MissReason.EVICTED}
            assert caught.value.stored.stored == 10
        engine.close()


def test_what_can_not_be_stored_is_said_before_anything_is(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "wrong")
    tensor = values()
    with opened(daemon, "wrong") as cache:
        for wrong in (
            tensor[:2],
            tensor[:, :-1],
            tensor[:, :, :2],
            tensor[..., :4],
            tensor.float(),
            tensor.view(torch.float16),
            tensor.float().numpy(),
            tensor.view(torch.uint8).numpy(),
        ):
            with pytest.raises(ValueError, match=r"\[3, 83, 4, 8\] bfloat16 .*is needed"):
                cache.store(TOKENS, wrong, cache_salt="s")
        with pytest.raises(TypeError, match="not a bytes"):
            cache.store(TOKENS, b"tensor", cache_salt="s")
        for salt in ("", None, 5):
            with pytest.raises(ValueError, match="a cache_salt of its own"):
                cache.store(TOKENS, tensor, cache_salt=salt)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at most"):
            cache.store(TOKENS, tensor, cache_salt="x" * 4097)
        with pytest.raises(TypeError, match="cache_salt"):
            cache.store(TOKENS, tensor)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="key"):
            cache.store(TOKENS, tensor, cache_salt="s", feature="key")
        empty = cache.store([], tensor[:, :0], cache_salt="s")
        assert (empty.num_tokens, empty.stored) == (0, 0)
        assert cache.lookup(TOKENS, cache_salt="s").num_tokens == 0
    engine.close()


def test_a_rank_of_which_nothing_is_known(daemon: RunningDaemon) -> None:
    layout = layout_of(num_heads=2, tp_size=2)
    engine = Engine(daemon.url, layout, "half", world_size=2, rank=0)
    with opened(daemon, "half") as cache, pytest.raises(ValueError, match=r"ranks \[1\] missing"):
        cache.store(TOKENS, values(), cache_salt="s")
    engine.close()


def test_forms_of_tensors(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "forms")
    single = announced(daemon, "forms/float32", dtype="float32")
    tensor = values()
    strided = tensor.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert not strided.is_contiguous()
    with opened(daemon, "forms") as cache:
        forms = (strided, tensor.clone().requires_grad_(), bits(tensor, "bfloat16"))
        for number, form in enumerate(forms):
            cache.store(TOKENS, form, cache_salt=str(number))
            assert same(cache.retrieve(TOKENS, cache_salt=str(number)).tensor, tensor)
    with opened(daemon, "forms/float32") as cache:
        array = values(dtype="float32").numpy()
        array.flags.writeable = False
        cache.store(TOKENS, array[:, ::-1], cache_salt="s")
        found = cache.retrieve(TOKENS, cache_salt="s").numpy()
        assert np.array_equal(found.view(np.uint32), array[:, ::-1].view(np.uint32))
        with pytest.raises(ValueError, match="never cast"):
            cache.store(TOKENS, array.astype(">f4"), cache_salt="big-endian")
    engine.close()
    single.close()


def test_a_layout_that_no_engine_has(daemon: RunningDaemon) -> None:
    layout = Layout(**{**_fields(layout_of()), "layer_ids": (5, 6), "head_dim": 24})
    tensor = values(layers=2, head_dim=24)
    engine = announced(daemon, "synthetic/beside")
    with opened(daemon, "synthetic") as cache:
        stored = cache.store(TOKENS, tensor, cache_salt="s", layout=layout)
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, tensor), "it is the only one"
        half = Layout(**{**_fields(layout), "num_heads": 2, "tp_size": 2})
        with pytest.raises(ValueError, match="TP 2"):
            cache.store(TOKENS, tensor, cache_salt="s", layout=half)
    with opened(daemon, "synthetic/beside") as cache:
        wide = values()
        cache.store(TOKENS, wide, cache_salt="s")
        beside = cache.store(TOKENS, tensor, cache_salt="s", layout=layout)
        found = cache.retrieve(TOKENS, cache_salt="s", layout=beside.layout)
        assert same(found.tensor, tensor)
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, wide)
        assert len(cache.layouts) == 2, "the context has learnt of it"
        assert stored.layout.layer_ids == (5, 6)
    engine.close()


def _fields(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


def test_lora_and_items_are_part_of_the_address_and_listed(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "identity")
    lora = LoraIdentity("adapter", "/adapter", "blake3:1")
    late, early = ItemIdentity("mm", "b", 2 * CHUNK + 1), ItemIdentity("embeds", "a", 3)
    tensor = values()
    with opened(daemon, "identity") as cache:
        cache.store(TOKENS, tensor, cache_salt="s", lora=lora, mm=[late, early])
        found = cache.retrieve(TOKENS, cache_salt="s", lora=lora, mm=[early, late])
        assert same(found.tensor, tensor)
        assert cache.lookup(TOKENS, cache_salt="s").num_tokens == 0
        (listed,) = cache.identities(TOKENS)
        assert (listed.cache_salt, listed.lora, listed.mm) == ("s", lora, (early, late))
        assert listed.num_tokens == len(TOKENS)
    engine.close()


def test_inline(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "inline")
    tensor = values()
    with opened(daemon, "inline", transport="inline") as cache:
        assert cache.transport == "inline"
        stored = cache.store(TOKENS, tensor, cache_salt="s")
        assert stored.stored == OBJECTS
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, tensor)
        assert cache.store(TOKENS, tensor, cache_salt="s").duplicate == OBJECTS
        with pytest.raises(StoreConflict):
            cache.store(TOKENS, values(seed=2), cache_salt="s")
    with opened(daemon, "inline") as cache:
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, tensor)
    engine.close()


def test_more_chunks_than_lie_ready_at_once(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = announced(daemon, "many", dtype="float32")
    tokens = list(range(40 * CHUNK + 1))
    tensor = values(len(tokens), dtype="float32")
    with opened(daemon, "many") as cache:
        cache.store(tokens, tensor, cache_salt="s")
        assert same(cache.retrieve(tokens, cache_salt="s").tensor, tensor)
        monkeypatch.setattr("lmcache_qclient.qcache.staging.MOST_BYTES", 1)  # one slot
        cache.store(tokens, tensor, cache_salt="t")
        assert same(cache.retrieve(tokens, cache_salt="t").tensor, tensor)
    engine.close()


def test_the_engines_accounts_are_theirs(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "accounts")
    before = daemon.status()
    with opened(daemon, "accounts") as cache:
        cache.store(TOKENS, values(), cache_salt="s")
        after = daemon.status()
    engine.close()
    assert after["coverage"] == before["coverage"]
    assert after["q_context_meta"] == before["q_context_meta"], "its instance is gone"
    assert after["totals"]["stored"] == before["totals"]["stored"] + OBJECTS


def test_threads_share_a_context(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "threads")
    errors: list[BaseException] = []
    with opened(daemon, "threads") as cache:

        def work(number: int) -> None:
            try:
                for turn in range(5):
                    salt, tensor = f"{number}/{turn}", values(seed=10 * number + turn)
                    cache.store(TOKENS, tensor, cache_salt=salt)
                    assert same(cache.retrieve(TOKENS, cache_salt=salt).tensor, tensor)
            except BaseException as error:  # noqa: BLE001 - shown by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    engine.close()
    assert not errors


def test_it_survives_a_restart_of_the_server() -> None:
    with running_daemon(chunk_size=CHUNK) as daemon:
        engine = announced(daemon, "restart")
        cache = opened(daemon, "restart")
        cache.store(TOKENS, values(), cache_salt="s")
        engine.close()
        url, http_port = daemon.url, daemon.http_url.rpartition(":")[2]
        daemon.process.kill()
        daemon.process.wait()
    with running_daemon(chunk_size=CHUNK, url=url, http_port=http_port):
        stored = cache.store(TOKENS, values(), cache_salt="s")
        assert (stored.stored, stored.duplicate) == (OBJECTS, 0)
        assert same(cache.retrieve(TOKENS, cache_salt="s").tensor, values())
        cache.close()


def test_what_the_engine_stores_under_the_salt_itself(daemon: RunningDaemon) -> None:
    engine = announced(daemon, "engine's salt")
    engine.store_all(TOKENS, cache_salt="tenant")
    heads = range(4)
    original = expected(TOKENS, (0, 1, 2), heads, 8, "bfloat16")
    with opened(daemon, "engine's salt") as cache:
        with pytest.raises(StoreConflict) as caught:
            cache.store(TOKENS, values(), cache_salt="tenant")
        assert caught.value.token == 0
        assert np.array_equal(
            bits(cache.retrieve(TOKENS, cache_salt="tenant").tensor, "bfloat16"), original
        )
        assert cache.store(TOKENS, original, cache_salt="tenant").duplicate == OBJECTS
    engine.close()


@pytest.mark.parametrize("page", ["README.md", "docs/sdk.md"])
def test_the_example_of_the_pages(
    daemon: RunningDaemon, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head is zeroed; run as it is written."""
    text = (Path(__file__).parents[3] / page).read_text()
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "ablate" in block
    )
    engine = announced(daemon, page)
    engine.store_all(TOKENS)
    near = partial(connect, daemon.url, daemon.http_url)
    monkeypatch.setattr("lmcache_qclient.qcache.connect", near)
    exec(example.replace("MODEL", page), {"token_ids": TOKENS, "connect": near})
    with opened(daemon, page) as cache:
        original = cache.retrieve(TOKENS).tensor
        edited = cache.retrieve(TOKENS, cache_salt="ablate-head-3").tensor
    engine.close()
    assert not edited[:, :, 3].any()
    assert same(edited[:, :, :3], original[:, :, :3])
    assert original[:, :, 3].any()
