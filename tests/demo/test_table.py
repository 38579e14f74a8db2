import math

import pytest

from demo.table import cell_text, render_table


def test_table_is_aligned() -> None:
    rows = [
        {"prompt": "story", "tokens": 697, "max error": 5.4734e-06, "whole": True},
        {"prompt": "german-letter", "tokens": 12507, "whole": False, "max error": 0.25},
    ]
    assert render_table(rows) == (
        "prompt         tokens  max error  whole\n"
        "-------------  ------  ---------  -----\n"
        "story             697    5.5e-06  yes\n"
        "german-letter  12,507       0.25  no"
    )


def test_columns_choose_and_order_and_absent_cells_are_dashes() -> None:
    rows: list[dict[str, object]] = [{"a": 1, "b": "x"}, {"a": None, "c": 2}]
    assert render_table(rows, ["b", "a"]) == "b  a\n-  -\nx  1\n-  -"


def test_no_rows_leave_the_head() -> None:
    assert render_table([], ["prompt", "tokens"]) == "prompt  tokens\n------  ------"


def test_wide_characters_take_two_columns() -> None:
    lines = render_table([{"text": "石桥", "n": 1}, {"text": "ab", "n": 20}]).splitlines()
    assert lines == ["text   n", "----  --", "石桥   1", "ab    20"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (-3, "-3"),
        (0.0, "0"),
        (0.98765, "0.988"),
        (6.2e-6, "6.2e-06"),
        (123456.7, "123,457"),
        (999.7, "1,000"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (True, "yes"),
        (None, "-"),
        ("two\nlines", "two lines"),
    ],
)
def test_cells_are_shortened_for_reading(value: object, text: str) -> None:
    assert cell_text(value) == text
