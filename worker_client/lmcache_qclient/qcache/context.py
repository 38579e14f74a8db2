"""`connect` and what it gives: the SDK's one object."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lmcache_qclient.link.connection import AUTO, Connection
from lmcache_qclient.qcache import one_trip
from lmcache_qclient.qcache.arguments import Item, Lora, identity_of
from lmcache_qclient.qcache.asked import FEATURE, Asked, feature_of
from lmcache_qclient.qcache.catalog import (
    StoredEntry,
    StoredLayout,
    base_name,
    base_names,
    of_one_rank,
    read_status,
    stored_layouts,
)
from lmcache_qclient.qcache.chunks_to_store import chunks_to_store
from lmcache_qclient.qcache.flushing import flush
from lmcache_qclient.qcache.identities import Identities, list_identities
from lmcache_qclient.qcache.reading import Found, Wanted, find, find_all, read
from lmcache_qclient.qcache.retrieval import LayerGroup, Lookup, Retrieval, joined
from lmcache_qclient.qcache.session import Session
from lmcache_qclient.qcache.status_page import fetch_status
from lmcache_qclient.qcache.stored import Stored
from lmcache_qclient.qcache.storing import ToStore, store
from lmcache_qclient.qcache.token_ids import token_list
from lmcache_qprotocol.hashing import HashChain
from lmcache_qprotocol.identity import Identity
from lmcache_qprotocol.keys import FEATURE_SUFFIX
from lmcache_qprotocol.layout import Layout
from lmcache_qprotocol.limits import MAX_SALT_CHARS

if TYPE_CHECKING:
    import torch


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
    """Finds, reads and writes back the tensors of one model; made by `connect`.

    Threads may share it; requests wait for each other. It survives restarts of the server, not forks.
    """

    def __init__(
        self, session: Session, http_url: str, model_name: str | None, timeout_s: float
    ) -> None:
        self._session = session
        self._http_url = http_url
        self._timeout_s = timeout_s
        self._asked_model = model_name
        self._model: str | None = base_name(model_name) if model_name else None
        self._entries: tuple[StoredEntry, ...] = ()
        self._layouts: dict[str, tuple[StoredLayout, ...]] = {}
        self._known_of = b""  # boot id of the server that said so
        self._stored_at = b""  # boot id of the server that was stored to last

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
        """`layouts_of` the queries."""
        return self.layouts_of(FEATURE)

    def layouts_of(self, feature: str) -> tuple[StoredLayout, ...]:
        """The ways in which one feature of the model is stored.

        Asks the server as long as there is no complete one, and a new server.

        Args:
            feature: "query", "key", ... or its whole name.

        Raises:
            ConnectionError: the server's HTTP side does not answer.
            ValueError: no such feature; or no model was named and the server knows several.
        """
        name = feature_of(feature)
        before = self._layouts.get(name, ())
        restarted = self._known_of != self._session.connection.hello.boot_id
        if restarted or not any(layout.complete for layout in before):
            self.refresh()
        if not self._layouts.get(name):
            # A server that was restarted empty: what is asked for is missing, not unheard of.
            self._layouts[name] = before
        return self._layouts[name]

    def refresh(self) -> None:
        """Ask the server anew what is stored, for example after the engine was started in another layout.

        Raises:
            ConnectionError, ValueError: as `layouts_of`.
        """
        boot_id = self._session.connection.hello.boot_id
        self._entries = read_status(fetch_status(self._http_url, self._timeout_s))
        if self._asked_model is None:
            self._model = self._only_model()
        self._layouts = {
            feature: stored_layouts(self._entries, self._model + suffix) if self._model else ()
            for feature, suffix in FEATURE_SUFFIX.items()
        }
        self._known_of = boot_id if any(self._layouts.values()) else b""

    def _only_model(self) -> str | None:
        names = base_names(self._entries)
        if len(names) > 1:
            raise ValueError(f"pass model_name=, the server knows several: {', '.join(names)}")
        return names[0] if names else None

    def _candidates(self, asked: Asked) -> tuple[StoredLayout, ...]:
        """The layouts that may be read for a question: the given one, those that have its layers, or the widest."""
        if asked.layout is not None:
            candidates: tuple[StoredLayout, ...] = (asked.layout,)
        else:
            candidates = self.layouts_of(asked.feature)
            if not candidates:
                raise self._nothing_of(asked.feature)
            if asked.layers is None:
                candidates = (_widest(candidates),)
        having = tuple(one for one in candidates if asked.is_in(one))
        if not having:
            listed = "; ".join(f"{one}, layers {list(one.all_layer_ids)}" for one in candidates)
            raise ValueError(f"no layout has all of the layers {asked.layers}: {listed}")
        for one in having:
            _check_tiled(one)
        return having

    def _nothing_of(self, feature: str) -> ValueError:
        what = "" if feature == FEATURE else f" with {feature}"
        known = ", ".join(base_names(self._entries)) or "no model"
        return ValueError(
            f"nothing is stored of {self._asked_model or 'any model'}{what}; the server knows {known}: "
            "check model_name and feature, or let the engine run first"
        )

    # --- reading ------------------------------------------------------------------------------------------------

    def lookup(
        self,
        token_ids: Any,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        mm: Sequence[Item] = (),
        feature: str = FEATURE,
        layers: Sequence[int] | None = None,
        layout: StoredLayout | None = None,
    ) -> Lookup:
        """How much of a sequence is stored, without reading it. Arguments and errors as `retrieve`."""
        ids, identity = token_list(token_ids), identity_of(lora, mm)
        asked = Asked.of(feature, layers, layout)

        def look_up() -> Lookup:
            found = find_all(self._session, self._wanted(ids, cache_salt, identity, asked))
            return Lookup(found.num_tokens, found.missing)

        return self._session.run(look_up)

    def retrieve(
        self,
        token_ids: Any,
        *,
        cache_salt: str = "",
        lora: Lora = None,
        mm: Sequence[Item] = (),
        feature: str = FEATURE,
        layers: Sequence[int] | None = None,
        layout: StoredLayout | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> Retrieval:
        """The queries, or another feature, of the longest stored prefix of a sequence.

        Args:
            token_ids: list or tuple of ints, or a 1-D integer numpy array or torch tensor.
            cache_salt: as the request had it.
            lora: the adapter's folder, if the sequence was computed with one; or a `LoraIdentity`, with name and path
                as the engine has them, where the adapter's files could not be read beside the engine.
            mm: multimodal items, as (identifier, offset of its first placeholder token) or `ItemIdentity`; prompt
                embeddings, by `embeds_item`. `identities` tells what there is.
            feature: "query", "key", "value", "attention_output", or its whole name.
            layers: global indices of the layers to read, in the order of the result; None: all that the layout has.
                Where several layouts have them, the one is read that holds the longest prefix.
            layout: where the model is stored in several, one of `layouts_of(feature)`. None: the one with the most
                layers. A result comes out of one layout, always.
            out: contiguous CPU tensor `[layers, enough tokens, heads, head_dim]` to read into; what lies behind the
                result's `num_tokens` is left in any state. Where layers of several shapes are read, one for each.

        Returns:
            Where all layers that are read have one shape (heads, elements per head, dtype), `tensor` holds them; else
            each shape has a tensor of its own, in `groups`.

        Raises:
            TypeError, ValueError: an argument can't be used, or nothing is known of the model.
            ConnectionError: the server does not answer, after one renewal of the connection.
            RequestError: it refuses; lifeline_required when its memory is not reachable from here.
        """
        ids, identity = token_list(token_ids), identity_of(lora, mm)
        asked = Asked.of(feature, layers, layout)
        return self._session.run(
            lambda: self._read_all(self._wanted(ids, cache_salt, identity, asked), out)
        )

    def identities(self, token_ids: Any, *, feature: str = FEATURE) -> Identities:
        """What is stored for the same token ids, whatever salt, LoRA adapter, multimodal items or embeddings it has.

        Each can be retrieved: `retrieve(token_ids, **one.arguments)`. Not listed is what was stored without its tokens,
        by an engine with `lmcache.q.tails: false`.

        Raises:
            TypeError, ValueError, ConnectionError: as `retrieve`.
            RequestError: lifeline_required where the server's Unix socket is not reachable; salts go to nobody else.
        """
        ids = token_list(token_ids)

        def listed() -> Identities:
            layouts = self.layouts_of(feature)
            if not layouts:
                raise self._nothing_of(feature)
            return list_identities(
                self._session,
                ids,
                layouts,
                lambda salt, identity, layout: self._wanted(
                    ids, salt, identity, Asked(layout.feature, None, layout)
                ),
            )

        return self._session.run(listed)

    # --- writing ------------------------------------------------------------------------------------------------

    def store(
        self,
        token_ids: Any,
        tensor: Any,
        *,
        cache_salt: str,
        lora: Lora = None,
        mm: Sequence[Item] = (),
        feature: str = FEATURE,
        layout: StoredLayout | Layout | None = None,
    ) -> Stored:
        """Write an edited tensor back, under a salt of its own: `retrieve(token_ids, cache_salt=...)` gives it again.

        What the engine stored stays as it is, because objects are immutable and found by tokens and salt: an edit is
        another object, under another salt. It is stored as an engine stores it, chunk by chunk and rank by rank, so any
        prefix of it can be retrieved. What is stored under the salt already is read, and compared.

        Args:
            token_ids, lora, mm, feature: as in `retrieve`; the same ones find it again.
            tensor: `[layers, tokens, heads, head_dim]` as `retrieve` gives it: all layers and heads of the layout, a
                row for each token id, in the stored type; torch or numpy, any strides. Of a type that numpy lacks, a
                numpy array is the bits. Where layers have several shapes, a list: one for each of the layout's groups.
            cache_salt: not empty, and none that an engine uses.
            layout: as in `retrieve`; or, of what no engine has stored, the `Layout` of a model on one rank.

        Raises:
            TypeError, ValueError: an argument can't be used; what would fit is said.
            StoreConflict: other values are stored for these tokens under this salt; they are as they were.
            StoreRefused: the server does not take all of it: which chunks, why, and what it has taken.
            ConnectionError, RequestError: as `retrieve`. What was stored before stays; the same call again goes on.
        """
        ids, identity = token_list(token_ids), identity_of(lora, mm)
        if not isinstance(cache_salt, str) or not cache_salt:
            raise ValueError(
                "an edited tensor needs a cache_salt of its own, any text that no engine uses: without one it would "
                "pass for what the engine computed"
            )
        return self._session.run(
            lambda: self._store(ids, tensor, cache_salt, identity, feature, layout)
        )

    def _store(
        self,
        ids: Sequence[int],
        tensor: Any,
        cache_salt: str,
        identity: Identity,
        feature: str,
        layout: StoredLayout | Layout | None,
    ) -> Stored:
        from lmcache_qclient.qcache import edited, tensors

        hello = self._session.connection.hello
        if isinstance(layout, Layout):
            layout = self._layout_of_nobody(layout)
        (whole,) = self._candidates(Asked.of(feature, None, layout))
        if whole.missing_ranks:
            raise ValueError(
                f"the server does not know what all ranks hold, so the tensor can't be cut up: {whole}"
            )
        if whole.chunk_size not in (0, hello.chunk_size):
            raise ValueError(
                f"{whole} was stored in chunks of {whole.chunk_size} tokens, and the server has {hello.chunk_size} now"
            )
        wanteds = self._wanted(ids, cache_salt, identity, Asked.of(feature, None, whole))
        work = ToStore(
            whole,
            wanteds,
            edited.edited_bits(tensor, whole, len(ids)),
            chunks_to_store(ids, identity, hello.chunk_size),
        )
        self._stored_at = hello.boot_id
        stored = store(self._session, work, tensors.copy_threads())
        if whole not in self._layouts.get(whole.feature, ()):
            self._known_of = b""  # there is one more
        return stored

    def _layout_of_nobody(self, layout: Layout) -> StoredLayout:
        if self._model is None:
            raise ValueError(
                "pass model_name= to connect: the server knows no model to store this for"
            )
        return of_one_rank(self._model, layout, self._session.connection.hello.chunk_size)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything that the server stores is in its persistent tier, where it outlives the server.

        Other threads may use the context meanwhile.

        Returns:
            True.

        Raises:
            NotPersisted: the time is over, the server has no persistent tier or can't reach it, or it was restarted
                since this context's last store.
            ValueError: a time that no server waits.
            ConnectionError, RequestError: as `retrieve`.
        """
        flush(self._session, timeout_s, self._stored_at)
        return True

    # --- common to all ------------------------------------------------------------------------------------------

    def _wanted(
        self, ids: Sequence[int], cache_salt: str, identity: Identity, asked: Asked
    ) -> Sequence[Wanted]:
        """One for each shape of layers. Inside `run`, behind a renewal: another server may have another chunk size."""
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARS:
            raise ValueError(f"cache_salt is a text of at most {MAX_SALT_CHARS} characters")
        ways = [
            [
                self._wanted_in(group, ids, cache_salt, identity, layers)
                for group in layout.groups
                if (layers := asked.layers_of(group)) != ()
            ]
            for layout in self._candidates(asked)
        ]
        if len(ways) == 1:
            return ways[0]
        return max(ways, key=lambda wanteds: find_all(self._session, wanteds).num_tokens)

    def _wanted_in(
        self,
        layout: StoredLayout,
        ids: Sequence[int],
        cache_salt: str,
        identity: Identity,
        layers: tuple[int, ...] | None,
    ) -> Wanted:
        chunk_size = layout.chunk_size or self._session.connection.hello.chunk_size
        chain = HashChain(chunk_size, identity)
        chain.extend(ids)
        return Wanted(
            layout,
            chunk_size,
            cache_salt,
            chain.root,
            tuple(chain.hashes),
            tuple(ids),
            identity.items,
            layers,
        )

    def _read_all(
        self, wanteds: Sequence[Wanted], out: torch.Tensor | Sequence[torch.Tensor] | None
    ) -> Retrieval:
        """One shape of layers after the other, then what all of them have."""
        if len(wanteds) == 1:
            return self._read(wanteds[0], out)
        outs = (None,) * len(wanteds) if out is None else tuple(out)
        if len(outs) != len(wanteds):
            raise ValueError(
                f"out must be {len(wanteds)} tensors, one for each shape of layers: see the layout's groups"
            )
        reads = [self._read(wanted, one) for wanted, one in zip(wanteds, outs, strict=True)]
        return joined(reads, keep=out is not None)

    def _read(self, wanted: Wanted, out: Any) -> Retrieval:
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
        return tensors.empty(wanted.layout, len(wanted.layer_ids), found.num_tokens)
    tensors.check_out(out, wanted.layout, len(wanted.layer_ids), found.num_tokens)
    return out


