"""LoRA adapters as identities: by the content of their files, where these can be read beside the scheduler.

vLLM loads an adapter once per `lora_int_id`, and its prefix cache knows it by name and path. So what an id, or a name
with its path, first stood for it stands for as long as the engine runs. If the files or the id's adapter change after
that (`load_inplace`, another adapter under a used id, files written over), nobody can tell any more with which weights
a row was computed: such a request is not captured. Nor is one whose adapter has the name or id of another one in use:
of adapters with equal names in one batch vLLM loads only one.

Each adapter's files are read once, in the step that first uses it, as vLLM's worker reads them itself in that step;
later requests cost a few `stat` calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lmcache_qclient.identity.lora_files import Signature, lora_digest, lora_signature
from lmcache_qprotocol.identity import LoraIdentity

logger = logging.getLogger(__name__)


Place = tuple[str, str]
"""An adapter's name and path."""


@dataclass(frozen=True)
class _Adapter:
    identity: LoraIdentity
    signature: Signature | None
    """None: its files can't be read here."""


class Adapters:
    """All adapters that this engine's requests have used."""

    def __init__(self) -> None:
        self._by_id: dict[int, Place] = {}
        self._by_place: dict[Place, _Adapter] = {}
        self._changed: set[Place] = set()

    def identity(self, request: Any) -> LoraIdentity | None:
        """The identity of a `LoRARequest`; None when it is not sure which weights it has: see `is_doubtful`."""
        place = request.lora_name, request.lora_path
        first = self._by_id.setdefault(request.lora_int_id, place)
        if first != place:
            self._distrust(first)
            self._distrust(place)
        if place in self._changed:
            return None
        known = self._by_place.get(place)
        if known is None:
            known = self._read(place)
            if known is None:
                self._distrust(place)
                return None
            self._by_place[place] = known
        elif known.signature is not None and _signature(place[1]) not in (known.signature, None):
            self._distrust(place)
            return None
        return known.identity

    def note_in_use(self, request: Any, others: Iterable[Any]) -> None:
        """Tell of a new request's adapter and of those in use by others (`LoRARequest`s), before asking for it."""
        mine = _key(request)
        for theirs in map(_key, others):
            if theirs != mine and (theirs[0] == mine[0] or theirs[2] == mine[2]):
                self._distrust(mine[:2])
                self._distrust(theirs[:2])

    def is_doubtful(self, request: Any) -> bool:
        """Whether a `LoRARequest` that was sure when its request began is not so any more."""
        return (request.lora_name, request.lora_path) in self._changed

    def _distrust(self, place: Place) -> None:
        if place in self._changed:
            return
        self._changed.add(place)
        logger.warning(
            "LoRA adapter %r (%s) has changed since it was first used, or shares its name or id with another: its "
            "queries are not captured any more in this engine. Give a new version a new name, path and id",
            *place,
        )

    def _read(self, place: Place) -> _Adapter | None:
        name, path = place
        signature = _signature(path)
        if signature is None:
            return _Adapter(LoraIdentity(name, path), None)
        try:
            digest = lora_digest(path)
        except OSError:
            return None
        if _signature(path) != signature:
            return None
        return _Adapter(LoraIdentity(name, path, digest), signature)


def _key(request: Any) -> tuple[str, str, int]:
    return request.lora_name, request.lora_path, request.lora_int_id


def _signature(path: str) -> Signature | None:
    try:
        return lora_signature(path)
    except OSError:
        return None
