"""A worker without an engine: the real capture, ring and adapter, fed with Q = f(position, layer, element).

Run as a program it registers a ring and waits to be killed: `python -m tests.e2e.small_worker URL [fork]`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import torch

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.capture import QRingBufferCapture
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.features.query import FEATURE as QUERY
from lmcache_qclient.features.registry import FEATURE_REGISTRY
from lmcache_qclient.link.connection import AUTO, Connection
from lmcache_qprotocol.keys import FEATURE_SUFFIX
from tests.worker_client.capture.fake_vllm import (
    FullAttentionSpec,
    cache_config,
    caches,
    group,
    layer_names,
    vllm_config,
)

MODEL = "small"
LAYERS, HEADS, HEAD_DIM = 3, 2, 8
BLOCK = 16


def rows(positions: Sequence[int], layer: int) -> torch.Tensor:
    """Q of some positions: float32 `[rows, heads, head_dim]`, every element unlike every other."""
    position = torch.tensor(positions, dtype=torch.float32).view(-1, 1, 1)
    element = torch.arange(HEADS * HEAD_DIM, dtype=torch.float32).view(1, HEADS, HEAD_DIM)
    return position * 100 + layer * 20 + element


class SmallWorker:
    """One worker of model `MODEL`.

    Args:
        layers: global numbers of the layers that it has.
        heads, head_dim: of its queries; `queries` has to give such.
        transport: how its bytes go.
        features: what it captures; keys are the negative of queries, of the first head only.
    """

    def __init__(
        self,
        url: str,
        instance_id: str = "small-0",
        ring_blocks: int = 64,
        tails: bool = True,
        layers: Sequence[int] = range(LAYERS),
        heads: int = HEADS,
        head_dim: int = HEAD_DIM,
        features: Sequence[str] = (QUERY.name,),
        transport: str = AUTO,
    ) -> None:
        ways = [
            (
                FEATURE_REGISTRY[feature],
                QRingBufferAdapter(
                    Connection.open(url, client="small worker", transport=transport),
                    instance_id=_named(instance_id, feature),
                    model_name=MODEL,
                    world_size=1,
                    rank=0,
                    account=Account(),
                    heartbeat_interval_s=0.5,
                ),
            )
            for feature in features
        ]
        self.adapters = [adapter for _, adapter in ways]
        self.adapter = self.adapters[0]
        self.account = self.adapter.account
        self.capture = QRingBufferCapture(ways, RingSettings(blocks=ring_blocks, tails=tails))
        names = [layer_names(1, first=number)[0] for number in layers]
        self.names = dict(zip(layers, names, strict=True))
        self.capture.setup_q_ring(
            caches(names),
            cache_config(group(FullAttentionSpec(BLOCK), names)),
            vllm_config(heads=heads, kv_heads=1, head_dim=head_dim, block_size=BLOCK),
        )

    def queries(self, tokens: Sequence[int], positions: Sequence[int], layer: int) -> torch.Tensor:
        """Q of a prompt's positions: float32 `[rows, heads, head_dim]`."""
        return rows(positions, layer)

    def prefill(self, request_id: str, tokens: Sequence[int], cached: int = 0) -> None:
        """Compute a prompt in one step; its cache blocks are scattered, its rows come backwards.

        Args:
            cached: tokens that the engine's prefix cache has; they are not computed.
        """
        blocks = tuple(7 + 3 * index for index in range(-(-len(tokens) // BLOCK)))
        step = RequestStep(
            request_id,
            cached,
            len(tokens) - cached,
            blocks[cached // BLOCK :],
            len(tokens),
            tuple(tokens),
            first=True,
        )
        self.capture.begin_step(StepMeta((step,)))
        order = list(reversed(range(cached, len(tokens))))
        slots = torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in order])
        for layer, name in self.names.items():
            query = self.queries(tokens, order, layer)
            self.capture.save_layer(name, {"q": query, "k": -query[:, :1]}, slots)

    def finish_step(self) -> None:
        """The forward pass is over."""
        self.capture.batched_submit_qstore_requests(b"")

    def settle(self, request_id: str) -> None:
        """End a request and wait until every store has been answered."""
        self.capture.begin_step(StepMeta((), (FinishedRequest(request_id),)))
        self.finish_step()
        for adapter in self.adapters:
            for sequence in list(adapter._in_flight):
                adapter.wait_for_store(sequence, 10)
        self.capture.reclaim()


def _named(instance_id: str, feature: str) -> str:
    return instance_id + ("" if feature == QUERY.name else FEATURE_SUFFIX[feature])


def main() -> None:
    """Register, perhaps fork a child that keeps every descriptor, say so, wait."""
    worker = SmallWorker(sys.argv[1])
    if "fork" in sys.argv and os.fork() == 0:
        signal.pause()
    print(worker.adapter.instance_id, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
