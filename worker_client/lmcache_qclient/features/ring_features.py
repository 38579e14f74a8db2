"""The features that are captured together: one plan of a step, one search for its rows; a ring and account each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache_qclient.capture.capture import Connect, QRingBufferCapture, Way
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qclient.capture.tensor_kind import LayerSink, Tensors
from lmcache_qclient.features.feature import Feature
from lmcache_qprotocol.reasons import LossReason


class RingFeatures(Feature):
    """Tensors of attention layers that go through rings.

    Args:
        ways: what is captured, and each one's way to the server.
        connect: opens further ways.
    """

    def __init__(
        self, ways: Sequence[Way], settings: RingSettings, connect: Connect | None = None
    ) -> None:
        self.capture = QRingBufferCapture(ways, settings, connect)

    def register(
        self, kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
    ) -> tuple[str, ...]:
        """See `QRingBufferCapture.setup_q_ring`."""
        self.capture.setup_q_ring(kv_caches, kv_cache_config, vllm_config)
        return self.capture.layer_names

    def reference_layer(self) -> str | None:
        """See `Feature`."""
        return self.capture.geometry.reference_layer if self.capture.geometry is not None else None

    def begin_step(self, meta: StepMeta) -> None:
        """See `Feature`."""
        self.capture.begin_step(meta)

    def save_kv_layer(
        self, layer_name: str, tensors: Tensors, slot_mapping: torch.Tensor | None
    ) -> None:
        """See `QRingBufferCapture.save_layer`."""
        self.capture.save_layer(layer_name, tensors, slot_mapping)

    def layer_sink(self) -> LayerSink | None:
        """See `Feature`."""
        return self.capture.layer_sink()

    def output_sink(self) -> LayerSink | None:
        """See `Feature`."""
        return self.capture.output_sink()

    def wait_for_save(self, event: bytes | None) -> None:
        """Submit what the step has finished."""
        self.capture.batched_submit_qstore_requests(event)

    def reclaim(self) -> None:
        """See `Feature`."""
        self.capture.reclaim()

    def work_idle(self, ended: Sequence[FinishedRequest] | None) -> float | None:
        """See `Feature`."""
        return self.capture.work_idle(ended)

    def reregister(self) -> None:
        """See `Feature`."""
        self.capture.reregister()

    def step_failed(self) -> None:
        """See `Feature`."""
        self.capture.give_up_step(LossReason.CAPTURE_DISABLED)

    def shutdown(self) -> None:
        """See `Feature`."""
        self.capture.shutdown()
