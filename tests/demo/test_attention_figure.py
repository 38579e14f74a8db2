import struct
from pathlib import Path

import pytest
import torch

from demo.attention_figure import draw_causal_map, draw_sink_mass


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (30, 9)])
def test_sink_is_a_png_of_the_promised_size(tmp_path: Path, layers: int, heads: int) -> None:
    path = draw_sink_mass(
        torch.rand(layers, heads), tmp_path / "new" / "sink.png", "Sink of “story”"
    )
    assert size_of(path) == (1600, 620)


@pytest.mark.parametrize("num_tokens", [1, 256, 523])
def test_map_is_a_png_of_the_promised_size(tmp_path: Path, num_tokens: int) -> None:
    weights = torch.rand(num_tokens, num_tokens).tril()
    path = draw_causal_map(weights, tmp_path / "new" / "map.png", "Map of “story”")
    assert size_of(path) == (1500, 1250)
