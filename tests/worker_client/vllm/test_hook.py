"""The hook sees every real step's query, per instance, and changes nothing for the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_qclient.vllm.hook import Tap, wrap_layers


class Impl:
    """An attention backend."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> str:
        self.seen.append((args, kwargs))
        return "output"


def layers(*names: str) -> dict[str, Any]:
    return {name: SimpleNamespace(impl=Impl()) for name in names}


def tap(sink: Callable[[str, Mapping[str, torch.Tensor]], None]) -> Tap:
    made = Tap()
    made.sink = sink
    return made


Q = torch.ones(3, 2, 4)


def test_arguments_and_result_pass_unchanged() -> None:
    static, seen = layers("a"), []
    impl = static["a"].impl
    wrap_layers(static, ["a"], tap(lambda name, tensors: seen.append((name, tensors["q"]))))
    args = ("layer", Q, "k", "v", "cache", "metadata", "extra")
    assert impl.forward(*args, output="out", output_scale=None) == "output"
    ((got, kwargs),) = impl.seen
    assert all(ours is theirs for ours, theirs in zip(got, args, strict=True))
    assert kwargs == {"output": "out", "output_scale": None}
    assert seen == [("a", Q)]
    assert seen[0][1] is Q


def test_arguments_by_name_pass_too() -> None:
    static, seen = layers("a"), []
    wrap_layers(static, ["a"], tap(lambda name, tensors: seen.append(name)))
    static["a"].impl.forward(
        "layer", query=Q, key="k", value="v", kv_cache="c", attn_metadata="m", output="o"
    )
    assert static["a"].impl.seen == [(("layer", Q, "k", "v", "c", "m"), {"output": "o"})]
    assert seen == ["a"]


def test_a_dummy_run_has_no_metadata_and_is_not_seen() -> None:
    static, seen = layers("a"), []
    wrap_layers(static, ["a"], tap(lambda name, tensors: seen.append(name)))
    assert static["a"].impl.forward("layer", Q, "k", "v", "c", None, output="o") == "output"
    assert seen == []
    assert len(static["a"].impl.seen) == 1


def test_only_the_named_instances_are_wrapped() -> None:
    static, seen = layers("a", "b", "c"), []
    wrap_layers(static, ["a", "c"], tap(lambda name, tensors: seen.append(name)))
    for name in ("c", "b", "a"):
        static[name].impl.forward("layer", Q, "k", "v", "cache", "m")
    assert seen == ["c", "a"]
    Impl().forward("layer", Q, "k", "v", "cache", "m")
    assert seen == ["c", "a"], "the class is as it was"


def test_the_query_is_seen_before_the_attention_runs() -> None:
    static, order = layers("a"), []
    static["a"].impl.forward = lambda *args, **kwargs: order.append("attention")
    wrap_layers(static, ["a"], tap(lambda name, tensors: order.append("hook")))
    static["a"].impl.forward("layer", Q, "k", "v", "c", "m")
    assert order == ["hook", "attention"]


def test_what_the_hook_raises_does_not_reach_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    static = layers("a")

    def broken(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        raise AttributeError("no forward context")

    wrap_layers(static, ["a"], tap(broken))
    for _ in range(3):
        assert static["a"].impl.forward("layer", Q, "k", "v", "c", "m") == "output"
    assert len(caplog.records) == 1


class MLA:
    """A layer whose `impl` never sees a whole query."""

    def __init__(self) -> None:
        self.impl = Impl()
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward_impl(self, *args: Any, **kwargs: Any) -> str:
        self.seen.append((args, kwargs))
        return "output"


def test_c16_of_mla_the_query_before_it_is_absorbed_is_seen() -> None:
    layer, other, seen = MLA(), MLA(), []
    made = tap(lambda name, tensors: seen.append((name, dict(tensors))))
    made.output_sink = lambda name, tensors: seen.append((name, dict(tensors)))
    wrap_layers({"m": layer}, ["m"], made)
    args = (Q, "k_c_normed", "k_pe", "cache", "metadata")
    assert layer.forward_impl(*args, output="out", q_dcp_replicated=None) == "output"
    assert layer.seen == [(args, {"output": "out", "q_dcp_replicated": None})]
    assert [(name, *tensors) for name, tensors in seen] == [("m", "q"), ("m", "o")]
    assert seen[0][1]["q"] is Q
    assert seen[1][1]["o"] == "out"
    assert layer.forward_impl(Q, "k", "p", "cache", None, output="out") == "output"
    other.forward_impl(*args)
    assert len(seen) == 2, "neither dummy runs nor other instances are seen"
    layer.impl.forward("layer", Q, "k", "v", "c", "m")
    assert len(seen) == 2, "its impl is not wrapped"


def test_what_the_attention_raises_does() -> None:
    static = layers("a")

    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    static["a"].impl.forward = broken
    wrap_layers(static, ["a"], tap(lambda name, tensors: None))
    with pytest.raises(ZeroDivisionError):
        static["a"].impl.forward("layer", Q, "k", "v", "c", "m")


def test_layers_without_a_plain_forward_are_refused_before_any_is_wrapped() -> None:
    static, seen = layers("a"), []
    static["mla"] = SimpleNamespace(impl=SimpleNamespace())
    static["bare"] = SimpleNamespace()
    wanted = ["a", "mla", "bare", "absent"]
    with pytest.raises(NotImplementedError, match="mla, bare, absent"):
        wrap_layers(static, wanted, tap(lambda name, tensors: seen.append(name)))
    static["a"].impl.forward("layer", Q, "k", "v", "c", "m")
    assert seen == []


def test_a_tap_without_a_sink_sees_nothing_and_may_be_switched_at_any_time() -> None:
    static, seen = layers("a"), []
    switched = tap(lambda name, tensors: seen.append(name))
    wrap_layers(static, ["a"], switched)
    for sink in (None, switched.sink, None):
        switched.sink = sink
        assert static["a"].impl.forward("layer", Q, "k", "v", "c", "m") == "output"
    assert seen == ["a"]


def test_keys_values_and_outputs_are_handed_on() -> None:
    static, seen = layers("a"), []
    both = tap(lambda name, tensors: seen.append((name, dict(tensors))))
    both.output_sink = lambda name, tensors: seen.append((name, dict(tensors)))
    wrap_layers(static, ["a"], both)
    static["a"].impl.forward("layer", Q, "k", "v", "c", "m", output="written here")
    static["a"].impl.forward("layer", Q, None, None, "c", "m")
    assert seen == [
        ("a", {"q": Q, "k": "k", "v": "v"}),
        ("a", {"o": "written here"}),
        ("a", {"q": Q}),  # the layer uses another layer's cache
        ("a", {"o": "output"}),  # the backend returns what it makes
    ]


def test_what_the_output_sink_raises_does_not_reach_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    static, made = layers("a"), Tap()

    def broken(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        raise AttributeError("no forward context")

    made.output_sink = broken
    wrap_layers(static, ["a"], made)
    assert static["a"].impl.forward("layer", Q, "k", "v", "c", "m") == "output"
    assert static["a"].impl.forward("layer", Q, "k", "v", "c", None) == "output"
    assert len(caplog.records) == 1
