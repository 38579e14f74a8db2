"""Layers of a speculative draft model: they share the engine's tables with the model's own, but are not the model's.

vLLM 0.32 numbers an EAGLE or MTP head's layers on from the model's last one ("model.layers.32..." beside 32 layers), or
names them under a part of their own ("draft_model.model.layers.0...", "mtp.layers.0...").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

DRAFT_PARTS = {"draft_model", "mtp"}


def without_drafts(
    names: Sequence[str], vllm_config: Any, layer_id: Callable[[str], int]
) -> tuple[str, ...]:
    """The model's own layers among `names`, in order.

    Args:
        names: the engine's names of attention layers.
        vllm_config: the engine's configuration.
        layer_id: a layer's global index by its name.
    """
    if getattr(vllm_config, "speculative_config", None) is None:
        return tuple(names)
    depth = int(vllm_config.model_config.get_total_num_hidden_layers())
    return tuple(
        name for name in names if not DRAFT_PARTS & set(name.split(".")) and layer_id(name) < depth
    )
