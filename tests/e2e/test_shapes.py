"""Shapes that broke tools of this kind, from the hook to the reader's tensor, through the real daemon.

Where the real engine has them too, tests/e2e/test_vllm_shapes.py compares with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qclient.features.attention_output import FEATURE as OUTPUT
from lmcache_qclient.features.key import FEATURE as KEY
from lmcache_qclient.features.query import FEATURE as QUERY
from lmcache_qclient.qcache import MissReason, QCacheContext, connect
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.e2e.shaped_engine import MODEL, Rank, Shape, ShapedEngine
from tests.worker_client.capture.fake_vllm import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


def token_ids(length: int, seed: int = 0) -> list[int]:
    """Tokens that no other seed shares a chunk with."""
    return [(seed + 1) * 10_000 + position for position in range(length)]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """Chunks of 256."""
    with running_daemon(chunk_size=256, pool_bytes=128 << 20) as running:
        yield running


def opened(daemon: RunningDaemon) -> QCacheContext:
    return connect(daemon.url, daemon.http_url, MODEL)


def check(
    daemon: RunningDaemon,
    engine: ShapedEngine,
    name: str,
    tokens: Sequence[int],
    layers: Sequence[int],
) -> None:
    """All of a request is there, of all these layers and no others, to the bit."""
    with opened(daemon) as cache:
        found = cache.retrieve(tokens)
    assert (found.num_tokens, found.missing) == (len(tokens), ())
    assert sorted(layer for group in found.groups for layer in group.layer_ids) == sorted(layers)
    for layer in layers:
        assert same(found.layer(layer), engine.right(name, len(tokens), layer)), f"layer {layer}"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in type, shape and every bit."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(bits), other.view(bits))


def prefilled(
    daemon: RunningDaemon, shape: Shape, tokens: Sequence[int], *cuts: int, **more: Any
) -> ShapedEngine:
    """An engine that has computed a prompt and ended it."""
    engine = ShapedEngine(daemon.url, shape, **more)
    engine.prefill("a", tokens, *cuts)
    engine.end("a")
    return engine


@pytest.mark.parametrize("chunk", [256, 512, 544, 1024, 1088])
def test_c05_a_hybrid_engines_block_of_544_with_any_chunk(chunk: int) -> None:
    shape = Shape([(MambaSpec(544), [0, 2]), (FullAttentionSpec(544), [1, 3])], engine_block=544)
    tokens = token_ids(2 * chunk + 45)
    with running_daemon(chunk_size=chunk, pool_bytes=64 << 20) as daemon:
        engine = prefilled(daemon, shape, tokens, 100, chunk + 7)
        assert engine.ranks[0].capture.ring is not None
        assert (
            engine.ranks[0].capture.ring.block_size
            == {256: 32, 512: 32, 544: 544, 1024: 32, 1088: 544}[chunk]
        )
        check(daemon, engine, "a", tokens, [1, 3])
        engine.shutdown()


def test_c06_a_cache_group_of_nothing_and_a_prefix_hit_at_400(daemon: RunningDaemon) -> None:
    """Groups of 640 tokens a block, one without layers and of size 0; what is computed begins inside a chunk."""
    groups: list[tuple[KVCacheSpec, list[int]]] = [
        (FullAttentionSpec(640), [0]),
        (FullAttentionSpec(0), []),
    ]
    groups += [(SlidingWindowSpec(640), [layer]) for layer in range(1, 5)]
    engine = ShapedEngine(daemon.url, Shape(groups, engine_block=640))
    tokens = token_ids(700)
    engine.prefill("a", tokens[:400])
    engine.end("a")
    engine.prefill("b", tokens, start=400, like="a")
    engine.end("b")
    check(daemon, engine, "b", tokens, range(5))
    engine.shutdown()


def test_c09_the_attention_groups_own_block_is_22_where_the_engine_says_528(
    daemon: RunningDaemon,
) -> None:
    shape = Shape([(MambaSpec(528), [0]), (AttentionSpec(22), [1, 2])], engine_block=528)
    tokens = token_ids(600)
    engine = prefilled(daemon, shape, tokens, 300)
    check(daemon, engine, "a", tokens, [1, 2])
    assert all(bool(engine.right("a", 600, layer).any()) for layer in (1, 2))
    engine.shutdown()


def test_c10_sliding_groups_of_32_and_full_groups_of_16(daemon: RunningDaemon) -> None:
    shape = Shape([(SlidingWindowSpec(32), [0, 2, 4]), (FullAttentionSpec(16), [1, 3])])
    tokens = token_ids(530)
    engine = prefilled(daemon, shape, tokens, 70, 270)
    check(daemon, engine, "a", tokens, range(5))
    engine.shutdown()


def unlike(**more: Any) -> Shape:
    return Shape(
        [(SlidingWindowSpec(32), [0, 1, 3, 4]), (FullAttentionSpec(16), [2, 5])],
        heads=8,
        dim=256,
        dims={2: 512, 5: 512},
        dtype=torch.bfloat16,
        **more,
    )


def test_c11_heads_of_256_and_512_in_one_model(daemon: RunningDaemon) -> None:
    tokens = token_ids(300)
    engine = prefilled(daemon, unlike(), tokens)
    check(daemon, engine, "a", tokens, range(6))
    with opened(daemon) as cache:
        found = cache.retrieve(tokens)
        assert [(group.layer_ids, tuple(group.tensor.shape)) for group in found.groups] == [
            ((0, 1, 3, 4), (4, 300, 8, 256)),
            ((2, 5), (2, 300, 8, 512)),
        ]
        with pytest.raises(ValueError, match=r"layers \[2, 5\]: \[2, 300, 8, 512\] bfloat16"):
            _ = found.tensor
        some = cache.retrieve(tokens, layers=[5, 2])
        assert same(some.tensor, torch.stack([found.layer(5), found.layer(2)]))
        both = cache.retrieve(tokens, layers=[4, 5])
        assert [group.layer_ids for group in both.groups] == [(4,), (5,)]
        outs = [torch.empty_like(group.tensor) for group in found.groups]
        assert cache.retrieve(tokens, out=outs).groups[1].tensor.data_ptr() == outs[1].data_ptr()
        assert same(outs[1][0], found.layer(2))
        with pytest.raises(ValueError, match="2 tensors"):
            cache.retrieve(tokens, out=outs[:1])
        (one,) = cache.identities(tokens)
        assert one.num_tokens == 300
        with pytest.raises(KeyError):
            found.layer(6)
    engine.shutdown()


def test_c11_the_prefix_is_what_all_shapes_have(daemon: RunningDaemon) -> None:
    """One ring misses a step: what is stored of the other alone is no prefix, and the rank is named."""
    tokens = token_ids(600)
    engine = ShapedEngine(daemon.url, unlike())
    engine.prefill("a", tokens[:256])
    _, wide = engine.ranks[0].capture.tracks
    layers, wide._layer_index = wide._layer_index, {}
    engine.step(("a", tokens, 256, 344))
    wide._layer_index = layers
    engine.end("a")
    with opened(daemon) as cache:
        found = cache.retrieve(tokens)
        assert found.num_tokens == 256
        assert {group.tensor.shape[1] for group in found.groups} == {256}
        first = found.missing[0]
        assert (first.start, first.reason, first.rank) == (256, MissReason.NOT_STORED, 0)
        assert cache.retrieve(tokens, layers=[0, 1]).num_tokens == 600
    engine.shutdown()


def test_c13_eight_query_heads_one_kv_head_and_a_window_of_512(daemon: RunningDaemon) -> None:
    shape = Shape(
        [(SlidingWindowSpec(16), [0, 1])], heads=8, kv_heads=1, dim=256, dtype=torch.bfloat16
    )
    tokens = token_ids(1300)
    engine = prefilled(daemon, shape, tokens, 500, 1000)
    check(daemon, engine, "a", tokens, [0, 1])
    engine.shutdown()


@pytest.mark.parametrize("dim", [80, 96, 100])
def test_c14_heads_that_are_no_power_of_two(daemon: RunningDaemon, dim: int) -> None:
    shape = Shape([(FullAttentionSpec(16), [0, 1, 2])], heads=3, dim=dim, dtype=torch.bfloat16)
    tokens = token_ids(333)
    engine = prefilled(daemon, shape, tokens)
    check(daemon, engine, "a", tokens, [0, 1, 2])
    engine.shutdown()


def test_c15_heads_of_128_where_hidden_size_by_heads_is_80(daemon: RunningDaemon) -> None:
    """As in Qwen3-4B: hidden size 2560, 32 heads of 128."""
    shape = Shape(
        [(FullAttentionSpec(16), [0, 1])], heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16
    )
    tokens = token_ids(260)
    engine = prefilled(daemon, shape, tokens)
    check(daemon, engine, "a", tokens, [0, 1])
    engine.shutdown()


def test_c16_mla_with_61_layers_and_10_requests_at_once(daemon: RunningDaemon) -> None:
    """Query heads of 192, values of 128; the engine's head size is that of the latent vector."""
    mla = {"head_size": 576, "qk_head_dim": 192, "v_head_dim": 128, "kv_lora_rank": 512}
    shape = Shape(
        [(MLAAttentionSpec(64), range(61))],
        heads=2,
        dim=192,
        output_dim=128,
        dtype=torch.bfloat16,
        attributes=mla,
    )
    engine = ShapedEngine(daemon.url, shape, kinds=(QUERY, OUTPUT))
    prompts = {f"r{seed}": token_ids(20 + 13 * seed, seed) for seed in range(10)}
    engine.step(*((name, tokens, 0, len(tokens)) for name, tokens in prompts.items()))
    engine.end(*prompts)
    for name, tokens in prompts.items():
        check(daemon, engine, name, tokens, range(61))
        with opened(daemon) as cache:
            outputs = cache.retrieve(tokens, feature="attention_output")
        assert outputs.tensor.shape == (61, len(tokens), 2, 128)
        for layer in range(61):
            assert same(outputs.layer(layer), engine.right_outputs(name, len(tokens), layer))
    engine.shutdown()


