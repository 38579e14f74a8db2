import struct
from pathlib import Path

import pytest
import torch

from demo.figure import draw_query_norms, query_norms


def test_norms_have_one_row_per_head_grouped_by_layer() -> None:
    queries = torch.zeros(2, 3, 4, 8)
    queries[1, 2, 3] = 2.0
    norms = query_norms(queries)
    assert norms.shape == (8, 3)
    assert norms.nonzero().tolist() == [[1 * 4 + 3, 2]]
    assert norms[7, 2] == pytest.approx(2.0 * 8**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 256, 523])
def test_picture_is_a_png_of_the_promised_size(
    tmp_path: Path, num_tokens: int, dtype: torch.dtype
) -> None:
    queries = torch.rand(30, num_tokens, 9, 4).to(dtype)
    path = draw_query_norms(queries, tmp_path / "new" / "norms.png", "Queries of “story”")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1600, 1400)


def test_picture_tolerates_rows_that_are_absent(tmp_path: Path) -> None:
    queries = torch.rand(2, 20, 3, 4)
    queries[:, 5:9] = torch.nan
    assert draw_query_norms(queries, tmp_path / "gaps.png", "gaps", chunk_size=8).stat().st_size > 0
