"""A reader process of a run: the real SDK; it says how much it got, and whether every byte of that was right."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from lmcache_qclient.qcache import QCacheContext, connect, pool_map
from lmcache_qclient.qcache.copies import Copy
from lmcache_qprotocol.errors import QServerError
from tests.e2e.small_worker import MODEL
from tests.faults.page import Page, Phase
from tests.faults.pattern import expected

TRY_AGAIN_S = 20.0
"""How long a reader may take to be back at a server."""


@dataclass(frozen=True)
class Reading:
    """How one retrieve ended.

    Attributes:
        tokens: how many it got.
        right: every byte of them is as it must be.
        reasons: of what is missing.
        error: text of the error, if that was its end.
    """

    tokens: int = 0
    right: bool = True
    reasons: tuple[str, ...] = ()
    error: str = ""


def retrieve(context: QCacheContext, tokens: Sequence[int]) -> Reading:
    """One retrieve, compared with what it must be."""
    try:
        found = context.retrieve(tokens)
    except (ConnectionError, QServerError) as error:
        return Reading(error=f"{type(error).__name__}: {error}")
    right = torch.equal(found.tensor, expected(tokens[: found.num_tokens]))
    reasons = tuple(chunk.reason.value for chunk in found.missing)
    return Reading(found.num_tokens, right, reasons)


def retrieve_at_last(context: QCacheContext, tokens: Sequence[int]) -> Reading:
    """The same, tried again as long as nobody answers."""
    deadline = time.monotonic() + TRY_AGAIN_S
    while (answer := retrieve(context, tokens)).error and time.monotonic() < deadline:
        time.sleep(0.01)
    return answer


def _pause_while_copying(page: Page) -> None:
    def copy_all(copies: Sequence[Copy], threads: int) -> None:
        page.phase = Phase.COPYING
        for target, source in copies:
            np.copyto(target, source)
            time.sleep(page.pause_s)
        page.phase = Phase.ASKING

    assert hasattr(pool_map, "copy_all")
    setattr(pool_map, "copy_all", copy_all)  # noqa: B010 - a name that the module only uses


def main(pipe: Connection, page_path: Path, url: str, http_url: str, timeout_s: float) -> None:
    """Serve commands until the pipe is closed: ("retrieve", tokens), ("retrieve_at_last", tokens)."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    page = Page(page_path)
    _pause_while_copying(page)
    calls = {"retrieve": retrieve, "retrieve_at_last": retrieve_at_last}
    with connect(url, http_url, MODEL, timeout_s=timeout_s) as context:
        pipe.send(Reading())
        while True:
            try:
                command, tokens = pipe.recv()
            except EOFError:
                break
            page.phase = Phase.ASKING
            answer = calls[command](context, tokens)
            page.phase = Phase.IDLE
            pipe.send(answer)
