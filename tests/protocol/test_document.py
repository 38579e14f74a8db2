"""PROTOCOL.md says what the code does: generated parts are fresh, and no code, reason or formula is left out."""

from __future__ import annotations

import re
from enum import Enum

import pytest

from docs.generate_protocol import PART, PARTS, PROTOCOL, updated
from lmcache_qprotocol import hashing, keys, layout
from lmcache_qprotocol.dtypes import DTYPE_BYTES
from lmcache_qprotocol.errors import ErrorCode
from lmcache_qprotocol.reasons import LossReason, MissReason

TEXT = PROTOCOL.read_text()


def test_the_generated_parts_are_up_to_date() -> None:
    assert {match[2] for match in PART.finditer(TEXT)} == set(PARTS)
    assert updated(TEXT) == TEXT, "run: python docs/generate_protocol.py"


@pytest.mark.parametrize(
    ("heading", "closed_set"),
    [
        ("| code | when |", ErrorCode),
        ("(`LossReason`", LossReason),
        ("(`MissReason`)", MissReason),
    ],
)
def test_a_closed_set_is_listed_in_full_and_in_order(heading: str, closed_set: type[Enum]) -> None:
    rest = TEXT[TEXT.index(heading) :]
    rows = re.search(r"(?:^\| `\w+` \|.*\n)+", rest, re.MULTILINE)
    assert rows is not None
    assert re.findall(r"^\| `(\w+)`", rows[0], re.MULTILINE) == [
        member.value for member in closed_set
    ]


def test_contexts_and_dtypes_are_named() -> None:
    for context in (
        hashing.ROOT_CONTEXT,
        hashing.ITEM_CONTEXT,
        keys.KEY_CONTEXT,
        keys.SALT_CONTEXT,
        layout.LAYOUT_CONTEXT,
    ):
        assert f'"{context}"' in TEXT
    words = " ".join(TEXT.split())
    assert ", ".join(DTYPE_BYTES) + ";" in words


def test_a_default_that_is_a_word_is_told() -> None:
    assert '| `kind` | str (<= 32) | "shm" |' in TEXT
