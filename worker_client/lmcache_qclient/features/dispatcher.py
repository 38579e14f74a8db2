"""The dispatcher: one call of the connector fans out to every feature, and no exception of ours reaches the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lmcache_qclient.capture.capture import Connect, Way
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qclient.capture.tensor_kind import LayerSink, Tensors
from lmcache_qclient.features.feature import Feature
from lmcache_qclient.features.registry import FEATURE_REGISTRY
from lmcache_qclient.features.ring_features import RingFeatures

logger = logging.getLogger(__name__)


class Dispatcher:
    """Fans the engine's hooks out to features.

    `register` may raise: a wrong configuration should stop the engine's start. Everything after it must not: a feature
    whose hook raises gives the step up, which is counted, and goes on with the next step.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self.features = tuple(features)
        self._logged: set[type[BaseException]] = set()

    def register(
        self, kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
    ) -> tuple[str, ...]:
        """Let every feature build what it needs.

        Returns:
            Names of all layers that some feature wants to see.
        """
        names: dict[str, None] = {}
        for feature in self.features:
            names.update(dict.fromkeys(feature.register(kv_caches, kv_cache_config, vllm_config)))
        return tuple(names)

    def reference_layer(self) -> str | None:
        """The layer whose slot mapping attributes rows."""
        return next(
            (name for feature in self.features if (name := feature.reference_layer()) is not None),
            None,
        )

    def begin_step(self, meta: StepMeta) -> None:
        """Before a step's forward pass."""
        self._each(lambda feature: feature.begin_step(meta))

    def save_kv_layer(
        self, layer_name: str, tensors: Tensors, slot_mapping: torch.Tensor | None
    ) -> None:
        """From inside the forward pass: the step's first layer, or every layer."""
        self._each(lambda feature: feature.save_kv_layer(layer_name, tensors, slot_mapping))

    def layer_sink(self) -> LayerSink | None:
        """After the step's first layer: what takes the later ones; None when nobody needs them."""
        return self._joined(lambda feature: feature.layer_sink())

    def output_sink(self) -> LayerSink | None:
        """What takes every layer behind its attention, from the step's first on; None when nobody needs them."""
        return self._joined(lambda feature: feature.output_sink())

    def _joined(self, sink_of: Callable[[Feature], LayerSink | None]) -> LayerSink | None:
        found: list[LayerSink | None] = []
        self._each(lambda feature: found.append(sink_of(feature)))
        sinks = [sink for sink in found if sink is not None]
        if len(sinks) < 2:
            return sinks[0] if sinks else None

        def every(layer_name: str, tensors: Tensors) -> None:
            for sink in sinks:
                sink(layer_name, tensors)

        return every

    def wait_for_save(self, event: bytes | None) -> None:
        """At the forward's exit."""
        self._each(lambda feature: feature.wait_for_save(event))

    def reclaim(self) -> None:
        """After every step."""
        self._each(lambda feature: feature.reclaim())

    def work_idle(self, ended: Sequence[FinishedRequest] | None) -> float | None:
        """Between steps, when none has come for a while; see `Feature.work_idle`."""
        waits: list[float | None] = []
        self._each(lambda feature: waits.append(feature.work_idle(ended)))
        return min((wait for wait in waits if wait is not None), default=None)

    def reregister(self) -> None:
        """After the server came back."""
        self._each(lambda feature: feature.reregister())

    def shutdown(self) -> None:
        """The engine ends."""
        self._each(lambda feature: feature.shutdown())

    def _each(self, call: Callable[[Feature], None]) -> None:
        for feature in self.features:
            try:
                call(feature)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here, the engine must go on
                self._failed(feature, error)

    def _failed(self, feature: Feature, error: Exception) -> None:
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.error(
                "capture of this step failed, the engine goes on (logged once a kind)",
                exc_info=error,
            )
        try:
            feature.step_failed()
        except Exception:
            logger.exception("a failed step could not be given up")


def init_dispatcher(
    requested: Sequence[str],
    connect: Connect,
    settings: RingSettings,
) -> Dispatcher:
    """Build the requested features.

    Args:
        requested: names of features.
        connect: opens a way to the server; each feature has one of its own.

    Raises:
        ValueError: a requested feature is unknown here, or not announced by the server.
        ConnectionError: from `connect`.
    """
    unknown = [name for name in requested if name not in FEATURE_REGISTRY]
    if unknown:
        raise ValueError(
            f"unknown feature {', '.join(unknown)}; known: {', '.join(FEATURE_REGISTRY)}"
        )
    ways: list[Way] = []
    for name in requested:
        adapter = connect(name)
        if name not in adapter.features:
            announced = ", ".join(adapter.features) or "nothing"
            raise ValueError(
                f"the server does not store {name}; it announces: {announced}. Run a server of the same version"
            )
        ways.append((FEATURE_REGISTRY[name], adapter))
    return Dispatcher([RingFeatures(ways, settings, connect)] if ways else [])
