"""All uploads: who may begin one, what its messages do, and when it is given up.

A client's unfinished uploads are bounded in number and in bytes, and each in time, so that nobody can hold the pool by
beginning and never ending. What is not proven by its stamps is never admitted, however an upload ends.

Everything is called on the event loop; copies run in the lane of the upload's instance.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable

from lmcache_qprotocol.errors import ErrorCode, RequestError
from lmcache_qprotocol.messages import StoreOutcome
from lmcache_qprotocol.reasons import LossReason, MissReason
from lmcache_qserver.copying.inline import copy_part, prove
from lmcache_qserver.qstore.index import Index, Write
from lmcache_qserver.qstore.instance import Instance, InstanceState
from lmcache_qserver.qstore.persist.persistence import Persistence
from lmcache_qserver.qstore.store_check import CheckedStore, PlannedChunk
from lmcache_qserver.qstore.stored_object import Place, StoredObject
from lmcache_qserver.qstore.upload import Upload
from lmcache_qserver.status_report import UploadsReport

MAX_OPEN = 64
"""Uploads of one client that are not over."""


class Uploads:
    """The table of uploads.

    Args:
        cap_bytes: what one client's unfinished uploads may reserve; one upload may be larger if it is alone.
        timeout_s: an upload that is not complete after so long is given up.
        copy_timeout_s: seconds for the copy of one part.
        on_stored: told of every object, after its commit.
        inline_checksums: whether lanes make their checksums.
        persistence: what it holds is not stored again; None: there is none.
    """

    def __init__(
        self,
        index: Index,
        *,
        cap_bytes: int,
        timeout_s: float,
        copy_timeout_s: float,
        on_stored: Callable[[StoredObject], None],
        inline_checksums: bool,
        persistence: Persistence | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.cap_bytes = cap_bytes
        self._index = index
        self._copy_timeout_s = copy_timeout_s
        self._on_stored = on_stored
        self._inline_checksums = inline_checksums
        self._persistence = persistence
        self._open: dict[int, Upload] = {}
        """By id. All have the same time, so the order of ids is the order of expiry."""
        self._count: Counter[Hashable] = Counter()
        self._held: Counter[Hashable] = Counter()
        self._last_id = 0
        self._given_up = 0

    async def begin(
        self, client: Hashable, instance: Instance, store: CheckedStore, clock: Callable[[], float]
    ) -> Upload | StoreOutcome:
        """Reserve room, unless nothing need be sent: the chunk is there, or will be when another writer is done.

        Args:
            clock: seconds, monotonic; an upload's time counts from when its room is reserved.

        Raises:
            RequestError(busy): the client has as many unfinished uploads as it may.
        """
        self._take_room(client, store.object_bytes)
        found: Upload | StoreOutcome | None = None
        try:
            found = await self._reserve(client, instance, store, clock)
            return found
        finally:
            if not isinstance(found, Upload):
                self._give_room(client, store.object_bytes)

    def get(self, client: Hashable, upload_id: int) -> Upload:
        """The client's open upload.

        Raises:
            RequestError(unknown_upload): there is none under this id that still takes bytes.
        """
        upload = self._open.get(upload_id)
        if upload is None or upload.client != client or upload.sealing:
            raise RequestError(
                ErrorCode.UNKNOWN_UPLOAD,
                f"no upload {upload_id} of yours takes bytes: it is complete, or was given up (after "
                f"{self.timeout_s:g} s at the latest); nothing that was not answered as stored is stored",
            )
        return upload

    async def part(self, upload: Upload, offset: int, part: memoryview) -> None:
        """Copy the next bytes; returns when they are in place.

        Raises:
            RequestError: bad_payload when they are not the next ones, unknown_upload when they can't be copied; the
                upload is given up then.
        """
        end = offset + len(part)
        if offset != upload.received or not part or end > upload.nbytes:
            raise self._wrong(
                upload,
                f"the next bytes are [{upload.received}, {upload.nbytes}) or the first of them, not [{offset}, {end})",
            )
        upload.received = end
        try:
            job = upload.instance.lane.submit(
                copy_part, upload.target[offset:end], part, timeout_s=self._copy_timeout_s
            )
            upload.watch(job)
            await job.outcome
        except Exception as error:  # noqa: BLE001 - it is the client's to know
            self.give_up(upload, f"a part could not be copied: {error}")
            raise RequestError(ErrorCode.UNKNOWN_UPLOAD, f"it was given up: {error}") from None

    def check_complete(self, upload: Upload, stamps: memoryview) -> None:
        """All bytes and as many stamps as rows have come: the upload is sealing from now on.

        Raises:
            RequestError(bad_payload): they have not; the upload is given up.
        """
        if upload.received != upload.nbytes:
            raise self._wrong(upload, f"{upload.received} of {upload.nbytes} bytes have come")
        if len(stamps) != upload.stamps_bytes:
            raise self._wrong(
                upload, f"its rows have {upload.stamps_bytes} bytes of stamps, not {len(stamps)}"
            )
        upload.sealing = True

    async def seal(self, upload: Upload, stamps: memoryview, now: float) -> StoreOutcome:
        """Prove and commit, or fail; raises nothing but CancelledError."""
        try:
            job = upload.instance.lane.submit(
                prove,
                upload.chunk_copy(),
                upload.store.description.block_size,
                stamps,
                self._inline_checksums,
                timeout_s=self._copy_timeout_s,
            )
            upload.watch(job)
            copied = await job.outcome
        except BaseException as error:
            self._fail(upload, LossReason.COPY_FAILED, f"the copy failed: {error}")
            if not isinstance(error, Exception):
                raise
            return upload.ended.result()
        fault = copied.fault
        if fault is not None:
            message = (
                f"the row of position {upload.planned.start + fault.row} has stamp {fault.found} instead of "
                f"{fault.expected}: it was not written, or its ring block was given away while it was gathered"
            )
            self._fail(upload, LossReason.STAMP_MISMATCH, message)
        elif upload.instance.dead:
            self._fail(upload, LossReason.COPY_FAILED, "the instance was released meanwhile")
        else:
            store = upload.store
            stored = self._index.commit(
                upload.write,
                store.description,
                store.rows,
                now,
                store.content,
                store.claimed,
                Place(upload.planned.parent, upload.planned.start - store.rows[0]),
            )
            stored.checksum = copied.checksums[0]
            self._on_stored(stored)
            self._end(upload, StoreOutcome(stored=1))
        return upload.ended.result()

    def give_up(self, upload: Upload, message: str) -> None:
        """Free what an open upload holds; nothing if it is over, or ends by itself."""
        if upload.ended.done() or upload.sealing:
            return
        self._given_up += 1
        self._fail(upload, LossReason.COPY_FAILED, message)

    def instance_leaves(self, instance: Instance) -> None:
        """Give up what an instance has begun and not ended: the rest would find no instance."""
        for upload in [one for one in self._open.values() if one.instance is instance]:
            self.give_up(upload, "the instance was released before its upload was complete")

    def expire(self, now: float) -> int:
        """Give up the uploads whose time is over; how many there were. Call it every second or so."""
        over = []
        for upload in self._open.values():
            if upload.expires_at > now:
                break
            if not upload.sealing:
                over.append(upload)
        for upload in over:
            self.give_up(upload, f"it was not complete after {self.timeout_s:g} s")
        return len(over)

    def summary(self) -> UploadsReport:
        """For `/status`."""
        return UploadsReport(
            open=len(self._open),
            bytes=sum(upload.nbytes for upload in self._open.values()),
            given_up=self._given_up,
            cap_bytes_per_client=self.cap_bytes,
        )

    async def _reserve(
        self, client: Hashable, instance: Instance, store: CheckedStore, clock: Callable[[], float]
    ) -> Upload | StoreOutcome:
        (planned,) = store.chunks(store.told_chain)
        if await self._is_persisted(planned):
            return StoreOutcome(duplicate=1)
        while instance.state is InstanceState.LIVE:
            reserved = self._index.reserve_write([planned.key], store.object_bytes)
            if reserved.no_room:
                return _refused(
                    LossReason.POOL_FULL,
                    f"the pool has no room for {store.object_bytes} bytes: everything in it is being written or read",
                )
            if reserved.writes:
                return self._begin(
                    client, instance, store, planned, reserved.writes[0], clock() + self.timeout_s
                )
            if reserved.duplicates:
                return StoreOutcome(duplicate=1)
            ((_, other),) = reserved.shared
            if await asyncio.shield(other):
                return StoreOutcome(duplicate=1)
        return _refused(LossReason.COPY_FAILED, "the instance was released meanwhile")

    async def _is_persisted(self, planned: PlannedChunk) -> bool:
        if self._persistence is None or self._index.get(planned.key) is not None:
            return False
        if not self._persistence.is_held(planned.key, planned.parent):
            return False
        return bool(await self._persistence.confirm([(planned.key, planned.parent)]))

    def _begin(
        self,
        client: Hashable,
        instance: Instance,
        store: CheckedStore,
        planned: PlannedChunk,
        write: Write,
        expires_at: float,
    ) -> Upload:
        self._last_id += 1
        upload = Upload(
            self._last_id,
            client,
            instance,
            store,
            planned,
            write,
            self._index.pool.view(write.slot),
            expires_at,
            asyncio.get_running_loop().create_future(),
        )
        self._open[upload.upload_id] = upload
        return upload

    def _wrong(self, upload: Upload, what: str) -> RequestError:
        self.give_up(upload, what)
        return RequestError(
            ErrorCode.BAD_PAYLOAD, f"upload {upload.upload_id} is given up: {what}; begin again"
        )

    def _fail(self, upload: Upload, reason: LossReason, message: str) -> None:
        self._index.fail([upload.write], MissReason(reason.value), upload.copies_over())
        self._end(upload, _refused(reason, message))

    def _end(self, upload: Upload, outcome: StoreOutcome) -> None:
        del self._open[upload.upload_id]
        self._give_room(upload.client, upload.nbytes)
        upload.ended.set_result(outcome)

    def _take_room(self, client: Hashable, nbytes: int) -> None:
        count, held = self._count[client], self._held[client]
        if count >= MAX_OPEN or (count and held + nbytes > self.cap_bytes):
            raise RequestError(
                ErrorCode.BUSY,
                f"{count} uploads of {held} bytes are unfinished, {MAX_OPEN} of {self.cap_bytes} are the most: "
                "end some",
            )
        self._count[client] += 1
        self._held[client] += nbytes

    def _give_room(self, client: Hashable, nbytes: int) -> None:
        self._count[client] -= 1
        self._held[client] -= nbytes
        if not self._count[client]:
            del self._count[client], self._held[client]


def _refused(reason: LossReason, message: str) -> StoreOutcome:
    return StoreOutcome(refused={reason: 1}, message=message)