def test_c18_an_fp8_engine_with_tp4_and_a_draft_layer() -> None:
    """Block 256, chunk 1024: a byte an element, a scale a layer, nothing of the draft layer or of rejected drafts."""
    fp8 = torch.float8_e4m3fn
    attributes = {"query_quant": object(), "kv_cache_dtype": "fp8", "_q_scale": torch.tensor(0.25)}
    shape = Shape(
        [(FullAttentionSpec(256), [0, 1, 2])],
        heads=8,
        dim=16,
        dtype=fp8,
        engine_block=256,
        tp=4,
        attributes=attributes,
        drafts=["model.layers.3.self_attn.attn"],
        model_layers=3,
    )
    tokens = token_ids(1100)
    with running_daemon(chunk_size=1024, pool_bytes=64 << 20) as daemon:
        engine = ShapedEngine(daemon.url, shape)
        engine.prefill("a", tokens[:1020])
        for start in range(1020, 1100, 2):
            engine.step(("a", tokens[: start + 2], start, 2), drafts=1)
            engine.step(("a", tokens[: start + 2], start + 1, 1))
        engine.end("a")
        check(daemon, engine, "a", tokens, [0, 1, 2])
        with opened(daemon) as cache:
            found = cache.retrieve(tokens)
        assert (found.tensor.dtype, found.scales) == (fp8, (0.25, 0.25, 0.25))
        models = daemon.status()["models"]
        whole_chunk = 1024 * 3 * 2 * 16
        assert {(model["chunks"], model["pieces"]) for model in models} == {(1, 1)}
        assert {model["bytes"] for model in models} == {whole_chunk + 256 * 3 * 2 * 16}
        engine.shutdown()


