"""What makes equal token ids mean different tensors.

It enters the hash chain where it begins: a LoRA adapter at the chain's root, so no chunk is shared
with the base model; a multimodal item or a prompt embedding at the first chunk that it overlaps, so
a picture in turn two leaves turn one's hashes alone (every later chunk hangs on the earlier ones
anyway).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lmcache_qprotocol.limits import MAX_NAME_CHARS, MAX_POSITION, MAX_SOURCE_CHARS


class LoraIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter.

    Attributes:
        name: what the engine calls it.
        source: where the engine has it from: a path, or an id of a model hub.
        digest: of the adapter's files. Where it is given it alone tells adapters apart, because the
            same files make the same tensors on every machine and under every name; name and source
            are for people then. Empty where the files can't be read: name and source tell apart.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    source: Annotated[str, Meta(max_length=MAX_SOURCE_CHARS)]
    digest: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""


class ItemIdentity(msgspec.Struct, frozen=True):
    """Something other than token ids that stands at a place in the sequence.

    Attributes:
        kind: "mm" for a multimodal item, "embeds" for a prompt embedding.
        digest: the engine's content hash of the item.
        offset: absolute position of its first placeholder token.
    """

    kind: Literal["mm", "embeds"]
    digest: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    offset: Annotated[int, Meta(ge=0, le=MAX_POSITION)]


class Identity(msgspec.Struct, frozen=True):
    """Everything besides the token ids (and the salt, which is a key field of its own)."""

    lora: LoraIdentity | None = None
    items: tuple[ItemIdentity, ...] = ()


PLAIN = Identity()
"""Nothing but token ids: hashes equal LMCache's."""
