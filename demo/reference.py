"""The independent reference: what the queries, keys and attention of a prompt are, by transformers alone.

Neither vLLM nor any code of this project takes part. The whole prompt goes through the model in one pass in fp32;
hooks keep the outputs of every layer's `q_proj` and `k_proj`, and transformers' own rotary embedding turns them. These
are the tensors that attention multiplies: after RoPE, the softmax scale not folded in. The attention itself is what
transformers' eager implementation gives out (`output_attentions`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class ReferencePass:
    """What one pass of a prompt computes; in the reference's dtype, CPU, positions 0, 1, ...

    Attributes:
        queries: [layers, tokens, heads, head_dim].
        keys: [layers, tokens, kv_heads, head_dim].
        attention: of each layer, [heads, tokens, tokens]; a row per token that looks. Empty if it was not asked for.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    attention: tuple[torch.Tensor, ...]


class Reference:
    """A Llama model in transformers (CPU, eager attention), loaded once and asked many times.

    In float64 it tells what part of a difference is the rounding of which side. Norms, rotary angles and softmax are
    computed in fp32 then, too, so it is exact to about 1e-6 of a weight.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        """Load the checkpoint in `model_dir`; no network. ValueError for a model that is not a plain Llama."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            str(model_dir), dtype=dtype, attn_implementation="eager", local_files_only=True
        )
        if model.config.model_type != "llama":
            raise ValueError(
                f"the reference knows Llama models, this is {model.config.model_type!r}: between q_proj and RoPE other "
                "models may do more (q_norm, partial rotation)"
            )
        self.model = model.eval()
        self.head_dim: int = model.model.layers[0].self_attn.head_dim

    def queries(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Queries of `token_ids` at positions 0, 1, ...: CPU, [layers, tokens, heads, head_dim]."""
        return self.run(token_ids).queries

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], *, attention: bool = False) -> ReferencePass:
        """One pass of `token_ids`; with `attention` its weights too (layers * heads * tokens² numbers)."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        decoder = self.model.model
        projected: dict[str, list[torch.Tensor]] = {"q_proj": [], "k_proj": []}
        hooks = []
        for layer in decoder.layers:
            for name, kept in projected.items():
                projection = getattr(layer.self_attn, name)
                hooks.append(projection.register_forward_hook(_keep(kept)))
        try:
            output = decoder(
                torch.tensor([list(token_ids)]), use_cache=False, output_attentions=attention
            )
        finally:
            for hook in hooks:
                hook.remove()
        # [layers, heads, tokens, head_dim]: layers take the place of the batch, the positions are the same for all.
        shape = (len(decoder.layers), len(token_ids), -1, self.head_dim)
        q, k = (torch.stack(kept).view(shape).transpose(1, 2) for kept in projected.values())
        cos, sin = decoder.rotary_emb(q, torch.arange(len(token_ids)).unsqueeze(0))
        queries, keys = (
            turned.transpose(1, 2).contiguous() for turned in apply_rotary_pos_emb(q, k, cos, sin)
        )
        weights = output.attentions if attention else ()
        return ReferencePass(queries, keys, tuple(one[0] for one in weights))


def _keep(kept: list[torch.Tensor]) -> Callable[..., None]:
    """A forward hook that appends a module's output [tokens, width] to `kept`."""

    def hook(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        kept.append(output[0])

    return hook


@functools.lru_cache(maxsize=1)
def _loaded(model_dir: Path) -> Reference:
    return Reference(model_dir)


def reference_queries(model_dir: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """`Reference(model_dir).queries(token_ids)`; the last model asked for stays loaded."""
    return _loaded(Path(model_dir).resolve()).queries(token_ids)


def max_relative_row_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The worst relative error of any row, a row being what one token asks in one layer.

    Both are [layers, tokens, ...] of one shape and any float dtype; a row is everything after the second axis,
    compared in float64. A row's error is the larger of

        ||ours - reference||_2 / ||reference||_2       wrong overall
        max|ours - reference|  / max|reference|        wrong in one place, which a norm over 576 numbers hides

    where a swapped, shifted or stale row stands out as about 1 or more, rounding in fp32 as some 1e-6. Anything not
    finite, on either side, makes the result inf, as does a non-zero row where the reference is all zero: a comparison
    with a threshold can't pass by accident. ValueError if the shapes differ or there is nothing to compare.
    """
    if ours.shape != reference.shape:
        raise ValueError(
            f"cannot compare queries of shape {tuple(ours.shape)} with {tuple(reference.shape)}"
        )
    if ours.dim() < 3 or ours.numel() == 0:
        raise ValueError(
            f"no rows to compare in shape {tuple(ours.shape)}: expected [layers, tokens, ...]"
        )
    worst = 0.0
    for our_layer, reference_layer in zip(
        ours, reference, strict=True
    ):  # a layer at a time: float64 is twice as big
        wanted = reference_layer.flatten(1).double().cpu()
        error = our_layer.flatten(1).double().cpu() - wanted
        if not (torch.isfinite(error).all() and torch.isfinite(wanted).all()):
            return math.inf
        for order in (2.0, math.inf):
            size = torch.linalg.vector_norm(wanted, ord=order, dim=1)
            off = torch.linalg.vector_norm(error, ord=order, dim=1)
            relative = torch.where(off == 0, 0.0, off / size)  # 0/0 is no error, x/0 is inf
            worst = max(worst, float(relative.max()))
    return worst