def test_c19_blocks_of_one_token(daemon: RunningDaemon) -> None:
    tokens = token_ids(520)
    engine = prefilled(daemon, Shape([(FullAttentionSpec(1), [0, 1])], engine_block=1), tokens, 33)
    check(daemon, engine, "a", tokens, [0, 1])
    engine.shutdown()


def test_c20_tp8_with_4_kv_heads(daemon: RunningDaemon) -> None:
    """Every rank has a query head of its own; every two have the same KV head."""
    shape = Shape([(FullAttentionSpec(16), [0, 1])], heads=8, kv_heads=4, tp=8)
    tokens = token_ids(270)
    kinds: tuple[TensorKind, ...] = (QUERY, KEY)
    engine = prefilled(daemon, shape, tokens, kinds=kinds)
    check(daemon, engine, "a", tokens, [0, 1])
    with opened(daemon) as cache:
        keys = cache.retrieve(tokens, feature="key")
    assert keys.tensor.shape == (2, 270, 4, 8)
    assert all(same(keys.layer(layer), engine.right_keys("a", 270, layer)) for layer in (0, 1))
    engine.shutdown()


def test_c21_tp2_by_pp2_is_one_tensor_and_a_missing_rank_is_named(daemon: RunningDaemon) -> None:
    groups = [(FullAttentionSpec(16), range(4))]
    shape = Shape(groups, heads=4, tp=2, stages=[[0, 1], [2, 3]])
    tokens = token_ids(512)
    engine = prefilled(daemon, shape, tokens, 200)
    check(daemon, engine, "a", tokens, range(4))
    engine.step(("b", token_ids(256, 1), 0, 256), without=[2])
    engine.end("b")
    with opened(daemon) as cache:
        found = cache.retrieve(token_ids(256, 1))
    assert found.num_tokens == 0
    assert [(miss.rank, miss.start, miss.end) for miss in found.missing] == [(2, 0, 256)]
    engine.shutdown()


