"""The dispatcher fans out, and no exception of a feature reaches the engine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.capture.tensor_kind import LayerSink, Tensors
from lmcache_qclient.features.dispatcher import Dispatcher, init_dispatcher
from lmcache_qclient.features.feature import Feature
from lmcache_qclient.features.query import FEATURE as QUERY
from lmcache_qclient.features.registry import FEATURE_REGISTRY
from lmcache_qclient.features.ring_features import RingFeatures
from lmcache_qprotocol.keys import FEATURE_SUFFIX
from lmcache_qprotocol.reasons import LossReason as Loss
from tests.worker_client.capture.fake_adapter import FakeAdapter
from tests.worker_client.capture.fake_vllm import (
    FullAttentionSpec,
    cache_config,
    caches,
    group,
    layer_names,
    vllm_config,
)


class Recorder(Feature):
    """Notes what is called; raises in the hooks named in `broken`."""

    def __init__(self, layers: tuple[str, ...] = (), reference: str | None = None) -> None:
        self.layers, self.reference = layers, reference
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.broken: set[str] = set()
        self.idle_again: float | None = None
        self.sink: LayerSink | None = None

    def _note(self, name: str, *args: Any) -> None:
        self.calls.append((name, args))
        if name in self.broken:
            raise KeyError(name)

    def register(self, kv_caches: Any, kv_cache_config: Any, vllm_config: Any) -> tuple[str, ...]:
        self._note("register", kv_caches, kv_cache_config, vllm_config)
        return self.layers

    def reference_layer(self) -> str | None:
        return self.reference

    def begin_step(self, meta: StepMeta) -> None:
        self._note("begin_step", meta)

    def save_kv_layer(self, layer_name: str, tensors: Tensors, slot_mapping: Any) -> None:
        self._note("save_kv_layer", layer_name, tensors, slot_mapping)

    def layer_sink(self) -> LayerSink | None:
        self._note("layer_sink")
        return self.sink

    def output_sink(self) -> LayerSink | None:
        self._note("output_sink")
        return None

    def wait_for_save(self, event: bytes | None) -> None:
        self._note("wait_for_save", event)

    def reclaim(self) -> None:
        self._note("reclaim")

    def work_idle(self, ended: Any) -> float | None:
        self._note("work_idle", ended)
        return self.idle_again

    def reregister(self) -> None:
        self._note("reregister")

    def step_failed(self) -> None:
        self._note("step_failed")

    def shutdown(self) -> None:
        self._note("shutdown")


HOOKS: list[tuple[str, tuple[Any, ...]]] = [
    ("begin_step", (StepMeta(),)),
    ("save_kv_layer", ("layer", {"q": torch.ones(1)}, None)),
    ("layer_sink", ()),
    ("output_sink", ()),
    ("wait_for_save", (b"event",)),
    ("reclaim", ()),
    ("work_idle", (None,)),
    ("reregister", ()),
    ("shutdown", ()),
]


@pytest.mark.parametrize(("hook", "args"), HOOKS)
def test_every_hook_reaches_every_feature_with_its_arguments(
    hook: str, args: tuple[Any, ...]
) -> None:
    features = [Recorder(), Recorder()]
    getattr(Dispatcher(features), hook)(*args)
    for feature in features:
        assert feature.calls == [(hook, args)]


@pytest.mark.parametrize(("hook", "args"), HOOKS)
def test_what_a_feature_raises_costs_its_step_and_nobody_else(
    hook: str, args: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    features = [Recorder(), Recorder()]
    features[0].broken = {hook, "step_failed"}
    dispatcher = Dispatcher(features)
    getattr(dispatcher, hook)(*args)
    assert [name for name, _ in features[0].calls] == [hook, "step_failed"]
    assert [name for name, _ in features[1].calls] == [hook]
    assert "given up" in caplog.text


def test_an_error_is_logged_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    feature = Recorder()
    feature.broken = {"reclaim"}
    dispatcher = Dispatcher([feature])
    for _ in range(5):
        dispatcher.reclaim()
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None


def test_registering_joins_layers_and_may_raise() -> None:
    features = [Recorder(("b", "a")), Recorder(("a", "c"))]
    dispatcher = Dispatcher(features)
    assert dispatcher.register({}, 1, 2) == ("b", "a", "c")
    assert features[1].calls == [("register", ({}, 1, 2))]
    features[0].broken = {"register"}
    with pytest.raises(KeyError):
        dispatcher.register({}, 1, 2)


def test_the_reference_layer_is_the_first_there_is() -> None:
    assert Dispatcher([Recorder(), Recorder(reference="x")]).reference_layer() == "x"
    assert Dispatcher([Recorder()]).reference_layer() is None
    assert Dispatcher([]).reference_layer() is None


@pytest.mark.parametrize(
    ("waits", "first"), [((None, None), None), ((None, 2.0), 2.0), ((1.0, 2.0), 1.0)]
)
def test_the_feature_that_has_work_first_decides_when_it_goes_on(
    waits: tuple[float | None, ...], first: float | None
) -> None:
    features = [Recorder(), Recorder()]
    for feature, wait in zip(features, waits, strict=True):
        feature.idle_again = wait
    assert Dispatcher(features).work_idle(()) == first


def test_later_layers_go_to_every_feature_that_wants_them() -> None:
    features = [Recorder(), Recorder(), Recorder()]
    assert Dispatcher(features).layer_sink() is None
    seen: list[tuple[str, str]] = []
    features[0].sink = lambda name, tensors: seen.append(("first", name))
    assert Dispatcher(features).layer_sink() is features[0].sink
    features[2].sink = lambda name, tensors: seen.append(("third", name))
    sink = Dispatcher(features).layer_sink()
    assert sink is not None
    sink("layer", {})
    assert seen == [("first", "layer"), ("third", "layer")]


# --- building -------------------------------------------------------------------------------------


def build(requested: tuple[str, ...], announced: tuple[str, ...]) -> Dispatcher:
    def connect(feature: str, group: int = 0, /) -> QRingBufferAdapter:
        return cast(QRingBufferAdapter, SimpleNamespace(features=announced, of=feature))

    return init_dispatcher(requested, connect, RingSettings())


def built(dispatcher: Dispatcher) -> list[tuple[str, str]]:
    """Each feature that is captured, and which feature its way to the server was opened for."""
    (feature,) = dispatcher.features
    assert isinstance(feature, RingFeatures)
    return [(kind.name, cast(Any, adapter).of) for kind, adapter in feature.capture.ways]


def test_the_requested_features_are_built() -> None:
    assert built(build((QUERY.name,), ("other", QUERY.name))) == [(QUERY.name, QUERY.name)]
    assert build((), ()).features == ()


def test_an_unknown_feature_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"transfer_nothing.*known.*transfer_query"):
        build(("transfer_nothing",), (QUERY.name,))


@pytest.mark.parametrize(("announced", "said"), [((), "nothing"), (("x", "y"), "x, y")])
def test_a_feature_that_the_server_does_not_announce_is_named(
    announced: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=f"does not store transfer_query.*{said}"):
        build((QUERY.name,), announced)


def test_a_new_feature_is_a_new_row(monkeypatch: pytest.MonkeyPatch) -> None:
    new = dataclasses.replace(QUERY, name="transfer_new", tensor="k")
    monkeypatch.setitem(FEATURE_REGISTRY, new.name, new)
    names = (QUERY.name, new.name)
    assert built(build(names, names)) == [(name, name) for name in names]


def test_the_registry_speaks_the_protocols_names() -> None:
    assert set(FEATURE_REGISTRY) <= set(FEATURE_SUFFIX)
    assert all(kind.name == name for name, kind in FEATURE_REGISTRY.items())


# --- the query feature ----------------------------------------------------------------------------


@pytest.fixture
def adapter() -> FakeAdapter:
    return FakeAdapter(8)


@pytest.fixture
def dispatcher(adapter: FakeAdapter) -> Dispatcher:
    """The real feature over a real ring: 2 layers, 2 heads of 3."""
    dispatcher = Dispatcher(
        [RingFeatures([(QUERY, cast(QRingBufferAdapter, adapter))], RingSettings())]
    )
    names = layer_names(2)
    config = cache_config(group(FullAttentionSpec(4), names))
    assert dispatcher.register(caches(names), config, vllm_config()) == tuple(names)
    assert dispatcher.reference_layer() == names[0]
    return dispatcher


def one_step(dispatcher: Dispatcher, name: str, *, width: int = 3) -> None:
    part = RequestStep(name, 0, 8, (3, 5), 8, tuple(range(8)), first=True)
    slots = torch.tensor([*range(12, 16), *range(20, 24)])
    dispatcher.begin_step(StepMeta((part,)))
    for layer in layer_names(2):
        dispatcher.save_kv_layer(layer, {"q": torch.ones(8, 2, width)}, slots)
    dispatcher.wait_for_save(b"")
    dispatcher.reclaim()


def test_queries_go_the_whole_way(dispatcher: Dispatcher, adapter: FakeAdapter) -> None:
    one_step(dispatcher, "a")
    assert adapter.account.captured == 8
    assert adapter.calls == ["renew_report"]
    dispatcher.shutdown()
    assert adapter.calls[-1] == "shutdown_q_ring"


def test_a_hook_that_raises_gives_the_step_up(
    dispatcher: Dispatcher, adapter: FakeAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    one_step(dispatcher, "a", width=4)
    assert adapter.stored == []
    assert adapter.account.lost == {Loss.CAPTURE_DISABLED: 8}
    assert "head count" in caplog.text
    one_step(dispatcher, "b")
    assert [stored.chunk.request_id for stored in adapter.stored] == ["b"]


def test_between_steps_the_ends_that_were_told_nowhere_are_stored(
    dispatcher: Dispatcher, adapter: FakeAdapter
) -> None:
    part = RequestStep("a", 0, 3, (3,), 3, (1, 2, 3), first=True)
    dispatcher.begin_step(StepMeta((part,)))
    for layer in layer_names(2):
        dispatcher.save_kv_layer(layer, {"q": torch.ones(3, 2, 3)}, torch.arange(12, 15))
    dispatcher.wait_for_save(b"")
    assert dispatcher.work_idle(()) is None
    assert (adapter.account.captured, adapter.account.pending) == (0, 3)
    dispatcher.work_idle((FinishedRequest("a", 3),))
    assert (adapter.account.captured, adapter.account.pending) == (3, 0)
    assert adapter.calls == ["tell_report", "tell_report"]
    dispatcher.work_idle(())
    assert adapter.calls == ["tell_report", "tell_report"], "there is nothing new to tell"
    assert [one.request_id for one in adapter.account.recent] == ["a"]


def test_between_steps_without_news_what_is_complete_as_it_stands_is_stored(
    dispatcher: Dispatcher, adapter: FakeAdapter
) -> None:
    one_step(dispatcher, "a")
    part = RequestStep("b", 0, 3, (3,), 3, (1, 2, 3), first=True)
    dispatcher.begin_step(StepMeta((part,)))
    for layer in layer_names(2):
        dispatcher.save_kv_layer(layer, {"q": torch.ones(3, 2, 3)}, torch.arange(12, 15))
    dispatcher.wait_for_save(b"")
    dispatcher.work_idle(None)
    assert [(item.chunk.start, item.chunk.end) for item in adapter.stored][-1] == (0, 3)
    assert adapter.account.pending == 0


def test_a_layer_without_a_query_is_layer_missing(
    dispatcher: Dispatcher, adapter: FakeAdapter
) -> None:
    dispatcher.begin_step(StepMeta((RequestStep("a", 0, 4, (3,), 4, (1, 2, 3, 4), True),)))
    dispatcher.save_kv_layer(layer_names(1)[0], {"k": torch.ones(4, 6)}, torch.arange(12, 16))
    dispatcher.wait_for_save(b"")
    assert adapter.account.lost == {Loss.LAYER_MISSING: 4}


def test_a_rank_without_attention_wants_no_layer(adapter: FakeAdapter) -> None:
    dispatcher = Dispatcher(
        [RingFeatures([(QUERY, cast(QRingBufferAdapter, adapter))], RingSettings())]
    )
    assert dispatcher.register({}, cache_config(), vllm_config()) == ()
    assert dispatcher.reference_layer() is None
