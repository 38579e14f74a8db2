"""An engine of any shape without an engine: the real capture on every rank, fed with Q = f(position, layer, head).

It schedules as it is told, gives every cache group blocks of its own, shuffles the rows of a step, and hands the
capture what vLLM's connector would: the blocks of the reference group, the slots of the reference layer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.capture import QRingBufferCapture
from lmcache_qclient.capture.geometry import layer_id, reference_group
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qclient.features.query import FEATURE as QUERY
from lmcache_qclient.link.connection import Connection
from tests.worker_client.capture.fake_vllm import (
    KVCacheSpec,
    cache_config,
    caches,
    group,
    layer_names,
    vllm_config,
)

MODEL = "org/shaped"
KEYS, OUTPUTS = 500, 1000
"""Added to a layer's number, makes its keys and its outputs unlike its queries."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_FINITE = {1: 0x3F, 2: 0x3FFF, 4: 0x3FFFFFFF}
"""Bits of a type of this size that make no NaN and no infinity."""


def values(
    positions: Sequence[int], layer: int, heads: range, dim: int, dtype: torch.dtype, salt: int = 0
) -> torch.Tensor:
    """One layer's rows `[positions, heads, dim]`; the bits of every element depend on all of it."""
    position = torch.tensor(list(positions), dtype=torch.int64).view(-1, 1, 1)
    head = torch.tensor(list(heads), dtype=torch.int64).view(1, -1, 1)
    mixed = ((position * 1_000_003 + layer + salt * 7919) * 1009 + head) * 131 + torch.arange(dim)
    mixed = (mixed ^ (mixed >> 7)) * 0x9E3779B1
    bits = (mixed >> 13) & _FINITE[dtype.itemsize]
    return bits.to(_INTEGER[dtype.itemsize]).view(dtype)


@dataclass
class Shape:
    """What the engine looks like.

    Attributes:
        groups: (spec, numbers of its layers) of each cache group.
        heads, kv_heads: of the whole model; a KV head lies on several ranks where there are more of these.
        dim, dims: elements per head, of all layers and of some.
        output_dim: elements per head of what attention makes; 0 for as many as a query has.
        engine_block: what the configuration says of all groups.
        stages: numbers of the layers of each pipeline stage; None for one stage.
        attributes: of each layer object, besides heads and size.
    """

    groups: Sequence[tuple[KVCacheSpec, Sequence[int]]]
    heads: int = 4
    kv_heads: int = 1
    dim: int = 8
    dims: Mapping[int, int] = field(default_factory=dict)
    output_dim: int = 0
    dtype: torch.dtype = torch.float32
    engine_block: int = 16
    tp: int = 1
    stages: Sequence[Sequence[int]] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    drafts: Sequence[str] = ()
    model_layers: int = 1000
    sharing: Mapping[int, int] = field(default_factory=dict)
    """A layer that has no cache of its own, and the one whose cache it uses."""

    @property
    def pp(self) -> int:
        return len(self.stages) if self.stages is not None else 1

    def dim_of(self, layer: int) -> int:
        return self.dims.get(layer, self.dim)


