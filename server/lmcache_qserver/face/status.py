"""What /status says; its fields are in status_report.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from lmcache_qserver import installed_version
from lmcache_qserver.face.canary import Canary
from lmcache_qserver.pool import Pool
from lmcache_qserver.qstore import QStoreModule
from lmcache_qserver.status_report import STATUS_VERSION, DeviceReport, ServerReport, StatusReport
from lmcache_qserver.wire.clients import Clients


@dataclass
class ServerState:
    """The daemon as its face sees it.

    Attributes:
        url, http_url, lifeline: as bound.
        started: clock at the start.
        devices: processes of devices.
        populated: the pool has real pages.
        bound: all sockets listen.
        stopping: no new work is taken.
    """

    boot_id: bytes
    chunk_size: int
    features: tuple[str, ...]
    module: QStoreModule
    pool: Pool
    clients: Clients
    clock: Callable[[], float]
    started: float
    devices: Callable[[], list[DeviceReport]] = list
    url: str = ""
    http_url: str = ""
    lifeline: str = ""
    populated: bool = False
    bound: bool = False
    stopping: bool = False
    canary: Canary = field(default_factory=Canary)

    def why_not_ready(self) -> str:
        """Empty when ready, else what is missing."""
        if self.stopping:
            return "stopping"
        if not self.bound:
            return "sockets are not bound yet"
        if not self.populated:
            return "the pool's memory is not populated yet"
        return (
            ""
            if self.canary.sing(self.pool)
            else "the pool does not give back what was written to it"
        )

    def status(self) -> StatusReport:
        """The body of /status."""
        return StatusReport(
            version=STATUS_VERSION,
            server=self._server(),
            devices=self.devices(),
            **msgspec.structs.asdict(self.module.report()),
        )

    def _server(self) -> ServerReport:
        return ServerReport(
            release=installed_version(),
            boot_id=self.boot_id.hex(),
            pid=os.getpid(),
            uptime_s=round(self.clock() - self.started, 3),
            url=self.url,
            http_url=self.http_url,
            lifeline=self.lifeline,
            chunk_size=self.chunk_size,
            features=list(self.features),
            ready=not self.why_not_ready(),
            clients=len(self.clients),
            sessions=self.clients.sessions,
        )
