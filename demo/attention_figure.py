"""Pictures of attention: what every head gives to the first tokens, and one head's map."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

_DPI = 100
_SINK_PIXELS = (1600, 620)
_MAP_PIXELS = (1500, 1250)
_FAINTEST = 1e-4
"""The map's colours end here; what is fainter, a future token's nothing included, is not told apart."""
_WIDE_COLUMNS = 8
_CHUNK_EDGE: dict[str, Any] = {"color": "#4c9be8", "linewidth": 1.2, "linestyle": (0, (6, 4))}


def _new_figure(pixels: tuple[int, int]) -> Any:
    # The object interface instead of pyplot: no global state, no display, whatever backend the caller has chosen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(
        figsize=(pixels[0] / _DPI, pixels[1] / _DPI),
        dpi=_DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15),
    )
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def draw_sink_mass(mass: torch.Tensor, path: Path, title: str) -> Path:
    """Write a PNG of 1600 x 620 pixels to `path` and return it.

    `mass` is [layers, heads], shares between 0 and 1. Layers run to the right, head 0 is on top; every cell says its
    share in percent.
    """
    shares = mass.detach().double().cpu().numpy()
    num_layers, num_heads = shares.shape
    figure = _new_figure(_SINK_PIXELS)
    axes = figure.add_subplot()
    image = axes.imshow(shares.T, aspect="auto", cmap="magma", vmin=0, vmax=1)
    for layer in range(num_layers):
        for head in range(num_heads):
            share = shares[layer, head]
            colour = "black" if share > 0.6 else "white"
            axes.text(layer, head, f"{100 * share:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(num_layers))
    axes.set_yticks(range(num_heads))
    axes.set_xlabel("layer", fontsize=14)
    axes.set_ylabel("query head", fontsize=14)
    axes.set_title(title, fontsize=15)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
    bar.set_label("share of attention", fontsize=14)
    return _save(figure, path)


def draw_causal_map(
    weights: torch.Tensor, path: Path, title: str, *, chunk_size: int = 256
) -> Path:
    """Write a PNG of 1500 x 1250 pixels to `path` and return it.

    `weights` is one head's [tokens, tokens], row i the attention of token i. Colours are logarithmic from 1e-4 to 1,
    since most weights are small. A panel of its own shows the first eight columns, the attention sink's among them,
    wide enough to be seen; the store's chunks are marked on both sides.
    """
    from matplotlib.colors import LogNorm

    num_tokens = weights.shape[0]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    visible = weights.detach().double().cpu().clamp_min(_FAINTEST).masked_fill(future, math.nan)
    figure = _new_figure(_MAP_PIXELS)
    first, whole = figure.subplots(1, 2, sharey=True, width_ratios=(1, 11))
    columns = {first: min(_WIDE_COLUMNS, num_tokens), whole: num_tokens}
    for axes, end in columns.items():
        image = axes.imshow(
            visible[:, :end].numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="magma",
            norm=LogNorm(_FAINTEST, 1),
            extent=(0, end, num_tokens, 0),  # token t covers [t, t + 1)
        )
    for edge in range(chunk_size, num_tokens, chunk_size):
        whole.plot([0, edge, edge], [edge, edge, num_tokens], **_CHUNK_EDGE)
    whole.set_xlim(0, num_tokens)
    whole.set_ylim(num_tokens, 0)
    first.set_xticks([column + 0.5 for column in range(columns[first])], range(columns[first]))
    first.set_ylabel("position that looks (tokens)", fontsize=14)
    whole.set_xlabel("position that is looked at (tokens)", fontsize=14)
    figure.suptitle(title, fontsize=15)
    bar = figure.colorbar(image, ax=whole, extend="min", pad=0.02, aspect=50)
    bar.set_label("attention weight", fontsize=14)
    return _save(figure, path)
