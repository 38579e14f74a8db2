"""Seeing Q in an unpatched vLLM: `impl.forward` of every attention layer, wrapped per instance; of MLA the layer's own
`forward_impl`, since its `impl` gets queries that are split or absorbed into the latent space.

vLLM's custom attention ops look the function up each time their body runs, compiled or not, so a wrapper set on
the instance after profiling and compilation is called in every real step. Wrapping a class, `Attention.forward` or the
op itself is not: the first sees dummy runs of other engines in the process, the others are traced once and never
called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lmcache_qclient.capture.tensor_kind import LayerSink

logger = logging.getLogger(__name__)


class Tap:
    """Where the hooks of all layers hand what they see.

    Attributes:
        sink: takes a layer's name and its tensors before its attention, "q", "k", "v" `[rows, heads, head_dim]` (no "k"
            and "v" where the layer uses another layer's). None: nobody wants any.
        output_sink: the same behind its attention: "o" `[rows, heads, head_dim of values]`.

    What they raise is logged and goes no further.
    """

    __slots__ = ("output_sink", "sink")

    def __init__(self) -> None:
        self.sink: LayerSink | None = None
        self.output_sink: LayerSink | None = None


def wrap_layers(layers: Mapping[str, Any], names: Iterable[str], tap: Tap) -> None:
    """Hand each layer's tensors to the tap, before and behind its attention.

    Args:
        layers: vLLM's `static_forward_context`.
        names: the layers to wrap.
        tap: may be switched at any time.

    Raises:
        NotImplementedError: a layer has neither.
    """
    found: dict[str, Any] = {name: layers.get(name) for name in names}
    strange = [name for name, layer in found.items() if not (_is_mla(layer) or _is_plain(layer))]
    if strange:
        raise NotImplementedError(f"these layers can't be captured: {', '.join(strange)}")
    for name, layer in found.items():
        hand = _Hand(name)
        if _is_mla(layer):
            layer.forward_impl = _wrapped_mla(layer.forward_impl, tap, hand)
        else:
            layer.impl.forward = _wrapped(layer.impl.forward, tap, hand)


def _is_mla(layer: Any) -> bool:
    return callable(getattr(layer, "forward_impl", None))


def _is_plain(layer: Any) -> bool:
    return callable(getattr(getattr(layer, "impl", None), "forward", None))


class _Hand:
    """Hands one layer's tensors on; the engine would die of what a sink raises.

    Without this layer the step is counted as layer_missing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed = False

    def __call__(self, sink: LayerSink, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            sink(self._name, tensors)
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("the hook of %s failed (logged once a layer)", self._name)


def _wrapped(forward: Callable[..., Any], tap: Tap, hand: _Hand) -> Callable[..., Any]:
    def capturing_forward(
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if tap.sink is not None and attn_metadata is not None:
            # Before attention: what makes a backend change its arguments in place is its own affair.
            seen = {"q": query} if key is None else {"q": query, "k": key, "v": value}
            hand(tap.sink, seen)
        made = forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        if tap.output_sink is not None and attn_metadata is not None:
            # A backend writes where it is told to, and as a rule returns that as well.
            hand(tap.output_sink, {"o": kwargs.get("output", made)})
        return made

    return capturing_forward


def _wrapped_mla(forward: Callable[..., Any], tap: Tap, hand: _Hand) -> Callable[..., Any]:
    """MLA has one latent vector a token in place of keys and values, so "q" and "o" are all there is."""

    def capturing_forward_impl(
        q: torch.Tensor,
        k_c_normed: Any,
        k_pe: Any,
        kv_cache: Any,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if tap.sink is not None and attn_metadata is not None:
            hand(tap.sink, {"q": q})
        made = forward(q, k_c_normed, k_pe, kv_cache, attn_metadata, *args, **kwargs)
        if tap.output_sink is not None and attn_metadata is not None:
            hand(tap.output_sink, {"o": kwargs.get("output", made)})
        return made

    return capturing_forward_impl
