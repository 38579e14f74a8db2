"""Draws docs/figures/growth.png from bench.json: `python -m benchmarks.growth_plot`, after `make bench`."""

from __future__ import annotations

import json
from pathlib import Path

BENCH = Path("bench.json")
PICTURE = Path("docs/figures/growth.png")
SERIES = {
    "store_us_by_objects": "objects in the index",
    "store_us_by_instances": "instances that store in turn",
}
"""Part of bench.json → what its numbers count."""


def draw(figures: dict[str, dict[str, float]], path: Path) -> None:
    """One panel per series: microseconds of a tiny store over what grows, from 0 up."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(SERIES), sharey=True, squeeze=False)[0]
    for axes, (name, label) in zip(panels, SERIES.items(), strict=True):
        points = {int(count): value for count, value in figures[name].items()}
        axes.plot(list(points), list(points.values()), marker="o")
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(0, 1.5 * max(max(figures[name].values()) for name in SERIES))
    panels[0].set_ylabel("one tiny store, median, us")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    draw(json.loads(BENCH.read_text()), PICTURE)
    print(PICTURE)
