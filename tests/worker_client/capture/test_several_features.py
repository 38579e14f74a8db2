"""Several features of one worker: one plan, one search for the rows, a ring and an account each; 3 layers.

Element = token * 1000 + layer * 100 + feature * 10 + head, so that any mix-up shows.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.capture import QRingBufferCapture
from lmcache_qclient.capture.finished_chunk import FinishedChunk
from lmcache_qclient.capture.layer_selection import parse_layers
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.capture.step_rows import DeviceRows, HostRows
from lmcache_qclient.features.registry import FEATURE_REGISTRY
from lmcache_qprotocol.reasons import LossReason as Loss
from tests.worker_client.capture.fake_adapter import FakeAdapter
from tests.worker_client.capture.fake_vllm import (
    FullAttentionSpec,
    cache_config,
    caches,
    group,
    layer_names,
    vllm_config,
)
from tests.worker_client.capture.no_host_sync import no_host_sync

LAYERS, CHUNK, BLOCK = 3, 8, 4
HEADS = {"q": 4, "k": 2, "v": 2, "o": 4}
DIM = {"q": 3, "k": 3, "v": 5, "o": 5}
NAMES = layer_names(LAYERS)


def attention(**changes: Any) -> Any:
    """One layer, as vLLM has it."""
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_size": 3, "head_size_v": 5}
    return SimpleNamespace(**{**fields, "kv_sharing_target_layer_name": None, **changes})


def rows_of(tensor: str, tokens: np.ndarray, layer: int) -> torch.Tensor:
    """float32 `[rows, heads, head_dim]`."""
    kind = "qkvo".index(tensor)
    heads = np.arange(HEADS[tensor])[:, None]
    value = tokens[:, None, None] * 1000 + layer * 100 + kind * 10 + heads
    shape = (len(tokens), HEADS[tensor], DIM[tensor])
    return torch.from_numpy(np.broadcast_to(value, shape).astype(np.float32).copy())


class Worker:
    """A capture of some features, each with an adapter that answers when it is told."""

    def __init__(
        self, *features: str, attentions: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.names = features
        kinds = [FEATURE_REGISTRY[f"transfer_{name}"] for name in features]
        self.adapters = [FakeAdapter(CHUNK) for _ in kinds]
        self.by_name = dict(zip(features, self.adapters, strict=True))
        ways = [
            (kind, cast(QRingBufferAdapter, adapter))
            for kind, adapter in zip(kinds, self.adapters, strict=True)
        ]
        self.capture = QRingBufferCapture(ways, RingSettings(**{"blocks": 16, **settings}))
        layers = {name: attention() for name in NAMES} | (attentions or {})
        config = vllm_config(
            heads=4, kv_heads=2, head_dim=3, block_size=BLOCK, attention=layers, layers=LAYERS
        )
        groups = cache_config(group(FullAttentionSpec(BLOCK), NAMES))
        self.capture.setup_q_ring(caches(NAMES), groups, config)
        self.random = Random(1)

    def step(
        self,
        start: int,
        stop: int,
        *,
        without: tuple[tuple[str, int], ...] = (),
        wide: str = "",
        finished: tuple[FinishedRequest, ...] = (),
        reclaim: bool = True,
    ) -> None:
        """Request a computes positions [start, stop), token p + 1 at position p, in the hook's order of calls.

        Args:
            without: (tensor, layer) that no hook sees.
            wide: a tensor whose rows are too wide.
        """
        blocks = tuple(range(3, 30))[start // BLOCK : (stop - 1) // BLOCK + 1]
        part = RequestStep(
            "a",
            start,
            stop - start,
            blocks,
            stop,
            tuple(range(start + 1, stop + 1)),
            start == 0,
            tokens_from=start,
        )
        order = self.random.sample(range(start, stop), stop - start)
        slots = torch.tensor([(3 + p // BLOCK) * BLOCK + p % BLOCK for p in order])
        capture = self.capture
        capture.begin_step(StepMeta((part,), finished))
        seen = [self._seen(np.array(order) + 1, layer, without, wide) for layer in range(LAYERS)]
        sink = output_sink = None
        for layer, name in enumerate(NAMES):
            before = {key: value for key, value in seen[layer].items() if key != "o"}
            try:
                if sink is None and output_sink is None:
                    capture.save_layer(name, before, slots)
                    sink, output_sink = capture.layer_sink(), capture.output_sink()
                elif sink is not None:
                    sink(name, before)
            except (ValueError, KeyError):
                pass  # as the hook does
            if output_sink is not None and "o" in seen[layer]:
                output_sink(name, {"o": seen[layer]["o"]})
        capture.batched_submit_qstore_requests(b"")
        if reclaim:
            capture.reclaim()

    @staticmethod
    def _seen(
        tokens: np.ndarray, layer: int, without: tuple[tuple[str, int], ...], wide: str
    ) -> dict[str, torch.Tensor]:
        tensors = {
            tensor: rows_of(tensor, tokens, layer)
            for tensor in "qkvo"
            if (tensor, layer) not in without
        }
        if wide:
            tensors[wide] = torch.ones(len(tokens), 4, 9)
        return tensors

    def check(self, name: str, layers: tuple[int, ...] = tuple(range(LAYERS))) -> list[object]:
        """Every stored row of a feature is exact; (start, end) of what is stored."""
        tensor = FEATURE_REGISTRY[f"transfer_{name}"].tensor
        adapter = self.by_name[name]
        assert adapter.layout is not None
        assert adapter.layout.feature == f"transfer_{name}"
        assert adapter.layout.layer_ids == layers
        assert (adapter.layout.num_heads, adapter.layout.head_dim) == (HEADS[tensor], DIM[tensor])
        for stored in adapter.stored:
            chunk = stored.chunk
            mine = slice(chunk.start % BLOCK, chunk.start % BLOCK + chunk.tokens)
            tokens = np.arange(chunk.start, chunk.end) + 1
            for place, layer in enumerate(layers):
                wanted = rows_of(tensor, tokens, layer).reshape(chunk.tokens, -1).numpy()
                assert np.array_equal(stored.rows[mine, place], wanted), (name, chunk, layer)
        account = adapter.account
        assert account.computed == account.captured + account.lost.total() + account.pending
        return [(stored.chunk.start, stored.chunk.end) for stored in adapter.stored]

    def lost(self, name: str) -> dict[Loss, int]:
        return {r: count for r, count in self.by_name[name].account.lost.items() if count}

    @property
    def free(self) -> int:
        assert self.capture.ring is not None
        return self.capture.ring.num_free_blocks()


ALL = ("query", "key", "value", "attention_output")


@pytest.mark.parametrize("count", [40, 20], ids=["many rows", "few rows"])
def test_every_feature_gets_its_own_rows(count: int) -> None:
    worker = Worker(*ALL, blocks=32)
    worker.step(0, count)
    worker.step(count, count + 1)
    worker.capture.shutdown()
    ends = [(at, min(at + CHUNK, count + 1)) for at in range(0, count + 1, CHUNK)]
    for name in ALL:
        assert worker.check(name) == ends
        assert worker.by_name[name].account.computed == count + 1
        assert worker.lost(name) == {}


def test_rows_are_found_once_for_all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    for kind in (HostRows, DeviceRows):
        begin = kind._begin

        def counted(self: Any, *args: Any, begin: Any = begin) -> None:
            found.append(1)
            begin(self, *args)

        monkeypatch.setattr(kind, "_begin", counted)
    worker = Worker(*ALL)
    worker.step(0, CHUNK)
    assert len(found) == 1
    assert all(worker.check(name) == [(0, CHUNK)] for name in ALL)


@pytest.mark.parametrize("name", ["key", "attention_output"])
def test_a_layer_that_one_feature_misses_costs_that_feature_alone(name: str) -> None:
    worker = Worker(*ALL)
    tensor = FEATURE_REGISTRY[f"transfer_{name}"].tensor
    worker.step(0, 6)
    worker.step(6, CHUNK + 2, without=((tensor, 1),))
    worker.step(CHUNK + 2, 2 * CHUNK)
    worker.step(2 * CHUNK, 3 * CHUNK)
    for other in ALL:
        stored = [(0, 8), (8, 16), (16, 24)] if other != name else [(16, 24)]
        assert worker.check(other) == stored
    assert worker.lost(name) == {Loss.LAYER_MISSING: 16}
    assert worker.lost("query") == {}
    assert worker.free == 16


def test_a_tensor_that_does_not_fit_costs_its_feature_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker("query", "key", "value")
    for start in (0, CHUNK):
        worker.step(start, start + CHUNK, wide="k")
    assert worker.check("query") == worker.check("value") == [(0, CHUNK), (CHUNK, 2 * CHUNK)]
    assert worker.check("key") == []
    assert worker.lost("key") == {Loss.LAYER_MISSING: 2 * CHUNK}
    assert len([r for r in caplog.records if "transfer_key missed" in r.getMessage()]) == 1


def test_a_chunk_that_was_dropped_for_all_is_spoilt_for_none_later() -> None:
    worker = Worker("query", "key")
    worker.step(0, 6, without=(("k", 2),))
    worker.step(6, 7, without=(("k", 2), ("q", 2)))  # nobody got this step
    assert worker.lost("query") == worker.lost("key") == {Loss.LAYER_MISSING: 7}
    worker.step(7, 2 * CHUNK)
    assert worker.check("key") == worker.check("query") == [(8, 16)]
    assert not any(track.has_spoilt for track in worker.capture.tracks)


def test_a_step_that_no_feature_got_is_given_up() -> None:
    worker = Worker("query", "key")
    worker.step(0, CHUNK, without=(("k", 0), ("q", 2)))
    assert worker.lost("query") == worker.lost("key") == {Loss.LAYER_MISSING: CHUNK}
    assert worker.free == 16


def test_blocks_stay_until_the_last_feature_has_its_answer() -> None:
    worker = Worker("query", "key")
    worker.step(0, CHUNK, reclaim=False)
    assert worker.free == 14
    worker.by_name["query"].reclaim_finished_q_stores()
    assert worker.free == 14
    worker.by_name["key"].reclaim_finished_q_stores()
    assert worker.free == 16


def test_what_a_server_refuses_of_one_feature_is_lost_of_that_one() -> None:
    worker = Worker("query", "key")

    def refuse(chunk: FinishedChunk) -> None:
        chunk.tally.lose(Loss.POOL_FULL, chunk.tokens)
        assert worker.by_name["key"].ring is not None
        worker.by_name["key"].ring.free(chunk.blocks)

    worker.by_name["key"].submit_q_store_request = refuse  # type: ignore[method-assign,assignment]  # a stand-in
    worker.step(0, CHUNK)
    assert worker.lost("key") == {Loss.POOL_FULL: CHUNK}
    assert worker.lost("query") == {}
    assert worker.by_name["query"].account.captured == CHUNK
    assert worker.free == 16


@pytest.mark.parametrize("count", [5 * CHUNK, CHUNK], ids=["many rows", "few rows"])
def test_layers_that_use_anothers_cache_have_queries_and_outputs_only(
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    shared = attention(kv_sharing_target_layer_name=NAMES[0])
    worker = Worker(*ALL, attentions={NAMES[2]: shared})
    worker.step(0, count, without=(("k", 2), ("v", 2)))
    chunks = [(start, start + CHUNK) for start in range(0, count, CHUNK)]
    assert worker.check("key", (0, 1)) == worker.check("value", (0, 1)) == chunks
    assert worker.check("query") == worker.check("attention_output") == chunks
    assert all(worker.lost(name) == {} for name in ALL)
    told = [r.getMessage() for r in caplog.records if "of their own" in r.getMessage()]
    assert [text.rsplit(" of their own: ") for text in told] == [
        [f"1 layers use another layer's KV cache and have no {name}", NAMES[2]]
        for name in ("key", "value")
    ]


def test_selected_layers_are_the_only_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    worker = Worker("query", "key", layers=parse_layers("-1"))
    assert worker.capture.layer_names == (NAMES[2],)
    assert worker.capture.geometry is not None
    assert worker.capture.geometry.reference_layer == NAMES[0], "whose slots attribute rows"
    part = RequestStep("a", 0, CHUNK, (3, 4), CHUNK, tuple(range(1, CHUNK + 1)), True)
    worker.capture.begin_step(StepMeta((part,)))
    tokens, slots = np.arange(CHUNK) + 1, torch.arange(12, 20)
    tensors = {tensor: rows_of(tensor, tokens, 2) for tensor in "qkv"}
    worker.capture.save_layer(NAMES[0], tensors, slots)  # is not captured
    worker.capture.save_layer(NAMES[2], tensors, slots)
    worker.capture.batched_submit_qstore_requests(b"")
    worker.capture.reclaim()
    assert worker.check("query", (2,)) == worker.check("key", (2,)) == [(0, CHUNK)]
    sizes = [record.getMessage() for record in caplog.records if " ring: " in record.getMessage()]
    assert [size.split(",")[0] for size in sizes] == [
        f"{name} ring: 16 blocks of 4 tokens" for name in ("query", "key")
    ]
    assert all("1 layers" in size for size in sizes)


def test_no_feature_waits_for_a_device() -> None:
    worker = Worker(*ALL)
    worker.capture._rows_kind = DeviceRows
    for track in worker.capture.tracks:
        track.ring._host_bits = None
    sent: list[tuple[FakeAdapter, FinishedChunk]] = []

    def keep(adapter: FakeAdapter) -> Callable[[FinishedChunk], int]:
        return lambda chunk: sent.append((adapter, chunk)) or 0  # type: ignore[func-returns-value]  # of append

    for adapter in worker.adapters:
        adapter.submit_q_store_request = keep(adapter)  # type: ignore[method-assign,assignment]  # the server reads later
    slots = torch.arange(12, 20)
    seen = [{tensor: rows_of(tensor, np.arange(8) + 1, at) for tensor in "qkvo"} for at in range(3)]
    part = RequestStep("a", 0, CHUNK, (3, 4), CHUNK, tuple(range(1, CHUNK + 1)), True)
    with no_host_sync():
        worker.capture.begin_step(StepMeta((part,)))
        worker.capture.save_layer(NAMES[0], {key: seen[0][key] for key in "qkv"}, slots)
        sink, output_sink = worker.capture.layer_sink(), worker.capture.output_sink()
        assert sink is not None
        assert output_sink is not None
        output_sink(NAMES[0], seen[0])
        for at in (1, 2):
            sink(NAMES[at], seen[at])
            output_sink(NAMES[at], seen[at])
        worker.capture.batched_submit_qstore_requests(b"")
    for adapter in worker.adapters:
        del adapter.submit_q_store_request
    for adapter, chunk in sent:
        adapter.submit_q_store_request(chunk)
    worker.capture.reclaim()
    assert all(worker.check(name) == [(0, CHUNK)] for name in ALL)
