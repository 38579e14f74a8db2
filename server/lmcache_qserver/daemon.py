"""The composition root: the one place that builds everything and takes it apart again.

Life: build ─▶ bind ─▶ serve, while the pool gets its pages ─▶ ready ─▶ SIGTERM or SIGINT ─▶ refuse new work, let what
runs end (bounded in time; a second signal ends the wait) ─▶ close ─▶ exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, cast

import uvloop

from lmcache_qprotocol.keys import FEATURE_SUFFIX
from lmcache_qprotocol.limits import MAX_BULK_BYTES, Limits
from lmcache_qserver import installed_version
from lmcache_qserver.config import Config, default_lifeline
from lmcache_qserver.copying import Crew, RingMemory
from lmcache_qserver.device.fork_server import ForkServer
from lmcache_qserver.device.processes import DeviceProcesses
from lmcache_qserver.events import EventBus
from lmcache_qserver.face import logs, ready_file, systemd
from lmcache_qserver.face.http import HttpFace
from lmcache_qserver.face.loop_lag import LoopLag
from lmcache_qserver.face.metrics import server_registry
from lmcache_qserver.face.status import ServerState
from lmcache_qserver.face.store_log import log_stores
from lmcache_qserver.log_fields import told
from lmcache_qserver.pool import Pool
from lmcache_qserver.pool.populating import Populating
from lmcache_qserver.qstore import QStoreModule
from lmcache_qserver.qstore.persist.persistence import Persistence, PersistSettings
from lmcache_qserver.tier.opening import TierOpening, prepare_url
from lmcache_qserver.wire.bulk_answers import BulkAnswers
from lmcache_qserver.wire.clients import Clients, Session
from lmcache_qserver.wire.counts import WireCounts
from lmcache_qserver.wire.dispatch import Dispatcher
from lmcache_qserver.wire.handlers import Handlers
from lmcache_qserver.wire.lifeline import LifelineServer
from lmcache_qserver.wire.main_loop import MainLoop

log = logging.getLogger(__name__)

FEATURES = tuple(FEATURE_SUFFIX)
LEASE_SCAN_S = 5.0
UPLOAD_SCAN_S = 1.0
CLIENT_SCAN_S = 30.0
OBJECT_SCAN_S = 5.0
MIN_REAP_SCAN_S = 0.05
BULK_OUTSTANDING_BYTES = 4 * MAX_BULK_BYTES
"""Of one client."""
BULK_HEADER_BYTES = 4096
"""More than all frames of a message beside its bulk frame have."""
OPEN_TIER_S = 5.0
"""How long the start waits for the persistent tier."""
CLOSE_S = 5.0
"""How long closing waits for lanes when all stores have ended."""
CUT_SHORT_CLOSE_S = 0.2
"""And when they have not: who has waited for the deadline, or not at all, waits no more for a copy that hangs."""


class StartError(Exception):
    """The daemon can't start; the message says why and what to do."""


