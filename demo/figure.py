"""A picture of one prompt's queries: how long the query of every head is at every position."""

from __future__ import annotations

from pathlib import Path

import torch

_PIXELS = (1600, 1400)
_DPI = 100


def query_norms(queries: torch.Tensor) -> torch.Tensor:
    """‖q‖₂ of `queries` [layers, tokens, heads, head_dim] as fp32 [layers * heads, tokens], grouped by layer."""
    # [layers, tokens, heads]
    norms: torch.Tensor = torch.linalg.vector_norm(queries.detach().float(), dim=-1)
    return norms.transpose(1, 2).flatten(0, 1).cpu()


def draw_query_norms(
    queries: torch.Tensor, path: Path, title: str, *, chunk_size: int = 256
) -> Path:
    """Write a PNG of 1600 x 1400 pixels to `path` and return it.

    `queries` is [layers, tokens, heads, head_dim] of one prompt. One row per (layer, head), layer 0 on top, thin lines
    between layers; position runs to the right, with the edges of the store's chunks marked. The colour scale covers the
    middle 99 % of the norms, so that a few outliers (the first token often is one) don't flatten the rest.
    """
    # The object interface instead of pyplot: no global state, no display, whatever backend the caller has chosen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MultipleLocator

    num_layers, num_tokens, num_heads, _ = queries.shape
    norms = query_norms(queries)
    low, high = (float(torch.nanquantile(norms.flatten(), q)) for q in (0.005, 0.995))

    figure = Figure(
        figsize=(_PIXELS[0] / _DPI, _PIXELS[1] / _DPI),
        dpi=_DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15),
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = num_layers * num_heads
    image = axes.imshow(
        norms.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=low,
        vmax=high,
        extent=(0, num_tokens, rows, 0),  # token t covers [t, t + 1)
    )

    for layer in range(1, num_layers):
        axes.axhline(layer * num_heads, color="white", linewidth=0.8)
    label_every = 1 if num_layers <= 40 else 4
    labelled = range(0, num_layers, label_every)
    axes.set_yticks(
        [(layer + 0.5) * num_heads for layer in labelled], [str(layer) for layer in labelled]
    )
    axes.tick_params(labelsize=12)
    axes.set_ylabel(f"layer (each with heads 0-{num_heads - 1}, head 0 on top)", fontsize=14)

    axes.xaxis.set_major_locator(MultipleLocator(_tick_step(num_tokens)))
    axes.set_xlabel("position in prompt (tokens)", fontsize=14)
    chunk_edges = range(chunk_size, num_tokens, chunk_size)
    for edge in chunk_edges:
        axes.axvline(edge, color="white", linewidth=2.2)
        axes.axvline(edge, color="#d62728", linewidth=1.4, linestyle=(0, (6, 4)))
    for chunk, start in enumerate(range(0, num_tokens, chunk_size)):
        end = min(start + chunk_size, num_tokens)
        whole = "" if end - start == chunk_size else ", partial"
        if (
            end - start >= num_tokens // 12
        ):  # narrower than that, the words would run into the neighbour's
            axes.annotate(
                f"chunk {chunk}{whole}",
                ((start + end) / 2, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=12,
                color="#d62728",
            )
    axes.set_title(title, fontsize=17, pad=26)

    bar = figure.colorbar(image, ax=axes, extend="both", extendfrac=0.02, pad=0.01, aspect=50)
    bar.set_label("‖q‖₂", fontsize=14)
    bar.ax.tick_params(labelsize=12)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _tick_step(num_tokens: int) -> int:
    """A step of 1, 2, 4, ... tokens that gives 8 to 16 ticks: powers of two fall on block and chunk edges."""
    step = 1
    while num_tokens / step > 16:
        step *= 2
    return step
