"""What callers say of a sequence besides its token ids, in whatever form they have it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lmcache_qclient.identity.lora_files import lora_digest
from lmcache_qprotocol.identity import Identity, ItemIdentity, LoraIdentity

Lora = LoraIdentity | str | os.PathLike[str] | None
"""An adapter: its folder, or what `identities` told of it."""
Item = ItemIdentity | tuple[str, int]
"""A multimodal item: (identifier, offset of its first placeholder); or any `ItemIdentity`."""


def identity_of(lora: Lora, mm: Sequence[Item]) -> Identity:
    """The identity that the engine gave the sequence.

    Raises:
        TypeError: an argument has another form.
        ValueError: the adapter's folder can't be read.
    """
    return Identity(_lora(lora), tuple(_item(item) for item in mm))


def _lora(lora: Lora) -> LoraIdentity | None:
    if lora is None or isinstance(lora, LoraIdentity):
        return lora
    if not isinstance(lora, str | os.PathLike):
        raise TypeError(
            f"lora is an adapter's folder or a LoraIdentity, not a {type(lora).__name__}"
        )
    path = Path(lora).expanduser()
    try:
        digest = lora_digest(path)
    except OSError as error:
        raise ValueError(
            f"can't read the adapter ({error}): pass its folder, or LoraIdentity(name, path) with the name and path "
            "that the engine has it by"
        ) from None
    return LoraIdentity(path.resolve().name or "adapter", str(lora), digest)


def _item(item: Item) -> ItemIdentity:
    if isinstance(item, ItemIdentity):
        return item
    if isinstance(item, tuple) and [type(part) for part in item] == [str, int]:
        return ItemIdentity("mm", *item)
    raise TypeError(f"an item of mm is (identifier, offset) or an ItemIdentity, not {item!r}")
