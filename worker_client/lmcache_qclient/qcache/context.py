"""`connect` and what it gives: the SDK's one object."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lmcache_qclient.link.connection import AUTO, Connection
from lmcache_qclient.qcache import one_trip
from lmcache_qclient.qcache.arguments import Item, Lora, identity_of
from lmcache_qclient.qcache.catalog import (
    StoredEntry,
    StoredLayout,
    model_names,
    read_status,
    stored_layouts,
)
from lmcache_qclient.qcache.identities import Identities, list_identities
from lmcache_qclient.qcache.reading import Found, Wanted, find, read
from lmcache_qclient.qcache.retrieval import Lookup, Retrieval
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.status_page import fetch_status
from lmcache_qclient.qcache.token_ids import token_list
from lmcache_qprotocol.hashing import HashChain
from lmcache_qprotocol.identity import Identity
from lmcache_qprotocol.keys import FEATURE_SUFFIX, feature_model_name
from lmcache_qprotocol.limits import MAX_SALT_CHARS

if TYPE_CHECKING:
    import torch

FEATURE = "transfer_query"


def connect(
    url: str = "tcp://127.0.0.1:5555",
    http_url: str = "http://127.0.0.1:8080",
    model_name: str | None = None,
    *,
    timeout_s: float = 10.0,
    transport: str = AUTO,
) -> QCacheContext:
    """Connect to a server; use the result in a `with` block, or `close` it.

    Args:
        url: of the server's ZeroMQ endpoint.
        http_url: of its HTTP side, where it tells what is stored.
        model_name: as the engine calls it; None when the server knows only one.
        timeout_s: for every answer, seconds.
        transport: "shm", memory that the server's Unix socket passes; "inline", bytes in messages, from wherever `url`
            is reachable: the same results, slower; or "auto", the first where it can be had.

    Raises:
        ConnectionError: nobody answers at `url` or `http_url`.
        ValueError: no model was named and the server knows several; or there is no such transport.
    """
    connection = Connection.open(
        url, client=f"qcache/{os.getpid()}", timeout_s=timeout_s, transport=transport
    )
    context = QCacheContext(Session(connection, timeout_s), http_url, model_name, timeout_s)
    try:
        context.refresh()
    except BaseException:
        context.close()
        raise
    return context


class QCacheContext:
    """Finds and reads the queries of one model; made by `connect`.

    Threads may share it; requests wait for each other. It survives restarts of the server, not forks.
    """

    def __init__(
        self, session: Session, http_url: str, model_name: str | None, timeout_s: float
    ) -> None:
        self._session = session
        self._http_url = http_url
        self._timeout_s = timeout_s
        self._asked_model = model_name
        self._model: str | None = _key_model_name(model_name) if model_name else None
        self._entries: tuple[StoredEntry, ...] = ()
        self._layouts: tuple[StoredLayout, ...] = ()
        self._known_of = b""  # boot id of the server that said so

    def __enter__(self) -> QCacheContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; tensors stay valid. Idempotent."""
        self._session.close()

    @property
    def transport(self) -> str:
        """How bytes come now: "shm" or "inline"."""
        return self._session.connection.transport

    # --- what is stored -----------------------------------------------------------------------------------------

    @property
    def layouts(self) -> tuple[StoredLayout, ...]:
        """The ways in which the model is stored; asks the server as long as there is no complete one, and a new one.

        Raises:
            ConnectionError: the server's HTTP side does not answer.
            ValueError: no model was named and the server knows several.
        """
        before = self._layouts
        restarted = self._known_of != self._session.connection.hello.boot_id
        if restarted or not any(layout.complete for layout in before):
            self.refresh()
        if not self._layouts:
            self._layouts = before  # a server that was restarted empty: what is asked for is missing, not unheard of
        return self._layouts

    def refresh(self) -> None:
        """Ask the server anew what is stored, for example after the engine was started in another layout.

        Raises:
            ConnectionError, ValueError: as `layouts`.
        """
        boot_id = self._session.connection.hello.boot_id
        self._entries = read_status(fetch_status(self._http_url, self._timeout_s))
        if self._asked_model is None:
            self._model = self._only_model()
        self._layouts = stored_layouts(self._entries, self._model) if self._model else ()
        self._known_of = boot_id if self._layouts else b""

    def _only_model(self) -> str | None:
        names = model_names(self._entries)
        if len(names) > 1:
            raise ValueError(f"pass model_name=, the server knows several: {_listed(names)}")
        return names[0] if names else None

    def _layout(self, layout: StoredLayout | None) -> StoredLayout:
        """The layout to read: the given one, or the only one."""
        layouts = (layout,) if layout is not None else self.layouts
        if not layouts:
            name = self._asked_model or "any model"
            raise ValueError(
                f"nothing is stored of {name}; the server knows {_listed(model_names(self._entries)) or 'no model'}: "
                "check model_name, or let the engine run first"
            )
        if len(layouts) > 1:
            listed = "; ".join(map(str, layouts))
            raise ValueError(
                f"pass layout=, one of the context's .layouts; the model is stored as {listed}"
            )
        chosen = layouts[0]
        if not chosen.missing_ranks and not chosen.tiled:
            raise ValueError(
                f"the heads that the ranks say they hold do not make up the whole model: {chosen}"
            )
        return chosen

    # --- reading ------------------------------------------------------------------------------------------------

    def lookup(
        self,
        token_ids: Any,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        mm: Sequence[Item] = (),
        layout: StoredLayout | None = None,
    ) -> Lookup:
        """How much of a sequence is stored, without reading it. Arguments and errors as `retrieve`."""
        ids, identity = token_list(token_ids), identity_of(lora, mm)

        def look_up() -> Lookup:
            wanted = self._wanted(ids, cache_salt, identity, layout)
            found = find(self._session, wanted)
            return Lookup(found.num_tokens, found.missing)

        return self._session.run(look_up)

    def retrieve(
        self,
        token_ids: Any,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        mm: Sequence[Item] = (),
        layout: StoredLayout | None = None,
        out: torch.Tensor | None = None,
    ) -> Retrieval:
        """The queries of the longest stored prefix of a sequence.

        Args:
            token_ids: list or tuple of ints, or a 1-D integer numpy array or torch tensor.
            cache_salt: as the request had it.
            lora: the adapter's folder, if the sequence was computed with one; or a `LoraIdentity`, with name and path
                as the engine has them, where the adapter's files could not be read beside the engine.
            mm: multimodal items, as (identifier, offset of its first placeholder token) or `ItemIdentity`; prompt
                embeddings, by `embeds_item`. `identities` tells what there is.
            layout: where the model is stored in several, one of `layouts`.
            out: contiguous CPU tensor `[layers, enough tokens, heads, head_dim]` to read into; what lies behind the
                result's `num_tokens` is left in any state.

        Raises:
            TypeError, ValueError: an argument can't be used, or nothing is known of the model.
            ConnectionError: the server does not answer, after one renewal of the connection.
            RequestError: it refuses; lifeline_required when its memory is not reachable from here.
        """
        ids, identity = token_list(token_ids), identity_of(lora, mm)
        return self._session.run(
            lambda: self._read(self._wanted(ids, cache_salt, identity, layout), out)
        )

    def identities(self, token_ids: Any) -> Identities:
        """What is stored for the same token ids, whatever salt, LoRA adapter, multimodal items or embeddings it has.

        Each can be retrieved: `retrieve(token_ids, **one.arguments)`. Not listed is what was stored without its tokens,
        by an engine with `lmcache.q.tails: false`.

        Raises:
            TypeError, ValueError, ConnectionError: as `retrieve`.
            RequestError: lifeline_required where the server's Unix socket is not reachable; salts go to nobody else.
        """
        ids = token_list(token_ids)

        def listed() -> Identities:
            layouts = self.layouts or (self._layout(None),)
            return list_identities(
                self._session,
                ids,
                layouts,
                lambda salt, identity, layout: self._wanted(ids, salt, identity, layout),
            )

        return self._session.run(listed)

    def _wanted(
        self,
        ids: Sequence[int],
        cache_salt: str,
        identity: Identity,
        layout: StoredLayout | None,
    ) -> Wanted:
        """Inside `run`, behind a renewal: another server may have another chunk size."""
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARS:
            raise ValueError(f"cache_salt is a text of at most {MAX_SALT_CHARS} characters")
        chosen = self._layout(layout)
        chunk_size = chosen.chunk_size or self._session.connection.hello.chunk_size
        chain = HashChain(chunk_size, identity)
        chain.extend(ids)
        return Wanted(
            chosen,
            chunk_size,
            cache_salt,
            chain.root,
            tuple(chain.hashes),
            tuple(ids),
            identity.items,
        )

    def _read(self, wanted: Wanted, out: torch.Tensor | None) -> Retrieval:
        from lmcache_qclient.qcache import (
            tensors,
        )  # torch is loaded when the first tensor is wanted

        session, threads = self._session, tensors.copy_threads()
        leased = one_trip.lease(session, wanted)
        if leased is not None:
            try:
                tensor = _target(wanted, leased.found, out)
                bits = tensors.bits_of(tensor, wanted.layout)
            except BaseException:
                one_trip.give_back(session, leased.replies)
                raise
            if one_trip.read(session, wanted, leased, bits, threads):
                return _retrieval(wanted, leased.found, tensor, out)
        found = find(session, wanted)
        tensor = _target(wanted, found, out)
        if found.num_tokens:
            found = read(session, wanted, found, tensors.bits_of(tensor, wanted.layout), threads)
        return _retrieval(wanted, found, tensor, out)


def _target(wanted: Wanted, found: Found, out: torch.Tensor | None) -> torch.Tensor:
    """The tensor to read into."""
    from lmcache_qclient.qcache import tensors

    if out is None:
        return tensors.empty(wanted.layout, found.num_tokens)
    tensors.check_out(out, wanted.layout, found.num_tokens)
    return out


def _retrieval(
    wanted: Wanted, found: Found, tensor: torch.Tensor, out: torch.Tensor | None
) -> Retrieval:
    front = tensor[:, : found.num_tokens]
    return Retrieval(
        tensor=front if out is not None else front.contiguous(),
        num_tokens=found.num_tokens,
        missing=found.missing,
        layer_ids=wanted.layout.layer_ids,
    )


def _key_model_name(model_name: str) -> str:
    if model_name.endswith(FEATURE_SUFFIX[FEATURE]):
        return model_name
    return feature_model_name(model_name, FEATURE)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.removesuffix(FEATURE_SUFFIX[FEATURE]) for name in names)