class Daemon:
    """One server. Build it on the loop, `run` it once.

    Args:
        populating: the pool's memory, if it has been begun already.
        fork_server: starts the processes of devices; None: rings lie in host memory only.

    Raises:
        StartError: the pool can't be created.
    """

    def __init__(
        self,
        config: Config,
        populating: Populating | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._config = config
        with _start_error(f"the pool of {config.pool_bytes} bytes can't be created (--pool-bytes)"):
            self._populating = populating or Populating(config.pool_bytes)
        self._memory = self._populating.memory
        self._loop = asyncio.get_running_loop()
        self._clock = time.monotonic
        self._devices = DeviceProcesses(fork_server, config.device_kind, self._device_lost)
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._drained = True
        """No store is under way that somebody may be waiting for."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._build()

    def _build(self) -> None:
        config, clock = self._config, self._clock
        pool = Pool(self._memory, cast(Literal["lru", "none"], config.eviction))
        self._bus = EventBus()
        log_stores(self._bus)
        processors = len(os.sched_getaffinity(0))
        self._crew = Crew(min(config.copy_threads, processors) - 1, processors)
        self._module = QStoreModule(
            pool=pool,
            bus=self._bus,
            chunk_size=config.chunk_size,
            features=FEATURES,
            reap_timeout_s=config.reap_timeout_s,
            registration_grace_s=config.registration_grace_s,
            copy_timeout_s=config.copy_timeout_s,
            lease_timeout_s=config.lease_timeout_s,
            inline_checksums=config.checksum == "inline",
            upload_timeout_s=config.upload_timeout_s,
            persist=_persist_settings(config),
            ttl_s=config.ttl_s,
            clock=clock,
        )
        self._opening = TierOpening(config.l2_timeout_s, clock)
        self._counts = WireCounts()
        self._clients = Clients(self._client_gone, registered_idle_s=config.registration_grace_s)
        self._state = ServerState(
            boot_id=secrets.token_bytes(16),
            chunk_size=config.chunk_size,
            features=FEATURES,
            module=self._module,
            pool=pool,
            clients=self._clients,
            clock=clock,
            started=clock(),
            devices=self._devices.report,
        )
        self._lifeline = LifelineServer(
            self._loop,
            self._clients,
            self._counts,
            pool_fd=self._memory.fd,
            pool_bytes=self._memory.nbytes,
            take_memory=partial(RingMemory, crew=self._crew),
            allowed_uids=config.allow_uid,
            clock=clock,
        )
        self._main_loop = MainLoop(
            self._loop,
            lambda identity, frames: self._dispatcher.handle(identity, frames),
            self._counts,
            max_frame_bytes=2
            * config.max_message_bytes,  # up to the limit and a bit more there is an answer
            clock=clock,
        )
        registry, lag = server_registry(
            self._bus, self._state, self._counts, lambda: len(self._lifeline)
        )
        self._lag = LoopLag(self._loop, clock, lag.observe)
        self._bulk = BulkAnswers(
            self._loop, self._main_loop.send_bulk, cap_bytes=BULK_OUTSTANDING_BYTES
        )
        self._http = HttpFace(self._state, registry)

    async def run(self) -> None:
        """Serve until a signal comes.

        Raises:
            StartError: an address is in use, or the pool can't get its memory.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note_signal)
        try:
            self._module.start()
            await self._bind()
            self._lag.start()
            populating = asyncio.create_task(self._populate())
            await self._open_tier()
            self._every(LEASE_SCAN_S, self._expire_leases)
            self._every(UPLOAD_SCAN_S, self._expire_uploads)
            self._every(CLIENT_SCAN_S, self._expire_clients)
            self._every(OBJECT_SCAN_S, self._expire_objects)
            if self._config.reap_timeout_s > 0:
                self._every(max(self._config.reap_timeout_s / 4, MIN_REAP_SCAN_S), self._reap)
            stop = asyncio.create_task(self._stop_asked.wait())
            await asyncio.wait({populating, stop}, return_when=asyncio.FIRST_COMPLETED)
            if populating.done():
                populating.result()
                self._announce()
                await stop
            await self._drain()
            self._populating.stop()
            await asyncio.wait({populating})
        finally:
            await self._close()

    # --- starting -----------------------------------------------------------------------------------------------

    async def _bind(self) -> None:
        """Lifeline and HTTP first: a client that reaches the main socket finds all of it there."""
        config, state = self._config, self._state
        with _start_error(
            f"{config.http_host}:{config.http_port} can't be bound; set --http-host, --http-port"
        ):
            state.http_url = await self._http.open(config.http_host, config.http_port)
        with _start_error(
            f"{config.url} can't be bound; is another daemon running there? Set --url"
        ):
            state.url = self._main_loop.bind(config.zmq_endpoint)
        self._open_lifeline()
        limits = _limits(config)
        handlers = Handlers(
            self._module,
            self._clients,
            self._devices,
            boot_id=state.boot_id,
            features=FEATURES,
            chunk_size=config.chunk_size,
            limits=limits,
            bulk=self._bulk,
            lifeline=state.lifeline,
            clock=self._clock,
        )
        self._dispatcher = Dispatcher(
            handlers.table(),
            self._clients,
            self._counts,
            self._main_loop.send,
            self._bulk,
            boot_id=state.boot_id,
            limits=limits,
            clock=self._clock,
        )
        self._dispatcher.start()
        self._main_loop.start()
        state.bound = True
        log.info(
            "lmcache-qserver listens",
            extra=told(
                release=installed_version(),
                pid=os.getpid(),
                boot_id=state.boot_id.hex(),
                url=state.url,
                http_url=state.http_url,
                lifeline=state.lifeline,
            ),
        )

    def _open_lifeline(self) -> None:
        path = Path(self._config.lifeline or default_lifeline(self._state.url)).absolute()
        with _start_error("the lifeline can't be opened"):
            self._lifeline.open(path)
        self._state.lifeline = str(path)

    async def _open_tier(self) -> None:
        """Open the persistent tier; the daemon serves without one that does not answer, and goes on trying."""
        persistence = self._module.persistence
        if persistence is None:
            return
        with _start_error("the persistent tier can't be opened (--l2)"):
            url = prepare_url(self._config.l2)
        opening = asyncio.ensure_future(self._open_and_learn(url, persistence))
        self._tasks.add(opening)
        opening.add_done_callback(self._tasks.discard)
        await asyncio.wait({opening}, timeout=OPEN_TIER_S)
        if opening.done() and (error := opening.exception()) is not None:
            raise StartError(f"the persistent tier {url} can't be opened (--l2): {error}")

    async def _open_and_learn(self, url: str, persistence: Persistence) -> None:
        """Until the store is open, and readers find the models in it."""
        await self._opening.open(url, persistence.attach)
        await persistence.learnt()

    async def _populate(self) -> None:
        with _start_error(
            f"there is no memory for a pool of {self._memory.nbytes} bytes; lower --pool-bytes"
        ):
            await asyncio.wrap_future(self._populating.done)
        self._state.populated = True

    def _announce(self) -> None:
        state = self._state
        if reason := state.why_not_ready():
            raise StartError(f"not ready after the start: {reason}")
        # What has been built stays; a collector that looks through all of it again and again stops the loop for 20 ms.
        gc.collect()
        gc.freeze()
        if self._config.ready_file:
            content = {
                "pid": os.getpid(),
                "url": state.url,
                "http_url": state.http_url,
                "lifeline": state.lifeline,
                "boot_id": state.boot_id.hex(),
            }
            with _start_error("the ready file can't be written (--ready-file)"):
                ready_file.write(Path(self._config.ready_file), content)
        systemd.notify("READY=1")
        log.info("ready after %.2f s", self._clock() - state.started)

    # --- serving ------------------------------------------------------------------------------------------------

    def _client_gone(self, session: Session) -> None:
        self._spawn(self._module.client_gone(session, self._clock()))

    def _device_lost(self) -> None:
        self._spawn(self._release_lost())

    async def _release_lost(self) -> None:
        for instance_id in await self._module.release_lost():
            log.warning("instance %r has lost its device, and has been released", instance_id)

    async def _expire_leases(self) -> None:
        self._module.reads.expire_leases(self._clock())

    async def _expire_uploads(self) -> None:
        self._module.stores.expire_uploads(self._clock())

    async def _expire_objects(self) -> None:
        await self._module.expire_objects(self._clock())

    async def _expire_clients(self) -> None:
        self._clients.expire(self._clock())

    async def _reap(self) -> None:
        for instance_id in await self._module.reap_stale_instances(self._clock()):
            log.warning(
                "a worker was silent for too long and has been released",
                extra=told(instance=instance_id),
            )

    def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await work()
                except Exception:
                    log.exception("periodic work failed; it is tried again in %g s", seconds)

        self._spawn(repeat())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- stopping -----------------------------------------------------------------------------------------------

    def _note_signal(self) -> None:
        (self._stop_now if self._stop_asked.is_set() else self._stop_asked).set()

    async def _drain(self) -> None:
        self._state.stopping = True
        systemd.notify("STOPPING=1")
        log.info("stopping; stores that are under way have %g s", self._config.drain_timeout_s)
        if self._config.ready_file:
            ready_file.remove(Path(self._config.ready_file))
        self._lifeline.close_listener()
        self._dispatcher.refuse_new_work()
        ended = asyncio.create_task(self._end_work())
        again = asyncio.create_task(self._stop_now.wait())
        timeout_s = self._config.drain_timeout_s
        await asyncio.wait(
            {ended, again}, timeout=timeout_s + 1.0, return_when=asyncio.FIRST_COMPLETED
        )
        self._drained = ended.done() and ended.result()
        if not self._drained:
            log.warning("stopping before all stores have ended")
        for task in (ended, again):
            task.cancel()
        await asyncio.wait({ended, again})

    async def _end_work(self) -> bool:
        """Whether all has ended, and been answered."""
        drained = await self._module.drain(self._config.drain_timeout_s)
        await self._dispatcher.finish()
        return drained

    async def _close(self) -> None:
        """Answers go out before lifelines hang up: a client takes what is not answered by then as failed."""
        self._lag.stop()
        if self._state.bound:
            await self._dispatcher.stop()
        self._main_loop.close()
        self._bulk.close()
        self._lifeline.close()
        await self._http.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            timeout_s = CLOSE_S if self._drained else CUT_SHORT_CLOSE_S
            await asyncio.wait_for(self._module.close(), timeout_s)
        self._devices.close()
        self._crew.close()
        self._populating.stop()
        self._memory.close()


def _persist_settings(config: Config) -> PersistSettings | None:
    if config.l2 == "none":
        return None
    return PersistSettings(
        url=config.l2_url,
        timeout_s=config.l2_timeout_s,
        max_bytes=config.l2_max_bytes,
        ttl_s=config.ttl_s,
    )


def _limits(config: Config) -> Limits:
    """What `hello` announces."""
    if not config.allow_inline:
        return Limits(message_bytes=config.max_message_bytes)
    return Limits(
        message_bytes=config.max_message_bytes,
        bulk_bytes=min(MAX_BULK_BYTES, config.max_message_bytes) - BULK_HEADER_BYTES,
        bulk_outstanding_bytes=BULK_OUTSTANDING_BYTES,
        upload_ms=int(config.upload_timeout_s * 1000),
    )


@contextlib.contextmanager
def _start_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise StartError(f"{what}: {error.strerror or error}{where}") from None


def _allow_many_files() -> None:
    """Every lifeline takes a few descriptors, and the usual soft limit of 1024 is for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(
    config: Config, populating: Populating | None, fork_server: ForkServer | None
) -> None:
    await Daemon(config, populating, fork_server).run()


def run(
    config: Config,
    populating: Populating | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Run the daemon; the process's exit code. 0: stopped by a signal. 1: it could not start.

    Args:
        populating: the pool's memory, if it has been begun already.
        fork_server: as for `Daemon`.
    """
    logs.set_up(config.log_format, config.log_level)
    _allow_many_files()
    try:
        uvloop.run(_serve(config, populating, fork_server))
    except StartError as error:
        print(f"lmcache-qserver: {error}", file=sys.stderr)
        return 1
    return 0
