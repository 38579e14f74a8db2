"""Features, layers and types in the SDK, against the real daemon: each by its own name, never one for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_qclient.qcache import QCacheContext, connect
from lmcache_qclient.qcache.stitch import bits_dtype
from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.keys import FEATURE_SUFFIX
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.worker_client.qcache.engine import CHUNK, Engine, expected, layout_of

TOKENS = [7 * number % 1000 for number in range(5 * CHUNK + 3)]
MODEL = "org/model"


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=CHUNK, pool_bytes=8 << 20) as running:
        yield running


def opened(daemon: RunningDaemon, model_name: str | None = None) -> QCacheContext:
    return connect(daemon.url, daemon.http_url, model_name)


def stored(
    daemon: RunningDaemon, *, tokens: list[int] = TOKENS, chunks: int = 5, **layout: Any
) -> None:
    """An engine stores whole chunks and ends."""
    engine = Engine(daemon.url, layout_of(**layout), MODEL)
    engine.store(tokens, range(chunks))
    engine.close()


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().view(f"u{tensor.element_size()}")


def whole(
    layers: tuple[int, ...], heads: int = 4, dtype: str = "bfloat16", head_dim: int = 8
) -> np.ndarray:
    return expected(TOKENS[: 5 * CHUNK], layers, range(heads), head_dim, dtype)


def test_each_feature_is_found_by_its_own_name(daemon: RunningDaemon) -> None:
    stored(daemon)
    stored(daemon, feature="transfer_key", num_heads=2, total_heads=2, dtype="float32")
    stored(daemon, feature="transfer_value", num_heads=2, total_heads=2, head_dim=5, layer_ids=(1,))
    names = [f"{MODEL}##{kind}" for kind in ("key", "query", "value")]
    assert [one["model_name"] for one in daemon.status()["models"]] == names
    with opened(daemon) as cache:
        query, key = cache.retrieve(TOKENS), cache.retrieve(TOKENS, feature="key")
        value = cache.retrieve(TOKENS, feature="transfer_value")
        assert np.array_equal(bits(query.tensor), whole((0, 1, 2)))
        assert np.array_equal(bits(key.tensor), whole((0, 1, 2), 2, "float32"))
        assert np.array_equal(bits(value.tensor), whole((1,), 2, head_dim=5))
        assert cache.lookup(TOKENS, feature="key").num_tokens == 5 * CHUNK
        assert [one.feature for one in cache.layouts_of("value")] == ["transfer_value"]
        assert value.layout is not None
        assert value.layout.feature == "transfer_value"
        with pytest.raises(ValueError, match=r"with transfer_attention_output.*org/model"):
            cache.retrieve(TOKENS, feature="attention_output")
        with pytest.raises(
            ValueError, match=r"unknown feature.*query, key, value, attention_output"
        ):
            cache.retrieve(TOKENS, feature="keys")
        with pytest.raises(ValueError, match="not of transfer_key"):
            cache.retrieve(TOKENS, feature="key", layout=cache.layouts[0])
        found = cache.retrieve(TOKENS, layout=cache.layouts_of("key")[0])
        assert np.array_equal(bits(found.tensor), bits(key.tensor)), "a layout says its feature"


@pytest.mark.parametrize("suffix", ["", *FEATURE_SUFFIX.values()])
def test_a_model_may_be_named_with_any_suffix(daemon: RunningDaemon, suffix: str) -> None:
    stored(daemon, feature="transfer_key")
    with opened(daemon, MODEL + suffix) as cache:
        assert cache.retrieve(TOKENS, feature="key").num_tokens == 5 * CHUNK


@pytest.mark.parametrize("layers", [(1,), (0, 2), (2, 0), (1, 2), (2, 1, 0), (0, 1, 2)])
def test_only_the_asked_layers_are_read(daemon: RunningDaemon, layers: tuple[int, ...]) -> None:
    stored(daemon)
    engine = Engine(daemon.url, layout_of(), MODEL)
    engine.store_piece(TOKENS, 5 * CHUNK, len(TOKENS))
    engine.close()
    with opened(daemon) as cache:
        found = cache.retrieve(TOKENS, layers=layers)
        right = expected(TOKENS, layers, range(4), 8, "bfloat16")
        assert (found.layer_ids, found.num_tokens) == (layers, len(TOKENS))
        assert found.tensor.shape[0] == len(layers)
        assert np.array_equal(bits(found.tensor), right)
        out = torch.empty(len(layers), len(TOKENS), 4, 8, dtype=torch.bfloat16)
        cache.retrieve(TOKENS, layers=list(layers), out=out)
        assert np.array_equal(bits(out), right)
        if len(layers) < 3:
            with pytest.raises(ValueError, match="out has shape"):
                cache.retrieve(TOKENS, out=out)


def test_layers_over_the_stages_of_a_pipeline(daemon: RunningDaemon) -> None:
    for rank, layer_ids in enumerate(((0, 1, 2), (3, 4))):
        layout = layout_of(layer_ids=layer_ids, pp_rank=rank, pp_size=2)
        engine = Engine(daemon.url, layout, MODEL, world_size=2, rank=rank)
        engine.store(TOKENS, range(5))
        engine.close()
    with opened(daemon) as cache:
        for layers in ((4, 0, 3), (3,), (1, 2)):
            found = cache.retrieve(TOKENS, layers=layers)
            assert np.array_equal(bits(found.tensor), whole(layers))


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        ((), ValueError),
        ((1, 1), ValueError),
        ((-1,), ValueError),
        ("12", TypeError),
        ((1.0,), TypeError),
    ],
)
def test_layers_that_are_none(daemon: RunningDaemon, layers: Any, error: type[Exception]) -> None:
    stored(daemon)
    with opened(daemon) as cache, pytest.raises(error, match="layers"):
        cache.retrieve(TOKENS, layers=layers)


def test_layouts_are_never_mixed(daemon: RunningDaemon) -> None:
    """Two layers first, of a long sequence; all later, of its beginning and of another one."""
    other = [token + 1 for token in TOKENS]
    stored(daemon, layer_ids=(1, 2))
    stored(daemon, chunks=2)
    stored(daemon, tokens=other)
    with opened(daemon) as cache:
        by_layers = {layout.layer_ids: layout for layout in cache.layouts}
        assert set(by_layers) == {(1, 2), (0, 1, 2)}
        assert all(layout.complete for layout in by_layers.values())
        widest = cache.retrieve(TOKENS)
        assert (widest.layer_ids, widest.num_tokens) == ((0, 1, 2), 2 * CHUNK)
        narrow = cache.retrieve(TOKENS, layout=by_layers[1, 2])
        assert (narrow.layer_ids, narrow.num_tokens) == ((1, 2), 5 * CHUNK)
        assert cache.retrieve(other, layout=by_layers[1, 2]).num_tokens == 0
        # By layers, the layout is read that reaches furthest; and it alone.
        assert cache.retrieve(TOKENS, layers=[2, 1]).num_tokens == 5 * CHUNK
        found = cache.retrieve(other, layers=[2, 1])
        assert (found.num_tokens, found.layer_ids) == (5 * CHUNK, (2, 1))
        assert found.layout == by_layers[0, 1, 2]
        assert cache.retrieve(TOKENS, layers=[0, 1]).num_tokens == 2 * CHUNK
        with pytest.raises(ValueError, match=r"no layout has all of the layers \(1, 7\)"):
            cache.retrieve(TOKENS, layers=[1, 7])


def test_two_layouts_as_wide_as_each_other_are_the_callers_choice(daemon: RunningDaemon) -> None:
    stored(daemon, layer_ids=(0, 1))
    stored(daemon, layer_ids=(1, 2))
    with opened(daemon) as cache:
        with pytest.raises(ValueError, match="layout="):
            cache.retrieve(TOKENS)
        assert cache.retrieve(TOKENS, layers=[0]).num_tokens == 5 * CHUNK


def test_c20_ranks_that_hold_the_same_kv_heads(daemon: RunningDaemon) -> None:
    """Four ranks, two KV heads: each head is there twice, and read once into its place."""
    for rank in range(4):
        layout = layout_of(
            feature="transfer_key",
            first_head=rank // 2,
            num_heads=1,
            total_heads=2,
            tp_rank=rank,
            tp_size=4,
        )
        engine = Engine(daemon.url, layout, MODEL, world_size=4, rank=rank)
        engine.store(TOKENS, range(5))
        engine.close()
    with opened(daemon) as cache:
        found = cache.retrieve(TOKENS, feature="key")
        assert np.array_equal(bits(found.tensor), whole((0, 1, 2), 2))


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_type_comes_back_as_itself(daemon: RunningDaemon, dtype: str) -> None:
    stored(daemon, dtype=dtype)
    with opened(daemon) as cache:
        found = cache.retrieve(TOKENS)
    assert found.tensor.dtype == getattr(torch, dtype)
    assert np.array_equal(bits(found.tensor), whole((0, 1, 2), dtype=dtype))
    array = found.numpy()
    assert array.shape == tuple(found.tensor.shape)
    if "float8" in dtype or dtype == "bfloat16":
        assert array.dtype == bits_dtype(dtype), "NumPy has no such type: its bits"
    else:
        assert array.dtype == np.dtype(dtype)
    assert np.shares_memory(array, found.tensor.view(torch.uint8).numpy())


def test_c23_bits_of_one_type_are_never_read_as_another(daemon: RunningDaemon) -> None:
    """0x3E25 is 0.161 as bfloat16, 1.536 as float16."""
    stored(daemon, dtype="bfloat16")
    with opened(daemon) as cache:
        found = cache.retrieve(TOKENS)
        assert found.tensor.dtype == torch.bfloat16
        for wrong in (torch.float16, torch.int16, torch.float32):
            with pytest.raises(ValueError, match="dtype"):
                cache.retrieve(TOKENS, out=torch.empty(3, 5 * CHUNK, 4, 8, dtype=wrong))
    # The same sequence as float16: another layout, another object, and the caller has to say which.
    engine = Engine(daemon.url, layout_of(dtype="float16"), MODEL)
    engine.rows.view(np.uint16)[:] = 0
    engine.store(TOKENS, range(2))
    engine.close()
    with opened(daemon) as cache:
        assert {layout.dtype for layout in cache.layouts} == {"bfloat16", "float16"}
        with pytest.raises(ValueError, match="layout="):
            cache.retrieve(TOKENS)
        for layout in cache.layouts:
            found = cache.retrieve(TOKENS, layout=layout)
            assert found.tensor.dtype == getattr(torch, layout.dtype)
            assert found.num_tokens == (5 if layout.dtype == "bfloat16" else 2) * CHUNK


# --- not finite -----------------------------------------------------------------------------------


def test_what_is_not_finite_is_stored_counted_and_flagged(daemon: RunningDaemon) -> None:
    engine = Engine(daemon.url, layout_of(dtype="float32"), MODEL)
    values = engine.values

    def with_nan(tokens: Any) -> Any:
        """All is 1.0, but position 3 has an Inf in layer 0 and a NaN in layer 2, position 4 a NaN in layer 2."""
        rows = values(tokens)
        rows[:] = np.float32(1).view(np.uint32)
        rows[0, 3, 5] = np.float32("-inf").view(np.uint32)
        rows[2, 3:5, 31] = np.float32("nan").view(np.uint32)
        return rows

    engine.values = with_nan  # type: ignore[method-assign,assignment]  # other content
    engine.store(TOKENS, range(3))
    engine.store_piece(TOKENS, 3 * CHUNK, 3 * CHUNK + 5)
    engine.close()
    totals = daemon.status()["totals"]
    assert (totals["nonfinite_objects"], totals["nonfinite_rows"]) == (1, 3)
    assert totals["stored"] == 4, "nothing is dropped"
    metrics = daemon.metrics()
    assert metrics["lmcache_qserver_nonfinite_objects_total"] == 1
    assert metrics["lmcache_qserver_nonfinite_rows_total"] == 3
    with opened(daemon) as cache:
        found = cache.retrieve(TOKENS)
        assert found.num_tokens == 3 * CHUNK + 5
        assert found.nonfinite
        assert int((~found.tensor.isfinite()).sum()) == 3
        assert cache.retrieve(TOKENS[:CHUNK]).nonfinite


def test_what_is_finite_is_not_flagged(daemon: RunningDaemon) -> None:
    stored(daemon, dtype="int16")
    with opened(daemon) as cache:
        assert not cache.retrieve(TOKENS).nonfinite
    assert daemon.status()["totals"]["nonfinite_objects"] == 0
