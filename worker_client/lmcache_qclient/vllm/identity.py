"""What besides token ids a vLLM request's tensors depend on. Duck-typed: no import of vLLM."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from lmcache_qclient.identity.embeddings import embeds_item
from lmcache_qclient.vllm.adapters import Adapters
from lmcache_qprotocol.identity import Identity, ItemIdentity
from lmcache_qprotocol.limits import (
    MAX_ITEMS,
    MAX_NAME_CHARS,
    MAX_SALT_CHARS,
    MAX_SOURCE_CHARS,
)


def request_identity(request: Any, adapters: Adapters) -> Identity | None:
    """The identity of a request that has just begun; None when no key can name its tensors."""
    # A session with streaming input takes back token ids that have been told: no key would stay right.
    if getattr(request, "resumable", False) or len(request.cache_salt or "") > MAX_SALT_CHARS:
        return None
    pictures = [
        ItemIdentity("mm", feature.identifier, feature.mm_position.offset)
        for feature in request.mm_features or ()
    ]
    items = (*pictures, *_embeddings(request))
    if len(items) > MAX_ITEMS or any(not 0 < len(item.digest) <= MAX_NAME_CHARS for item in items):
        return None
    asked = request.lora_request
    if asked is None:
        return Identity(None, items)
    if not 0 < len(asked.lora_name) <= MAX_NAME_CHARS or len(asked.lora_path) > MAX_SOURCE_CHARS:
        return None
    lora = adapters.identity(asked)
    return None if lora is None else Identity(lora, items)


def _embeddings(request: Any) -> list[ItemIdentity]:
    """The request's prompt embeddings, one item a run; vLLM has token id 0 at their positions.

    A prompt is all embeddings, or has a mask that tells where token ids stand instead.
    """
    embeddings = getattr(request, "prompt_embeds", None)
    if embeddings is None:
        return []
    is_token = getattr(request, "prompt_is_token_ids", None)
    if is_token is None:
        return [embeds_item(embeddings)]
    items, start = [], 0
    for token_ids, run in groupby(is_token):
        end = start + sum(1 for _ in run)
        if not token_ids:
            items.append(embeds_item(embeddings[start:end], start))
        start = end
    return items
