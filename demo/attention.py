"""Attention, computed from the queries and keys that the store gives back, one layer at a time.

    scores[h, i, j] = q[i, h] · k[j, h // group] * head_dim ** -0.5     group query heads share one key head
    weights[h, i]   = softmax over j <= i of scores[h, i]               a token sees itself and what came before

Stored queries and keys are what attention multiplies, after RoPE; the scale is not folded in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from demo.audit import FINE

SINK_TOKENS = 4
"""The attention sink of StreamingLLM (arXiv 2309.17453): the first four tokens, whatever they say."""
_ROWS = 128
"""Positions that look, taken at once: few enough for a processor's cache; what lies after them is not computed."""


def attention_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """softmax(QKᵀ·scale) of one layer, causal, in float64, so that no rounding of ours is added to the engine's.

    `query` is [tokens, heads, head_dim], `key` [tokens, kv_heads, head_dim] at the same positions; query head h uses
    key head h // (heads / kv_heads). Gives [heads, tokens, tokens]: row i is how token i spreads its attention.
    ValueError if the tokens or widths differ or the heads can't be shared out.
    """
    tokens, heads, head_dim = query.shape
    key_tokens, kv_heads, key_dim = key.shape
    if (tokens, head_dim) != (key_tokens, key_dim) or heads % kv_heads:
        raise ValueError(
            f"queries of shape {tuple(query.shape)} don't go with keys of shape {tuple(key.shape)}"
        )
    # [kv_heads, group, tokens, head_dim] @ [kv_heads, 1, head_dim, tokens]
    grouped = query.double().transpose(0, 1).reshape(kv_heads, -1, tokens, head_dim)
    keys = key.double().permute(1, 2, 0).unsqueeze(1)
    weights = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for start in range(0, tokens, _ROWS):
        end = min(start + _ROWS, tokens)
        scores = (grouped[:, :, start:end] @ keys[..., :end]).flatten(0, 1) * head_dim**-0.5
        future = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
        weights[:, start:end, :end] = scores.masked_fill_(future, -math.inf).softmax(dim=-1)
    return weights


def sink_mass(weights: torch.Tensor) -> torch.Tensor:
    """Share of its attention that each head gives to the first four tokens: float64 [heads].

    `weights` is [heads, tokens, tokens] of one layer. A mean over the query positions from the fifth token on: the
    first four have nothing else to look at and would count as 1. ValueError if there is no fifth token.
    """
    if weights.shape[-1] <= SINK_TOKENS:
        raise ValueError(f"{weights.shape[-1]} tokens are none beside the first {SINK_TOKENS}")
    return weights[:, SINK_TOKENS:, :SINK_TOKENS].double().sum(dim=-1).mean(dim=-1)


def median_head(mass: torch.Tensor) -> tuple[int, int]:
    """Layer and head whose sink is the median of `mass` [layers, heads]: neither all sink nor none."""
    middle = int(mass.flatten().argsort()[mass.numel() // 2])
    return divmod(middle, mass.shape[1])


def largest_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """max |ours - reference|, in float64; inf where either is not finite, so that a limit can't be met by accident.

    ValueError if the shapes differ or there is nothing to compare.
    """
    if ours.shape != reference.shape or ours.numel() == 0:
        raise ValueError(f"cannot compare {tuple(ours.shape)} with {tuple(reference.shape)}")
    worst = float((ours.double() - reference).abs_().max())
    return worst if math.isfinite(worst) else math.inf


@dataclass(frozen=True)
class Comparison:
    """What stored tensors make of attention, beside the reference.

    Attributes:
        mass: `sink_mass` of every layer, from stored tensors: [layers, heads].
        mass_error: `largest_difference` of any mass.
        weight_error: the same of any weight of any layer.
        seen: how many weights that is, those on a token itself and before it.
        beyond: how many of them are off by more than `FINE`.
    """

    mass: torch.Tensor
    mass_error: float
    weight_error: float
    seen: int
    beyond: int


def compare_attention(
    queries: torch.Tensor, keys: torch.Tensor, reference: Iterable[torch.Tensor]
) -> Comparison:
    """Attention from `queries` and `keys` [layers, tokens, heads, head_dim], beside one [heads, T, T] per layer.

    The reference may have more tokens (T >= tokens): what comes later changes nothing before it.
    """
    num_layers, tokens, heads, _ = queries.shape
    masses, mass_error, weight_error, beyond = [], 0.0, 0.0, 0
    for layer in zip(queries, keys, reference, strict=True):
        for query, key, eager in _by_key_head(*layer):
            weights, wanted = attention_weights(query, key), eager[:, :tokens, :tokens]
            masses.append(sink_mass(weights))
            mass_error = max(mass_error, largest_difference(masses[-1], sink_mass(wanted)))
            error = largest_difference(weights, wanted)
            weight_error = max(weight_error, error)
            if error > FINE:
                beyond += int(((weights - wanted).abs_() <= FINE).logical_not_().sum())
    seen = num_layers * heads * tokens * (tokens + 1) // 2
    mass = torch.cat(masses).view(num_layers, heads)
    return Comparison(mass, mass_error, weight_error, seen, beyond)


def _by_key_head(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One layer, a key head and its query heads at a time: what is computed of them then stays small.

    ValueError if the heads can't be shared out.
    """
    kv_heads = key.shape[1]
    groups = query.chunk(kv_heads, dim=1), key.chunk(kv_heads, dim=1), weights.chunk(kv_heads)
    yield from zip(*groups, strict=True)
