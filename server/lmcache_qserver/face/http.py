"""HTTP, for reading only: probes, /status, /metrics. It runs on the daemon's loop and answers from memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from lmcache_qserver import installed_version
from lmcache_qserver.face.status import ServerState

PAGE = """lmcache-qserver {version}

/status   what the server holds and who is connected (JSON)
/metrics  the same for Prometheus
/livez    200 while the process serves
/readyz   200 when stores and retrieves can be served (also /health)
/version  the release
"""


class HttpFace:
    """The HTTP server.

    Args:
        registry: what /metrics shows.
    """

    def __init__(self, state: ServerState, registry: CollectorRegistry) -> None:
        self._state = state
        self._registry = registry
        self._runner: web.AppRunner | None = None

    async def open(self, host: str, port: int) -> str:
        """Listen; the url with its real port.

        Raises:
            OSError: the port is in use, or the host is not ours.
        """
        app = web.Application(client_max_size=1024)
        routes: dict[str, Callable[[], web.Response]] = {
            "/": self._page,
            "/livez": lambda: web.Response(text="ok\n"),
            "/readyz": self._ready,
            "/health": self._ready,
            "/status": self._status,
            "/metrics": self._metrics,
            "/version": lambda: _json({"version": installed_version()}),
        }
        for path, answer in routes.items():
            app.router.add_get(path, _handler(answer))
        server_logger.addFilter(_is_our_fault)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound_port = self._runner.addresses[0][1]
        return f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"

    async def close(self) -> None:
        """Stop listening, after at most a second for answers under way. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _page(self) -> web.Response:
        return web.Response(text=PAGE.format(version=installed_version()))

    def _ready(self) -> web.Response:
        reason = self._state.why_not_ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    def _status(self) -> web.Response:
        return _json(self._state.status())

    def _metrics(self) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether a record is worth a log line: aiohttp writes a traceback for whatever garbage is sent to the port."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _json(content: object) -> web.Response:
    return web.Response(text=json.dumps(content) + "\n", content_type="application/json")


def _handler(
    answer: Callable[[], web.Response],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(_: web.Request) -> web.StreamResponse:
        return answer()

    return handle
