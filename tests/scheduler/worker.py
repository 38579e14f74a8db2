"""Our worker's side under test: the real capture, ledger and ring, with an adapter that answers when it likes."""

from __future__ import annotations

import pickle
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lmcache_qclient.capture.capture import QRingBufferCapture
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qclient.features.query import FEATURE as QUERY
from lmcache_qprotocol.reasons import LossReason
from lmcache_qprotocol.stamps import first_stamp
from tests.scheduler.model import HEAD_DIM, HEADS, LAYERS
from tests.scheduler.runner import Forward
from tests.scheduler.scenario import Scenario
from tests.worker_client.capture.fake_adapter import FakeAdapter, Stored
from tests.worker_client.capture.fake_vllm import caches, layer_names, vllm_config


class SlowAdapter(FakeAdapter):
    """Answers each store under way with some chance a step, and refuses some; until then the blocks must not change.

    Now and then the server is gone for some steps. Stores without an answer are lost then, but a server that hangs may
    still be copying: their blocks wait in quarantine until it is back.
    """

    def __init__(self, random: Random, scenario: Scenario) -> None:
        super().__init__(scenario.chunk_size)
        self.random, self.scenario = random, scenario
        self.sent: list[Stored] = []
        self.refused: list[Stored] = []
        self.quarantine: list[Stored] = []
        self.is_gone = False
        self.outages = 0

    def submit_q_store_request(self, chunk: FinishedChunk) -> int:
        if self.is_gone:
            assert self.ring is not None
            chunk.tally.lose(LossReason.SERVER_UNAVAILABLE, chunk.tokens)
            self.ring.free(chunk.blocks)
            return -1
        number = super().submit_q_store_request(chunk)
        self.sent.append(self.stored[-1])
        return number

    def reclaim_finished_q_stores(self, all_of_them: bool = False) -> int:
        assert self.ring is not None
        self._come_and_go(all_of_them)
        done: list[Stored] = []
        left: list[Stored] = []
        for item in self.sent:
            answered = all_of_them or self.random.random() < self.scenario.answer
            (done if answered else left).append(item)
        self.sent = left
        self.waiting = [item.chunk for item in self.sent]
        for item in done:
            self._check_untouched(item)
            if self.random.random() < self.scenario.refuse:
                self.refused.append(item)
                item.chunk.tally.lose(LossReason.POOL_FULL, item.chunk.tokens)
            else:
                item.chunk.tally.capture(item.chunk.tokens)
            self.ring.free(item.chunk.blocks)
        return len(done)

    def _come_and_go(self, come: bool) -> None:
        assert self.ring is not None
        if self.is_gone and (come or self.random.random() < 0.3):
            self.is_gone = False
            for item in self.quarantine:
                self._check_untouched(item)
                self.ring.free(item.chunk.blocks)
            self.quarantine = []
        elif not self.is_gone and not come and self.random.random() < self.scenario.outage:
            self.is_gone = True
            self.outages += 1
            for item in self.sent:
                item.chunk.tally.lose(LossReason.SERVER_UNAVAILABLE, item.chunk.tokens)
            self.quarantine, self.sent = self.sent, []

    def _check_untouched(self, item: Stored) -> None:
        assert self.ring is not None
        slots = [
            block * self.ring.block_size + offset
            for block in item.chunk.blocks
            for offset in range(self.ring.block_size)
        ]
        assert self.ring.flat_stamps[slots].tolist() == item.stamps.tolist(), (
            "ring blocks were given away while a store of them was under way"
        )
        for layer in range(LAYERS):
            now = self.ring.tensors[f"lmcache_q_layer_{layer}"][list(item.chunk.blocks)]
            assert torch.equal(
                now.reshape(len(slots), -1), torch.from_numpy(item.rows[:, layer])
            ), "ring rows were overwritten while a store of them was under way"


