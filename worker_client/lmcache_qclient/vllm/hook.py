"""Seeing Q in an unpatched vLLM: `impl.forward` of every attention layer, wrapped per instance.

vLLM's custom attention op looks `self.impl.forward` up each time its body runs, compiled or not, so a wrapper set on
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
        NotImplementedError: a layer has no `impl.forward` with a plain query (MLA).
    """
    impls: dict[str, Any] = {name: getattr(layers.get(name), "impl", None) for name in names}
    strange = [name for name, impl in impls.items() if not callable(getattr(impl, "forward", None))]
    if strange:
        raise NotImplementedError(
            f"queries of these layers can't be captured yet: {', '.join(strange)}"
        )
    for name, impl in impls.items():
        impl.forward = _wrapped(name, impl.forward, tap)


def _wrapped(name: str, forward: Callable[..., Any], tap: Tap) -> Callable[..., Any]:
    failed: list[str] = []

    def hand(sink: LayerSink, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            sink(name, tensors)
        except Exception:
            # The engine would die of it. Without this layer the step is counted as layer_missing.
            if not failed:
                failed.append(name)
                logger.exception("the hook of %s failed (logged once a layer)", name)

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
