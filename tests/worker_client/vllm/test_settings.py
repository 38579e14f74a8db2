"""Switches in `kv_connector_extra_config`, and configurations that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_qclient.capture.layer_selection import parse_layers
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.vllm.refusals import refuse_unsupported
from lmcache_qclient.vllm.settings import KNOWN, TRANSFER, Settings, parse_settings


def test_a_gpu_has_to_be_asked_for() -> None:
    assert not parse_settings({}).ring.allow_untested_gpu
    assert parse_settings({"lmcache.q.allow_untested_gpu": True}).ring.allow_untested_gpu


def test_nothing_given_is_off() -> None:
    assert parse_settings({}) == Settings()
    assert parse_settings({}).features == ()
    assert parse_settings({}).ring == RingSettings(blocks=None, depth=2, max_bytes=2 << 30)


@pytest.mark.parametrize(
    ("value", "on"),
    [(True, True), ("true", True), ("True", True), (False, False), ("false", False)],
)
def test_the_main_switch(value: object, on: bool) -> None:
    assert parse_settings({TRANSFER: value}).features == (("transfer_query",) if on else ())


@pytest.mark.parametrize("value", ["yes", 1, 0, None, "", []])
def test_the_main_switch_is_true_or_false_or_names(value: object) -> None:
    with pytest.raises(ValueError, match="true or false"):
        parse_settings({TRANSFER: value})


@pytest.mark.parametrize(
    ("value", "features"),
    [
        ("transfer_key", ("transfer_key",)),
        (["transfer_value", "transfer_query"], ("transfer_value", "transfer_query")),
        ("transfer_key, transfer_query,transfer_key", ("transfer_key", "transfer_query")),
        (("transfer_attention_output",), ("transfer_attention_output",)),
    ],
)
def test_features_by_name(value: object, features: tuple[str, ...]) -> None:
    assert parse_settings({TRANSFER: value}).features == features


@pytest.mark.parametrize(
    "value", ["transfer_nothing", ["transfer_key", "key"], ["transfer_key", 1]]
)
def test_an_unknown_feature_is_refused_with_the_known_ones(value: object) -> None:
    with pytest.raises(
        ValueError, match="transfer_query, transfer_key, transfer_value, transfer_a"
    ):
        parse_settings({TRANSFER: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", "x"),
        ("layers", None.__class__),
        ("layers", []),
        ("tokens", "prompts"),
        ("tokens", None),
        ("sample", 1.01),
        ("sample", -0.1),
        ("sample", "nan"),
        ("sample", "half"),
        ("sample", True),
        ("sample", None),
    ],
)
def test_a_wrong_selection_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"lmcache\.q\.{key}"):
        parse_settings({f"lmcache.q.{key}": value})


def test_all_layers_are_all_layers() -> None:
    assert parse_settings({"lmcache.q.layers": "all"}).ring.layers is None


def test_all_switches() -> None:
    settings = parse_settings(
        {
            "lmcache.q.server_url": "tcp://h:1",
            "lmcache.q.ring_blocks": "12",
            "lmcache.q.ring_depth": 3,
            "lmcache.q.ring_bytes": "1000",
            "lmcache.q.connect_timeout_s": "2.5",
            "lmcache.q.heartbeat_s": 1,
            "lmcache.q.tails": "false",
            "lmcache.q.on_full": "wait",
            "lmcache.q.full_wait_s": 0.25,
            "lmcache.q.transport": "inline",
            "lmcache.q.layers": "0,5",
            "lmcache.q.tokens": "prompt",
            "lmcache.q.sample": "0.5",
            "lmcache.q.allow_untested_gpu": "true",
        }
    )
    ring = RingSettings(12, 3, 1000, False, 0.25, parse_layers("0,5"), True)
    assert settings == Settings((), "tcp://h:1", ring, 2.5, 1.0, "prompt", 0.5, "inline")
    assert len(KNOWN) == 14, "a new switch belongs into this test"


@pytest.mark.parametrize("value", ["tcp", "", None, 1])
def test_an_unknown_transport_is_refused_with_the_list(value: object) -> None:
    with pytest.raises(ValueError, match="auto, shm, inline"):
        parse_settings({"lmcache.q.transport": value})


@pytest.mark.parametrize(("given", "blocks"), [(5, 5), (0, 1), (-3, 1), ("7", 7)])
def test_ring_blocks_is_at_least_one(given: object, blocks: int) -> None:
    assert parse_settings({"lmcache.q.ring_blocks": given}).ring.blocks == blocks


@pytest.mark.parametrize("on", [True, False])
def test_an_unknown_switch_is_refused_with_the_known_ones(on: bool) -> None:
    with pytest.raises(ValueError, match=r"lmcache\.q\.ring_block,") as info:
        parse_settings({"lmcache.q.ring_block": 1, "lmcache.q.zzz": 2, TRANSFER: on})
    for name in [*KNOWN, "lmcache.q.zzz"]:
        assert name in str(info.value)


def test_other_peoples_switches_are_not_ours() -> None:
    parse_settings({"lmcache.mp.host": "x", "lmcache.queue": 1, "whatever": None})


@pytest.mark.parametrize("key", ["ring_blocks", "ring_depth", "ring_bytes"])
@pytest.mark.parametrize("value", ["many", True, [], float("inf"), float("nan")])
def test_whole_numbers(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key} is a whole number"):
        parse_settings({f"lmcache.q.{key}": value})


@pytest.mark.parametrize("key", ["connect_timeout_s", "heartbeat_s", "full_wait_s"])
@pytest.mark.parametrize("value", ["soon", None, 0, -1, float("nan"), float("inf")])
def test_seconds(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        parse_settings({f"lmcache.q.{key}": value})


def test_a_full_ring_drops_unless_waiting_is_asked_for() -> None:
    assert parse_settings({}).ring.wait_s == 0
    assert parse_settings({"lmcache.q.full_wait_s": 3}).ring.wait_s == 0
    assert parse_settings({"lmcache.q.on_full": "wait"}).ring.wait_s == 0.1
    with pytest.raises(ValueError, match="on_full is drop or wait, not 'block'"):
        parse_settings({"lmcache.q.on_full": "block"})


# --- refusals -------------------------------------------------------------------------------------


def config(
    parallel: dict[str, Any] | None = None, cache: dict[str, Any] | None = None, **more: Any
) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel or {})),
        cache_config=SimpleNamespace(**(cache or {})),
        **more,
    )


ASYNC = SimpleNamespace(async_scheduling=True)
IN_STEP = SimpleNamespace(async_scheduling=False)


@pytest.mark.parametrize(
    "fine",
    [
        config(),
        config({"decode_context_parallel_size": 1, "prefill_context_parallel_size": None}),
        config(cache={"kv_sharing_fast_prefill": False}),
        config({"tensor_parallel_size": 8, "enable_dbo": False, "ubatch_size": 1}),
        config(scheduler_config=ASYNC, speculative_config=None),
        config(scheduler_config=IN_STEP, speculative_config=object()),
    ],
)
def test_what_can_be_captured(fine: Any) -> None:
    refuse_unsupported(fine)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (config({"decode_context_parallel_size": 2}), "decode_context_parallel_size"),
        (config({"prefill_context_parallel_size": 4}), "prefill_context_parallel_size"),
        (config({"enable_dbo": True}), "enable_dbo"),
        (config(weight_transfer_config=object()), "weight_transfer_config"),
        (config({"ubatch_size": 2}), "ubatch_size"),
        (config(cache={"kv_sharing_fast_prefill": True}), "kv_sharing_fast_prefill"),
        (config(scheduler_config=ASYNC, speculative_config=object()), "--no-async-scheduling"),
    ],
)
def test_what_cannot_is_named(bad: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_unsupported(bad)
