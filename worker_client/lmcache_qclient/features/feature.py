"""What a feature is: the hooks that the dispatcher fans out to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qclient.capture.tensor_kind import LayerSink, Tensors


class Feature(ABC):
    """What captures on one worker: one kind of tensor, or several together."""

    @abstractmethod
    def register(
        self, kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
    ) -> tuple[str, ...]:
        """Build what is needed once the engine's caches exist.

        Returns:
            Names of the attention layers whose tensors the feature wants.
        """

    @abstractmethod
    def reference_layer(self) -> str | None:
        """The layer whose slot mapping attributes rows; None when nothing is captured."""

    @abstractmethod
    def begin_step(self, meta: StepMeta) -> None:
        """Before a step's forward pass."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, tensors: Tensors, slot_mapping: torch.Tensor | None
    ) -> None:
        """From inside the forward pass, once a layer."""

    @abstractmethod
    def layer_sink(self) -> LayerSink | None:
        """Called after the step's first layer: what takes the later ones; None when the step needs no more of them.

        What it raises costs the step: without that layer it can't be whole.
        """

    @abstractmethod
    def output_sink(self) -> LayerSink | None:
        """As `layer_sink`, for what the layers' attention makes, the step's first layer included."""

    @abstractmethod
    def wait_for_save(self, event: bytes | None) -> None:
        """At the forward's exit."""

    @abstractmethod
    def reclaim(self) -> None:
        """After every step: take back what is free again."""

    @abstractmethod
    def work_idle(self, ended: Sequence[FinishedRequest] | None) -> float | None:
        """Between steps, when none has come for a while.

        Args:
            ended: requests that have ended since the last step; None when nobody here can know.

        Returns:
            Seconds until it should be called again; None when nothing is left to do.
        """

    @abstractmethod
    def reregister(self) -> None:
        """After the server came back."""

    @abstractmethod
    def step_failed(self) -> None:
        """One of the step's hooks has raised: drop the step, keep the feature."""

    @abstractmethod
    def shutdown(self) -> None:
        """The engine ends."""
