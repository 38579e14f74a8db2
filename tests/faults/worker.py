"""A worker process of a run: the real capture, ring and adapter; it does what the driver's pipe tells it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.e2e.small_worker import SmallWorker
from tests.faults.page import Page, Phase
from tests.faults.pattern import HEAD_DIM, HEADS, LAYERS, queries

RETURN_S = 20.0
"""How long a worker may take to be back at a server."""


@dataclass(frozen=True)
class WorkerState:
    """What a worker says of itself.

    Attributes:
        computed, captured, lost, pending: tokens since it started; `lost` by reason.
        free_blocks, blocks: of its ring.
    """

    computed: int
    captured: int
    lost: dict[str, int]
    pending: int
    free_blocks: int
    blocks: int
    healthy: bool


class FaultWorker(SmallWorker):
    """A worker whose Q is a function of the token."""

    def __init__(self, url: str, instance_id: str, reply_timeout_s: float = 5.0) -> None:
        super().__init__(
            url, instance_id, layers=range(LAYERS), heads=HEADS, head_dim=HEAD_DIM, ring_blocks=128
        )
        self.heartbeat = self.adapter._heartbeat
        self.heartbeat._reply_timeout_s = reply_timeout_s

    def queries(self, tokens: Sequence[int], positions: Sequence[int], layer: int) -> torch.Tensor:
        return queries([tokens[position] for position in positions], layer)

    def submit(self, request_id: str, tokens: Sequence[int]) -> None:
        """Compute a prompt and send its stores, without waiting."""
        self.prefill(request_id, tokens)
        self.finish_step()

    def store(self, request_id: str, tokens: Sequence[int]) -> WorkerState:
        """Compute a prompt, store it, wait for the end."""
        self.submit(request_id, tokens)
        self.settle(request_id)
        return self.state()

    def come_back(self) -> WorkerState:
        """Wait until the server knows this worker, and every ring block is free again."""
        deadline = time.monotonic() + RETURN_S
        while True:
            self.capture.reclaim()
            state = self.state()
            if (state.healthy and state.free_blocks == state.blocks) or time.monotonic() > deadline:
                return state
            time.sleep(0.002)

    def state(self) -> WorkerState:
        """Now."""
        account, ring = self.account, self.capture.ring
        assert ring is not None
        return WorkerState(
            computed=account.computed,
            captured=account.captured,
            lost={reason.value: count for reason, count in account.lost.items() if count},
            pending=account.pending,
            free_blocks=ring.num_free_blocks(),
            blocks=ring.num_blocks,
            healthy=self.heartbeat.healthy,
        )


def main(
    pipe: Connection, page_path: Path, url: str, instance_id: str, reply_timeout_s: float
) -> None:
    """Serve commands until the pipe is closed: ("store", request id, tokens), ("come_back",)."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # losing the server is what these runs are about
    page = Page(page_path)
    worker = FaultWorker(url, instance_id, reply_timeout_s)
    pipe.send(worker.state())
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            break
        if command == "store":
            request_id, tokens = arguments
            page.phase = Phase.COMPUTING
            worker.prefill(request_id, tokens)
            page.phase = Phase.STORING
            worker.finish_step()
            worker.settle(request_id)
            page.phase = Phase.IDLE
            pipe.send(worker.state())
        else:
            pipe.send(worker.come_back())
    worker.capture.shutdown()
