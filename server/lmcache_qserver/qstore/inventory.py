"""What is stored, per model, rank and layout: counted as objects come and go, so that asking costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from lmcache_qprotocol.keys import KeyFamily
from lmcache_qserver.qstore.stored_object import Description, StoredObject
from lmcache_qserver.status_report import ModelReport

Kind = tuple[str, int, int, bytes]
"""model_name, world_size, kv_rank, layout_id: a key family without its salt."""


@dataclass(slots=True)
class _Holding:
    description: Description
    chunks: int = 0
    pieces: int = 0
    nbytes: int = 0


class Inventory:
    """Holdings by kind; a kind of which nothing is left is not listed."""

    def __init__(self) -> None:
        self._holdings: dict[Kind, _Holding] = {}

    def add(self, stored: StoredObject) -> None:
        """The object is in the index now."""
        holding = self._holdings.setdefault(
            kind_of(stored.key.family), _Holding(stored.description)
        )
        if stored.key.rows is None:
            holding.chunks += 1
        else:
            holding.pieces += 1
        holding.nbytes += stored.slot.nbytes

    def remove(self, stored: StoredObject) -> None:
        """The object has left the index."""
        kind = kind_of(stored.key.family)
        holding = self._holdings[kind]
        if stored.key.rows is None:
            holding.chunks -= 1
        else:
            holding.pieces -= 1
        holding.nbytes -= stored.slot.nbytes
        if not holding.chunks and not holding.pieces:
            del self._holdings[kind]

    def summary(self) -> list[ModelReport]:
        """One entry per kind, sorted; `model_name` is that of the keys, with the feature's suffix."""
        return [
            report_of(
                kind,
                holding.description,
                chunks=holding.chunks,
                pieces=holding.pieces,
                nbytes=holding.nbytes,
            )
            for kind, holding in sorted(self._holdings.items(), key=lambda item: item[0])
        ]


def report_of(
    kind: Kind, description: Description, *, chunks: int, pieces: int, nbytes: int
) -> ModelReport:
    """A kind as `/status` tells it."""
    model_name, world_size, kv_rank, layout_id = kind
    return ModelReport(
        model_name=model_name,
        world_size=world_size,
        kv_rank=kv_rank,
        layout_id=layout_id.hex(),
        layout=msgspec.to_builtins(description.layout),
        chunk_size=description.chunk_size,
        chunks=chunks,
        pieces=pieces,
        bytes=nbytes,
    )


def kind_of_report(report: ModelReport) -> Kind:
    """The kind that `/status` tells of."""
    return (
        report.model_name,
        report.world_size,
        report.kv_rank,
        bytes.fromhex(report.layout_id),
    )


def kind_of(family: KeyFamily) -> Kind:
    return family.model_name, family.world_size, family.kv_rank, family.layout_id
