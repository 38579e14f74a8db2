"""Which of a model's tensors a question is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_qclient.qcache.catalog import StoredLayout
from lmcache_qprotocol.keys import FEATURE_SUFFIX

FEATURE = "transfer_query"


@dataclass(frozen=True)
class Asked:
    """Made by `of`.

    Attributes:
        feature: its whole name.
        layers: global indices, in the order of the result; None: all of a layout.
        layout: the one to read; None: whichever fits.
    """

    feature: str
    layers: tuple[int, ...] | None
    layout: StoredLayout | None

    @classmethod
    def of(cls, feature: str, layers: Sequence[int] | None, layout: StoredLayout | None) -> Asked:
        """Check what a caller says.

        Raises:
            TypeError, ValueError: an argument can't be used.
        """
        name = feature_of(feature)
        if layout is not None and layout.feature != name:
            if name != FEATURE:
                raise ValueError(f"the layout is one of {layout.feature}, not of {name}")
            name = layout.feature  # the layout alone says it well enough
        return cls(name, None if layers is None else _layers(layers), layout)

    def is_in(self, layout: StoredLayout) -> bool:
        """Whether the layout has all of the layers."""
        return self.layers is None or set(self.layers) <= set(layout.all_layer_ids)

    def layers_of(self, group: StoredLayout) -> tuple[int, ...] | None:
        """Those of the layers that have the group's shape, in order; None for all of them."""
        if self.layers is None:
            return None
        return tuple(layer for layer in self.layers if layer in group.layer_ids)


def feature_of(name: str) -> str:
    """The whole name of a feature: "key" is transfer_key.

    Raises:
        ValueError: there is no such feature; the known ones are listed.
    """
    for known in FEATURE_SUFFIX:
        if name in (known, known.removeprefix("transfer_")):
            return known
    short = ", ".join(known.removeprefix("transfer_") for known in FEATURE_SUFFIX)
    raise ValueError(f"unknown feature {name!r}; known: {short}")


def _layers(layers: Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, str | bytes) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in layers
    ):
        raise TypeError(f"layers is a list of the model's layer numbers, not {layers!r}")
    chosen = tuple(layers)
    if not chosen or min(chosen) < 0 or len(set(chosen)) != len(chosen):
        raise ValueError(f"layers are numbers from 0 on, each once, at least one; not {layers!r}")
    return chosen
