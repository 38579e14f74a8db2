"""A store in memory whose every operation can be held, and made to fail; and a module's world in front of it."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

from lmcache_qprotocol.messages import ChunkQuery, RetrieveReply
from lmcache_qprotocol.reasons import MissReason
from lmcache_qserver.qstore.persist.persistence import Persistence, PersistSettings
from lmcache_qserver.tier import (
    ChunkStore,
    Corrupt,
    Entry,
    NotThere,
    PutOutcome,
    Refused,
    Unavailable,
)
from lmcache_qserver.tier.chunk_store import Observe
from lmcache_qserver.tier.transfer import Transfer
from tests.server.qstore.fake_worker import query_of, stored_chunk
from tests.server.qstore.world import World, until

Work = Callable[[], Any]


class ControlledStore(ChunkStore):
    """Objects by name.

    Attributes:
        held: operations ("put", "get", "head", "list", "delete") that wait for `let_go`. Reading an object's beginning
            counts as "head".
        waiting: what waits, oldest first: operation, name.
        failing: errors of the next operations of a kind.
        for_ever: the error of all operations of a kind.
        refused: puts of names with this in them are; empty: none.
        asked: every operation and name, in order.
    """

    def __init__(self) -> None:
        self.url = "controlled://"
        self.objects: dict[str, bytes] = {}
        self.put_aside: dict[str, bytes] = {}
        self.held: set[str] = set()
        self.waiting: deque[tuple[str, str, asyncio.Future[None]]] = deque()
        self.failing: dict[str, list[BaseException]] = {}
        self.for_ever: dict[str, BaseException] = {}
        self.refused = ""
        self.asked: list[tuple[str, str]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[Transfer[Any]] = set()

    # --- for tests ---

    async def until_waits(self, operation: str, count: int = 1) -> None:
        """So many of these wait."""
        await until(lambda: sum(one[0] == operation for one in self.waiting) >= count)

    def let_go(self, operation: str | None = None) -> None:
        """What waits goes on, and what comes; None: of every operation."""
        self.held -= {operation} if operation else set(self.held)
        for one in [one for one in self.waiting if operation in (None, one[0])]:
            self.waiting.remove(one)
            one[2].set_result(None)

    def step(self) -> str:
        """The oldest that waits goes on; what it is."""
        operation, _, gate = self.waiting.popleft()
        gate.set_result(None)
        return operation

    def time_out(self) -> None:
        """All transfers under way are answered; what they do goes on."""
        for transfer in self._under_way:
            transfer.fail(Unavailable("it takes too long"))

    def count(self, operation: str) -> int:
        """How often it was asked for."""
        return sum(asked == operation for asked, _ in self.asked)

    # --- a store ---

    def put(self, name: str, parts: Sequence[memoryview]) -> Transfer[PutOutcome]:
        def work() -> PutOutcome:
            if self.refused and self.refused in name:
                raise Refused(name)
            if name in self.objects:
                return PutOutcome.ALREADY_THERE
            self.objects[name] = b"".join(parts)
            return PutOutcome.WRITTEN

        return self._transfer("put", name, work)

    def get_into(
        self,
        name: str,
        targets: Sequence[memoryview],
        offset: int = 0,
        to_end: bool = True,
        observe: Observe | None = None,
    ) -> Transfer[None]:
        def work() -> None:
            if name not in self.objects:
                raise NotThere(name)
            raw = self.objects[name][offset:]
            wanted = sum(target.nbytes for target in targets)
            if len(raw) < wanted or (to_end and len(raw) != wanted):
                raise Corrupt(f"{name} has another length")
            for target in targets:
                target[:] = raw[: target.nbytes]
                raw = raw[target.nbytes :]
                if observe is not None:
                    observe(target)

        return self._transfer("head" if not offset else "get", name, work)

    async def head(self, name: str) -> Entry | None:
        await self._pass("head", name)
        raw = self.objects.get(name)
        return None if raw is None else Entry(name, len(raw), 0.0, 0.0)

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            await self._pass("delete", name)
            self.objects.pop(name, None)

    async def quarantine(self, name: str) -> None:
        await self._pass("quarantine", name)
        if name in self.objects:
            self.put_aside[name] = self.objects.pop(name)

    async def quarantined(self) -> tuple[int, int]:
        return len(self.put_aside), sum(map(len, self.put_aside.values()))

    async def list(self, prefix: str = "") -> AsyncIterator[Entry]:
        await self._pass("list", prefix)
        for name, raw in list(self.objects.items()):
            if not prefix or name.startswith(f"{prefix}/"):
                yield Entry(name, len(raw), 0.0, 0.0)

    async def folders(self, prefix: str = "") -> builtins.list[str]:
        depth = prefix.count("/") + 2
        found = {"/".join(name.split("/")[:depth]) for name in self.objects}
        return sorted(name for name in found if name.startswith(f"{prefix}/"))

    async def close(self, timeout_s: float) -> bool:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    async def _pass(self, operation: str, name: str) -> None:
        self.asked.append((operation, name))
        if operation in self.held:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append((operation, name, gate))
            await gate
        if operation in self.for_ever:
            raise self.for_ever[operation]
        if self.failing.get(operation):
            raise self.failing[operation].pop(0)

    def _transfer(self, operation: str, name: str, work: Work) -> Transfer[Any]:
        transfer: Transfer[Any] = Transfer()
        self._under_way.add(transfer)

        async def run() -> None:
            try:
                await self._pass(operation, name)
                transfer.succeed(work())
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
                transfer.fail(error)
            self._under_way.remove(transfer)
            transfer.end()

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return transfer


class TierWorld(World):
    """A module with a controlled store behind it; `attach` opens that.

    Args:
        url: of `file://` for what only a store of files is asked for.
    """

    def __init__(
        self,
        pool_chunks: int = 16,
        *,
        ttl_s: float = 0.0,
        url: str = "controlled://",
        **settings: Any,
    ) -> None:
        persist = PersistSettings(url=url, timeout_s=20.0, ttl_s=ttl_s)
        super().__init__(pool_chunks, persist=persist, **settings)
        self.now = (
            time.monotonic()
        )  # as the daemon does: objects are as old as the module's clock says
        self.store_of_objects = ControlledStore()

    @property
    def persistence(self) -> Persistence:
        assert self.module.persistence is not None
        return self.module.persistence

    def attach(self) -> ControlledStore:
        """Open the store."""
        self.persistence.attach(self.store_of_objects)
        return self.store_of_objects

    async def forget(self) -> None:
        """All of it is persisted, and nothing is in the pool any more."""
        assert (await self.module.flush_q(20.0)).persisted
        self.evict()

    def evict(self) -> None:
        """All of the pool; what is pinned goes when it is let go."""
        for stored in self.module.index.objects():
            self.module.index.discard(stored, MissReason.EVICTED)

    async def bring(self, query: ChunkQuery, client: Hashable = "reader") -> RetrieveReply:
        """`retrieve_q` as the wire does it."""
        bringing = self.module.reads.bring_from_tier(client, query)
        brought = None if bringing is None else await bringing
        return self.module.reads.retrieve_q(client, query, self.now, brought)

    async def read_back(self, sequence: int, *chunks: int) -> dict[int, str | bool]:
        """By chunk: True if it comes back bit for bit, else why not; nothing stays leased."""
        reply = await self.bring(query_of(sequence, chunks))
        found: dict[int, str | bool] = {
            chunks[index]: bool((rows == stored_chunk(sequence, chunks[index])).all())
            for index, rows in self.read(reply).items()
        }
        found |= {chunks[index]: reason for index, reason in self.misses(reply).items()}
        if reply.lease_id:
            self.module.reads.release_q("reader", (reply.lease_id,))
        return dict(sorted(found.items()))

    def check_sum(self) -> None:
        """submitted = written + already_there + lost + waiting + writing."""
        now = self.persistence.summary()
        ended = now.written + now.already_there + sum(now.lost.values())
        assert now.submitted == ended + now.waiting + now.writing, now

    async def close(self) -> None:
        self.store_of_objects.let_go()
        self.store_of_objects.for_ever.clear()
        await self.persistence.close(20.0)
        self.evict()
        await super().close()
        assert self.pool.usage().leased_bytes == 0


__all__ = ["ControlledStore", "TierWorld", "until"]
