"""Prompt embeddings by content: every bit, the shape and the dtype count; the way they lie in memory does not."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from lmcache_qclient.identity.embeddings import embeds_item
from lmcache_qprotocol.identity import ItemIdentity
from tests.protocol.plain_msgpack import pack

ROWS = torch.arange(12, dtype=torch.float32).view(3, 4)


def test_it_is_what_the_protocol_says() -> None:
    head = pack(["float32", [3, 4]])
    hashed = blake3(
        head + ROWS.numpy().tobytes(),
        derive_key_context="lmcache-qserver 2026-11 prompt embeddings v1",
    )
    assert embeds_item(ROWS, 7) == ItemIdentity("embeds", hashed.hexdigest(), 7)


def test_every_bit_the_shape_and_the_dtype_count() -> None:
    flipped = ROWS.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [
        flipped,
        ROWS.view(4, 3),
        ROWS.view(torch.int32),
        ROWS.to(torch.float64),
        ROWS.to(torch.bfloat16),
        ROWS[:2],
        torch.cat([ROWS[1:], ROWS[:1]]),
    ]
    digests = {embeds_item(one).digest for one in (ROWS, *others)}
    assert len(digests) == 1 + len(others)


def test_strides_a_batch_of_one_and_gradients_do_not() -> None:
    wanted = embeds_item(ROWS)
    for same in (ROWS[None], ROWS.t().contiguous().t(), ROWS.clone().requires_grad_()):
        assert embeds_item(same) == wanted
    wide = torch.zeros(3, 8)
    wide[:, :4] = ROWS
    assert embeds_item(wide[:, :4]) == wanted


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (0, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tokens, width"):
        embeds_item(torch.zeros(shape))