class Worker:
    """See the head of this file."""

    def __init__(self, random: Random, scenario: Scenario, kv_cache_config: Any) -> None:
        self.random, self.scenario = random, scenario
        self.computed = 0
        self.adapter = SlowAdapter(random, scenario)
        self.capture = QRingBufferCapture(
            [(QUERY, self.adapter)],  # type: ignore[list-item]
            RingSettings(blocks=scenario.ring_blocks, tails=scenario.pieces),
        )
        self.names = layer_names(LAYERS)
        self.capture.setup_q_ring(
            caches(self.names),
            kv_cache_config,
            vllm_config(heads=HEADS, head_dim=HEAD_DIM, block_size=scenario.block_size),
        )

    def step(self, meta: StepMeta, tokens: int, forward: Forward | None) -> None:
        """One step of `tokens` tokens, as the connector's hooks drive it."""
        self.computed += tokens
        self.capture.begin_step(pickle.loads(pickle.dumps(meta)))
        if forward is not None:
            self._attend(forward)
        if self.scenario.reclaim_first:
            self.capture.reclaim()
        self.capture.batched_submit_qstore_requests(b"")
        if not self.scenario.reclaim_first:
            self.capture.reclaim()
        self.check()

    def _attend(self, forward: Forward) -> None:
        query = torch.from_numpy(forward.query)
        slots = torch.from_numpy(forward.slots)
        names = dict(enumerate(self.names))
        if self.random.random() < self.scenario.faults:
            del names[self.random.randrange(LAYERS)]
        if self.random.random() < self.scenario.faults:
            slots[self.random.randrange(len(slots))] = -1
        for layer, name in names.items():
            self.capture.save_q_layer(name, query[:, layer], slots)

    def idle(self, ended: tuple[FinishedRequest, ...] | None) -> None:
        """No step comes for a while."""
        self.capture.work_idle(ended)
        self.check()

    def check(self) -> None:
        """Every computed token is in one place, every ring block has one owner."""
        ledger, ring, account = self.capture.ledger, self.capture.ring, self.adapter.account
        assert ledger is not None
        assert ring is not None
        open_chunks = [c for request in ledger._requests.values() for c in request.parts()]
        under_way = [item.chunk for item in self.adapter.sent]
        pending = sum(chunk.filled - chunk.first for chunk in open_chunks)
        pending += sum(chunk.tokens for chunk in under_way)
        assert min(account.lost.values(), default=0) >= 0
        assert account.computed == self.computed
        assert account.computed == account.captured + account.lost.total() + pending
        owned = [block for chunk in open_chunks for block in chunk.blocks]
        owned += [block for chunk in under_way for block in chunk.blocks]
        owned += [block for item in self.adapter.quarantine for block in item.chunk.blocks]
        assert len(owned) == len(set(owned)), "a ring block has two owners"
        assert len(owned) == ring.usage().used, "a ring block has no owner"

    def check_over(self) -> None:
        """After the last step nothing is left open."""
        self.adapter.reclaim_finished_q_stores(all_of_them=True)
        self.check()
        assert self.capture.ledger is not None
        assert self.capture.ledger._requests == {}
        assert self.adapter.account.pending == 0
        for item in self.adapter.stored:
            chunk = item.chunk
            first = first_stamp(chunk.nonce, chunk.start)
            stamps = item.stamps[self._rows_of(chunk)].tolist()
            assert stamps == list(range(first, first + chunk.tokens))

    def outcomes(self) -> Counter[str]:
        """Tokens by outcome."""
        account = self.adapter.account
        found = Counter({reason.value: count for reason, count in account.lost.items() if count})
        found["captured"] = account.captured
        return found

    def rows(self, item: Stored) -> NDArray[np.float32]:
        """`[tokens, layers, heads, head_dim]`."""
        rows: NDArray[np.float32] = item.rows[self._rows_of(item.chunk)]
        return rows.reshape(-1, LAYERS, HEADS, HEAD_DIM)

    def _rows_of(self, chunk: FinishedChunk) -> slice:
        """Where they lie in the chunk's blocks: the first of these begins at a block boundary."""
        skip = chunk.start % self.capture.ring.block_size  # type: ignore[union-attr]
        return slice(skip, skip + chunk.tokens)