def test_c21_unlike_layers_on_unlike_stages(daemon: RunningDaemon) -> None:
    """The first stage has one shape of layers, the second has both; each group has its layers in the model's order."""
    shape = unlike(tp=2, stages=[[0, 1], [2, 3, 4, 5]])
    tokens = token_ids(300)
    engine = prefilled(daemon, shape, tokens)
    check(daemon, engine, "a", tokens, range(6))
    with opened(daemon) as cache:
        (layout,) = cache.layouts
        assert [group.layer_ids for group in layout.groups] == [(0, 1, 3, 4), (2, 5)]
        assert layout.complete
    engine.shutdown()


def test_c23_bf16_bits_stay_bf16(daemon: RunningDaemon) -> None:
    """0x3E25 is 0.161 in bfloat16, and would be 1.536 in float16."""
    shape = Shape([(FullAttentionSpec(16), [0])], heads=1, dtype=torch.bfloat16)
    tokens = token_ids(16)
    engine = ShapedEngine(daemon.url, shape)
    rows = torch.full((16, 1, 8), 0x3E25, dtype=torch.int16).view(torch.bfloat16)
    engine.ranks[0].forward = lambda positions, slots, salts: engine.ranks[0].capture.save_layer(  # type: ignore[method-assign]
        "model.layers.0.self_attn.attn", {"q": rows}, slots
    )
    engine.prefill("a", tokens)
    engine.end("a")
    with opened(daemon) as cache:
        found = cache.retrieve(tokens)
    assert found.tensor.dtype == torch.bfloat16
    assert set(found.tensor.view(torch.int16).flatten().tolist()) == {0x3E25}
    assert found.tensor[0, 0, 0, 0].item() == pytest.approx(0.161, abs=1e-3)
    engine.shutdown()


def test_layers_that_share_a_cache_have_queries_of_their_own(daemon: RunningDaemon) -> None:
    shape = Shape(
        [(SlidingWindowSpec(16), [0]), (FullAttentionSpec(16), [1])], sharing={2: 0, 3: 1}
    )
    tokens = token_ids(300)
    engine = prefilled(daemon, shape, tokens, kinds=(QUERY, KEY))
    check(daemon, engine, "a", tokens, range(4))
    with opened(daemon) as cache:
        keys = cache.retrieve(tokens, feature="key")
    assert keys.layer_ids == (0, 1)
    engine.shutdown()


@pytest.mark.parametrize("wrong_layer", [0, 1])
@pytest.mark.parametrize("quantized", [False, True], ids=["fp8 into bf16", "bf16 into fp8"])
def test_rows_are_not_cast_between_8_bits_and_more(
    daemon: RunningDaemon, wrong_layer: int, quantized: bool
) -> None:
    """An engine that quantizes where its layers do not say so, or does not: nothing of the step is stored."""
    attributes = {"query_quant": object(), "kv_cache_dtype": "fp8", "_q_scale": torch.tensor(0.5)}
    shape = Shape(
        [(FullAttentionSpec(16), [0, 1])],
        dtype=torch.bfloat16,
        attributes=attributes if quantized else {},
    )
    engine = ShapedEngine(daemon.url, shape)
    capture = engine.ranks[0].capture
    assert capture.ring is not None
    dtypes = [capture.ring.dtype] * 2
    dtypes[wrong_layer] = torch.bfloat16 if quantized else torch.float8_e4m3fn

    def save(slots: torch.Tensor) -> None:
        first, second = (torch.zeros(len(slots), 4, 8, dtype=dtype) for dtype in dtypes)
        capture.save_layer(Rank.name(0), {"q": first}, slots)
        sink = capture.layer_sink()
        assert sink is not None
        sink(Rank.name(1), {"q": second})

    def forward(positions: Sequence[int], slots: torch.Tensor, salts: Sequence[int]) -> None:
        with pytest.raises(ValueError, match=r"layers\.\d\..* brought torch"):
            save(slots)

    engine.ranks[0].forward = forward  # type: ignore[method-assign]
    tokens = token_ids(256)
    engine.prefill("a", tokens)
    engine.end("a")
    account = capture.adapters[0].account
    assert (account.captured, account.lost[LossReason.LAYER_MISSING]) == (0, 256)
    engine.shutdown()
