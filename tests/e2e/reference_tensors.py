"""Keys, values, attention outputs and attention weights by transformers alone; see demo/reference.py for queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from demo.reference import Reference


@dataclass(frozen=True)
class AttentionTensors:
    """What one sequence's attention takes and makes; fp32 `[layers, tokens, heads, head_dim]`.

    Attributes:
        query, key: after RoPE.
        output: before the output projection.
        weights: eager attention, `[layers, heads, tokens, tokens]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    weights: torch.Tensor

    def of(self, feature: str) -> torch.Tensor:
        """By a feature's short name."""
        by_name = {"attention_output": self.output}
        return by_name[feature] if feature in by_name else getattr(self, feature)


@torch.inference_mode()
def attention_tensors(reference: Reference, token_ids: Sequence[int]) -> AttentionTensors:
    """One pass of the whole sequence, with hooks on transformers' own modules."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    decoder = reference.model.model
    seen: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": [], "o": []}
    hooks = []
    for layer in decoder.layers:
        for name in ("q", "k", "v"):

            def keep(_module: Any, _inputs: Any, output: torch.Tensor, name: str = name) -> None:
                seen[name].append(output[0])

            hooks.append(getattr(layer.self_attn, f"{name}_proj").register_forward_hook(keep))

        def keep_input(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            seen["o"].append(inputs[0][0])

        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(keep_input))
    try:
        ids = torch.tensor([list(token_ids)])
        weights = decoder(ids, use_cache=False, output_attentions=True).attentions
    finally:
        for hook in hooks:
            hook.remove()
    shape = (len(decoder.layers), len(token_ids), -1, reference.head_dim)
    q, k, v, o = (torch.stack(seen[name]).view(shape) for name in ("q", "k", "v", "o"))
    heads_first = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = decoder.rotary_emb(q, torch.arange(len(token_ids)).unsqueeze(0))
    turned = apply_rotary_pos_emb(*heads_first, cos, sin)
    query, key = (tensor.transpose(1, 2).contiguous() for tensor in turned)
    return AttentionTensors(query, key, v, o, torch.stack([one[0] for one in weights]))
