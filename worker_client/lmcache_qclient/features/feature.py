"""What a feature is: the hooks that the dispatcher fans out to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lmcache_qclient.capture.step import FinishedRequest, StepMeta

Tensors = Mapping[str, torch.Tensor]
"""What a hook can see of one attention layer: "q" `[rows, heads, head_dim]`, later also "k", "v", "o"."""

LayerSink = Callable[[str, Tensors], None]
"""Takes one layer's tensors: the engine's name, and what the hook saw."""


class Feature(ABC):
    """One kind of intermediate tensor on one worker."""

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