class Rank:
    """One worker of the engine."""

    def __init__(self, url: str, shape: Shape, rank: int, kinds: Sequence[TensorKind]) -> None:
        self.shape, self.rank = shape, rank
        self.tp_rank, stage = rank % shape.tp, rank // shape.tp
        mine = None if shape.stages is None else set(shape.stages[stage])
        groups = [
            (
                spec,
                [
                    name
                    for layer in layers
                    if mine is None or layer in mine
                    for name in [self.name(layer)]
                ],
            )
            for spec, layers in shape.groups
        ]
        groups[-1][1].extend(shape.drafts)
        names = [name for _, names in groups for name in names]
        shared = [self.name(layer) for layer in shape.sharing]
        self.cache_config = cache_config(*(group(spec, names) for spec, names in groups))
        self.config = self._config()
        self.config.compilation_config = SimpleNamespace(
            static_forward_context={name: self._layer(name) for name in (*names, *shared)}
        )
        self.url = url
        self.has_keys = any(kind.tensor == "k" for kind in kinds)
        self.has_outputs = any(kind.tensor == "o" for kind in kinds)
        ways = [(kind, self.connect(kind.name)) for kind in kinds]
        self.capture = QRingBufferCapture(ways, RingSettings(), self.connect)
        self.capture.setup_q_ring(caches([*names, *shared]), self.cache_config, self.config)

    @staticmethod
    def name(layer: int) -> str:
        return layer_names(1, first=layer)[0]

    def _config(self) -> Any:
        shape = self.shape
        config = vllm_config(
            heads=shape.heads // shape.tp,
            head_dim=shape.dim,
            dtype=shape.dtype if shape.dtype.itemsize > 1 else torch.bfloat16,
            block_size=shape.engine_block,
            tp=shape.tp,
            pp=shape.pp,
            rank=self.rank,
            batched=2048,
            layers=shape.model_layers,
            speculative=object() if shape.drafts else None,
        )
        config.model_config.get_num_kv_heads = lambda parallel: max(1, shape.kv_heads // shape.tp)
        config.model_config.get_total_num_kv_heads = lambda: shape.kv_heads
        return config

    def _layer(self, name: str) -> Any:
        shape, number = self.shape, layer_id(name)
        target = shape.sharing.get(number)
        return SimpleNamespace(
            **{
                "num_heads": shape.heads // shape.tp,
                "num_kv_heads": max(1, shape.kv_heads // shape.tp),
                "head_size": shape.dim_of(number),
                "head_size_v": shape.output_dim or shape.dim_of(number),
                "attn_type": "decoder",
                "kv_sharing_target_layer_name": None if target is None else self.name(target),
                **shape.attributes,
            }
        )

    def connect(self, feature: str, group: int = 0, /) -> QRingBufferAdapter:
        """See `Connect`."""
        return QRingBufferAdapter(
            Connection.open(self.url, client="shaped engine"),
            instance_id=f"{self.rank}-{feature}-{group}",
            model_name=MODEL,
            world_size=self.shape.tp * self.shape.pp,
            rank=self.rank,
            account=Account(),
            heartbeat_interval_s=0.5,
        )

    def forward(self, positions: Sequence[int], slots: torch.Tensor, salts: Sequence[int]) -> None:
        """Every layer of this rank, as vLLM's hooks see it."""
        shape, sink = self.shape, None
        per_rank, kv_per_rank = shape.heads // shape.tp, max(1, shape.kv_heads // shape.tp)
        first_kv = self.tp_rank * shape.kv_heads // shape.tp
        heads = range(self.tp_rank * per_rank, (self.tp_rank + 1) * per_rank)
        kv_heads = range(first_kv, first_kv + kv_per_rank)
        for name in self.capture.layer_names:
            layer = layer_id(name)
            dim = shape.dim_of(layer)
            tensors = {"q": rows_of(positions, salts, layer, heads, dim, shape.dtype)}
            if self.has_keys and layer not in shape.sharing:
                tensors["k"] = rows_of(positions, salts, KEYS + layer, kv_heads, dim, shape.dtype)
            if sink is None:
                self.capture.save_layer(name, tensors, slots)
                sink = self.capture.layer_sink()
            else:
                sink(name, tensors)
            self._hand_outputs(name, positions, salts, heads)

    def _hand_outputs(
        self, name: str, positions: Sequence[int], salts: Sequence[int], heads: range
    ) -> None:
        """What a layer's attention makes, behind it."""
        sink = self.capture.output_sink()
        if self.has_outputs and sink is not None:
            layer, shape = layer_id(name), self.shape
            dim = shape.output_dim or shape.dim_of(layer)
            rows = rows_of(positions, salts, OUTPUTS + layer, heads, dim, shape.dtype)
            sink(name, {"o": rows})


def rows_of(
    positions: Sequence[int],
    salts: Sequence[int],
    layer: int,
    heads: range,
    dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`values`, each row with a salt of its own."""
    distinct = sorted(set(salts))
    made = torch.empty(len(positions), len(heads), dim, dtype=dtype)
    for salt in distinct:
        mine = [at for at, of in enumerate(salts) if of == salt]
        made[mine] = values([positions[at] for at in mine], layer, heads, dim, dtype, salt)
    return made


class ShapedEngine:
    """All ranks, and the scheduler.

    Args:
        kinds: features to capture.
    """

    def __init__(self, url: str, shape: Shape, kinds: Sequence[TensorKind] = (QUERY,)) -> None:
        self.shape = shape
        self.ranks = [Rank(url, shape, rank, kinds) for rank in range(shape.tp * shape.pp)]
        self._random = random.Random(5)
        self._tables: dict[tuple[str, int], list[int]] = {}
        self._free: dict[int, list[int]] = {}
        self._told: dict[str, int] = {}
        self._salts: dict[str, int] = {}

    def step(
        self,
        *parts: tuple[str, Sequence[int], int, int],
        drafts: int = 0,
        without: Sequence[int] = (),
    ) -> None:
        """One step.

        Args:
            parts: (request, all its tokens so far, first position, number) of each.
            drafts: positions at the end of each part that are guesses.
            without: ranks whose hooks see nothing of it.
        """
        rows: list[tuple[str, int]] = []
        for name, _, start, count in parts:
            self._salts.setdefault(name, len(self._salts))
            rows += [(name, position) for position in range(start, start + count)]
        self._random.shuffle(rows)
        first = {name: name not in self._told for name, *_ in parts}
        known = {name: len(tokens) - drafts for name, tokens, *_ in parts}
        for rank in [rank for rank in self.ranks if rank.rank not in without]:
            index, block, _ = reference_group(rank.cache_config, rank.config)
            told = []
            for name, tokens, start, count in parts:
                table = self._grow(name, index, block, start + count)
                blocks = tuple(table[start // block : (start + count - 1) // block + 1])
                new = tuple(tokens[self._told.get(name, 0) : known[name]])
                told.append(
                    RequestStep(
                        name,
                        start,
                        count,
                        blocks,
                        start + count - drafts,
                        new,
                        tokens_from=self._told.get(name, 0),
                        first=first[name],
                    )
                )
            self._random.shuffle(told)
            rank.capture.begin_step(StepMeta(tuple(told)))
            slots = torch.tensor(
                [
                    self._tables[name, index][position // block] * block + position % block
                    for name, position in rows
                ]
            )
            salts = [self._salts[name] for name, _ in rows]
            rank.forward([position for _, position in rows], slots, salts)
            rank.capture.batched_submit_qstore_requests(b"")
        for name in known:
            self._told[name] = known[name]

    def _grow(self, name: str, index: int, block: int, tokens: int) -> list[int]:
        table = self._tables.setdefault((name, index), [])
        if index not in self._free:
            self._free[index] = list(range(1, 5000))
            self._random.shuffle(self._free[index])
        while len(table) * block < tokens:
            table.append(self._free[index].pop())
        return table

    def prefill(
        self,
        name: str,
        tokens: Sequence[int],
        *cuts: int,
        start: int = 0,
        like: str | None = None,
    ) -> None:
        """Compute a prompt in one step, or in several with these cuts between them.

        Args:
            start: tokens that the engine's prefix cache has.
            like: a request that began with the same tokens.
        """
        if like is not None:
            self._salts[name] = self._salts[like]
        ends = [*cuts, len(tokens)]
        for end in ends:
            self.step((name, tokens, start, end - start))
            start = end

    def end(self, *names: str) -> None:
        """Requests end; wait until every store has been answered."""
        finished = tuple(FinishedRequest(name) for name in names)
        for rank in self.ranks:
            rank.capture.begin_step(StepMeta((), finished))
            rank.capture.batched_submit_qstore_requests(b"")
            for adapter in rank.capture.adapters:
                for sequence in list(adapter._in_flight):
                    adapter.wait_for_store(sequence, 20)
            rank.capture.reclaim()

    def right(self, name: str, tokens: int, layer: int) -> torch.Tensor:
        """What one rank would have given of a layer: `[tokens, heads, dim]`."""
        shape = self.shape
        heads, dim = range(shape.heads), shape.dim_of(layer)
        return values(range(tokens), layer, heads, dim, shape.dtype, self._salts[name])

    def right_keys(self, name: str, tokens: int, layer: int) -> torch.Tensor:
        """The same of its keys."""
        shape = self.shape
        heads, dim = range(shape.kv_heads), shape.dim_of(layer)
        return values(range(tokens), KEYS + layer, heads, dim, shape.dtype, self._salts[name])

    def right_outputs(self, name: str, tokens: int, layer: int) -> torch.Tensor:
        """The same of what its attention made."""
        shape = self.shape
        heads, dim = range(shape.heads), shape.output_dim or shape.dim_of(layer)
        return values(range(tokens), OUTPUTS + layer, heads, dim, shape.dtype, self._salts[name])

    def shutdown(self) -> None:
        """The engine ends."""
        for rank in self.ranks:
            rank.capture.shutdown()