def _retrieval(
    wanted: Wanted, found: Found, tensor: torch.Tensor, out: torch.Tensor | None
) -> Retrieval:
    from lmcache_qclient.qcache import tensors

    front = tensor[:, : found.num_tokens]
    # Shortly after a store the server has not looked yet.
    nonfinite = tensors.any_nonfinite(front) if found.nonfinite is None else found.nonfinite
    own = front if out is not None else front.contiguous()
    return Retrieval(
        groups=(LayerGroup(own, wanted.layer_ids, wanted.layout),),
        num_tokens=found.num_tokens,
        missing=found.missing,
        nonfinite=nonfinite,
        persisted=found.persisted,
    )


def _widest(layouts: Sequence[StoredLayout]) -> StoredLayout:
    """The layout with the most layers.

    Raises:
        ValueError: several have as many.
    """
    most = max(len(layout.all_layer_ids) for layout in layouts)
    widest = [layout for layout in layouts if len(layout.all_layer_ids) == most]
    if len(widest) > 1:
        listed = "; ".join(map(str, widest))
        raise ValueError(
            f"pass layout=, one of the context's layouts; the model is stored as {listed}"
        )
    return widest[0]


def _check_tiled(layout: StoredLayout) -> None:
    if not layout.missing_ranks and not layout.complete:
        raise ValueError(
            f"the heads that the ranks say they hold do not make up the whole model: {layout}"
        )
