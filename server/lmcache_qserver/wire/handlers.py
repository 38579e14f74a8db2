"""What each operation does: checks that belong to the wire, then a call of the store's module."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.limits import Limits
from lmcache_qprotocol.messages import (
    PROTOCOL_VERSION,
    ChunkQuery,
    FlushReply,
    HelloReply,
    LookupReply,
    PurgeReply,
    RetrieveReply,
    RingDescription,
    StoreResult,
    UploadReply,
    VerifyReply,
)
from lmcache_qserver.copying import RingSource
from lmcache_qserver.copying.inline import UnreachableRing
from lmcache_qserver.device.processes import DeviceProcesses
from lmcache_qserver.qstore import QStoreModule
from lmcache_qserver.qstore.persist.found import Elsewhere
from lmcache_qserver.qstore.persist.read_through import Brought
from lmcache_qserver.wire.bulk_answers import BulkAnswers
from lmcache_qserver.wire.clients import Client, Clients, Session
from lmcache_qserver.wire.dispatch import Handler, Order, Payloads

LONGEST_FLUSH_S = 3600.0


class Handlers:
    """The handlers of all operations; `table` is the dispatch table.

    Args:
        bulk: says who may have how many bytes on their way.
        devices: where rings come from that lie on a device.
        lifeline: path of the Unix socket, for the reply to hello.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        module: QStoreModule,
        clients: Clients,
        devices: DeviceProcesses,
        *,
        boot_id: bytes,
        features: tuple[str, ...],
        chunk_size: int,
        limits: Limits,
        bulk: BulkAnswers,
        lifeline: str,
        clock: Callable[[], float],
    ) -> None:
        self._module = module
        self._clients = clients
        self._devices = devices
        self._boot_id = boot_id
        self._features = features
        self._chunk_size = chunk_size
        self._limits = limits
        self._bulk = bulk
        self._lifeline = lifeline
        self._clock = clock

    def table(self) -> dict[str, Handler]:
        """Operation name → handler, for every operation of the protocol."""
        return {
            "hello": Handler(Order.NOW, self._hello),
            "register_q_cache": Handler(Order.IN_TURN, self._register, while_stopping=False),
            "unregister_q_cache": Handler(Order.IN_TURN, self._unregister),
            "store_q": Handler(Order.BESIDE, self._store, while_stopping=False),
            "begin_upload_q": Handler(Order.BESIDE, self._begin_upload, while_stopping=False),
            "upload_part_q": Handler(Order.BESIDE, self._upload_part),
            "end_upload_q": Handler(Order.BESIDE, self._end_upload),
            "get_chunk_size": Handler(Order.NOW, lambda client, payloads: self._chunk_size),
            "ping": Handler(Order.NOW, self._ping),
            "noop": Handler(Order.NOW, lambda client, payloads: "OK"),
            "get_experimental": Handler(Order.NOW, lambda client, payloads: self._features),
            "lookup_q": Handler(Order.EITHER, self._lookup),
            "retrieve_q": Handler(Order.EITHER, self._retrieve, while_stopping=False),
            "fetch_q": Handler(Order.NOW, self._fetch),
            "release_q": Handler(Order.NOW, self._release),
            "verify_q": Handler(Order.BESIDE, self._verify, while_stopping=False),
            "identities_q": Handler(Order.NOW, self._identities),
            "flush_q": Handler(Order.BESIDE, self._flush),
            "purge_q": Handler(Order.BESIDE, self._purge, while_stopping=False),
        }

    def _hello(self, client: Client, payloads: Payloads) -> HelloReply:
        (hello,) = payloads
        if hello.protocol_version != PROTOCOL_VERSION:
            raise RequestError(
                ErrorCode.UNSUPPORTED_VERSION,
                f"this server speaks protocol version {PROTOCOL_VERSION}, not {hello.protocol_version}; "
                "install the same lmcache-qserver release on both sides",
            )
        session = self._clients.say_hello(client, hello)
        assert session.token is not None
        return HelloReply(
            protocol_version=PROTOCOL_VERSION,
            boot_id=self._boot_id,
            session=session.token,
            features=self._features,
            chunk_size=self._chunk_size,
            limits=self._limits,
            lifeline=self._lifeline,
        )

    async def _register(self, client: Client, payloads: Payloads) -> None:
        instance_id, _, model_name, world_size, _, _, _, description = payloads
        session = client.session
        if description is not None or session.gone:
            _require_hello(session)
        ring = None if description is None else self._take_ring(session, description)
        await self._module.register_q_cache(
            session, instance_id, model_name, world_size, description, ring, self._clock()
        )
        client.registered = client.registered or client.session is session
        if session.gone:  # it went while the ring was opened: what it left behind has to go too
            await self._module.client_gone(session, self._clock())

    def _take_ring(self, session: Session, description: RingDescription) -> RingSource | None:
        if description.kind == "inline":
            self._require_inline()
            return UnreachableRing()
        if description.kind not in self._devices.kinds:
            known = " or ".join((*self._devices.kinds, "inline"))
            raise RequestError(
                ErrorCode.UNSUPPORTED_TRANSPORT,
                f"this server takes rings of kind {known}, not {description.kind!r}",
            )
        if session.lifeline is None:
            return None
        if description.kind == "shm":
            return session.lifeline.take_ring(description.ring_token)
        return self._devices.ring(description)

    async def _unregister(self, client: Client, payloads: Payloads) -> None:
        instance_id, report = payloads
        await self._module.unregister_q_cache(client.session, instance_id, report, self._clock())

    def _store(self, client: Client, payloads: Payloads) -> asyncio.Task[StoreResult]:
        key, instance_id, block_groups, event, proof = payloads
        if proof is not None or client.session.gone:
            _require_hello(client.session)
        return self._module.stores.begin_store_q(
            client.session, key, instance_id, block_groups, event, proof, self._clock()
        )

    def _begin_upload(self, client: Client, payloads: Payloads) -> Awaitable[UploadReply]:
        key, instance_id, proof = payloads
        _require_hello(client.session)
        return self._module.stores.begin_upload_q(
            client.session, key, instance_id, proof, self._clock()
        )

    def _upload_part(self, client: Client, payloads: Payloads) -> Awaitable[None]:
        upload_id, offset, part = payloads
        _require_hello(client.session)
        return self._module.stores.upload_part_q(
            client.session, upload_id, offset, part, self._clock()
        )

    def _end_upload(self, client: Client, payloads: Payloads) -> asyncio.Task[StoreResult]:
        upload_id, stamps = payloads
        _require_hello(client.session)
        return self._module.stores.end_upload_q(client.session, upload_id, stamps, self._clock())

    def _ping(self, client: Client, payloads: Payloads) -> bool:
        instance_id, report = payloads
        return self._module.ping(client.session, instance_id, report, self._clock())

    def _lookup(self, client: Client, payloads: Payloads) -> Any:
        (query,) = payloads
        looking = self._module.reads.look_in_tier(query)
        return self._module.reads.lookup_q(query) if looking is None else self._look(query, looking)

    async def _look(self, query: ChunkQuery, looking: Awaitable[Elsewhere]) -> LookupReply:
        return self._module.reads.lookup_q(query, await looking)

    def _retrieve(self, client: Client, payloads: Payloads) -> Any:
        (query,) = payloads
        _require_hello(client.session)
        if not self._limits.bulk_bytes:
            _require_lifeline(client.session, "leases need")
        bringing = self._module.reads.bring_from_tier(client.session, query)
        if bringing is None:
            return self._module.reads.retrieve_q(client.session, query, self._clock())
        return self._bring(client.session, query, bringing)

    async def _bring(
        self, session: Session, query: ChunkQuery, bringing: Awaitable[Brought]
    ) -> RetrieveReply:
        brought = await bringing
        if session.gone:  # nobody would release what it leases
            self._module.reads.let_go(brought)
            _require_hello(session)
        return self._module.reads.retrieve_q(session, query, self._clock(), brought)

    def _fetch(self, client: Client, payloads: Payloads) -> Any:
        lease_id, place, offset, nbytes = payloads
        _require_hello(client.session)
        self._require_inline()
        if nbytes > self._limits.bulk_bytes:
            raise RequestError(
                ErrorCode.TOO_LARGE,
                f"one answer brings at most {self._limits.bulk_bytes} bytes, not {nbytes}; ask for less at once",
            )
        self._bulk.check_room(client, nbytes)
        part = offset, offset + nbytes
        return self._module.reads.fetch_q(client.session, lease_id, place, part, self._clock())

    def _identities(self, client: Client, payloads: Payloads) -> Any:
        (query,) = payloads
        # It tells salts, which may be secrets: to who has the lifeline, and may read everything that they guard anyway.
        # Who reads inline can read only what it can name, salt and all.
        _require_lifeline(client.session, "who asks for identities needs")
        return self._module.reads.identities_q(query)

    def _verify(self, client: Client, payloads: Payloads) -> Awaitable[VerifyReply]:
        _require_hello(client.session)
        return self._module.verify_q()

    def _flush(self, client: Client, payloads: Payloads) -> Awaitable[FlushReply]:
        (timeout_ms,) = payloads
        _require_hello(client.session)
        return self._module.flush_q(min(timeout_ms / 1000, LONGEST_FLUSH_S))

    def _purge(self, client: Client, payloads: Payloads) -> Awaitable[PurgeReply]:
        model_name, salt = payloads
        _require_lifeline(client.session, "who purges needs")
        return self._module.purge_q(model_name, salt)

    def _release(self, client: Client, payloads: Payloads) -> None:
        (lease_ids,) = payloads
        _require_hello(client.session)
        self._module.reads.release_q(client.session, lease_ids)

    def _require_inline(self) -> None:
        if not self._limits.bulk_bytes:
            raise RequestError(
                ErrorCode.UNSUPPORTED_TRANSPORT,
                "this server takes and gives bytes over the lifeline only: start it with --allow-inline",
            )


def _require_hello(session: Session) -> None:
    if session.token is None or session.gone:
        raise RequestError(
            ErrorCode.HELLO_REQUIRED,
            "say hello first (again, if the lifeline was closed or the client was silent)",
        )


def _require_lifeline(session: Session, who: str) -> None:
    _require_hello(session)
    if session.lifeline is None:
        raise RequestError(
            ErrorCode.LIFELINE_REQUIRED,
            f"{who} an attached lifeline: connect to the Unix socket that hello names, and attach",
        )
