"""HTTP, for reading only: probes, /status, /metrics. It runs on the daemon's loop and answers from memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from lmcache_qserver import installed_version
from lmcache_qserver.face.http_guard import HEAD_S, IDLE_S, HttpGuard
from lmcache_qserver.face.status import ServerState

PAGE = """lmcache-qserver {version}

/status   what the server holds and who is connected (JSON)
/metrics  the same for Prometheus
/livez    200 while the process serves
/readyz   200 when stores and retrieves can be served (also /health)
/version  the release
"""

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFace:
    """The HTTP server.

    Args:
        registry: what /metrics shows.
        head_s, idle_s: see http_guard.py.
    """

    def __init__(
        self,
        state: ServerState,
        registry: CollectorRegistry,
        *,
        head_s: float = HEAD_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._state = state
        self._registry = registry
        self._head_s = head_s
        self._idle_s = idle_s
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    async def open(self, host: str, port: int) -> str:
        """Listen; the url with its real port.

        Raises:
            OSError: the port is in use, or the host is not ours.
        """
        loop = asyncio.get_running_loop()
        guard = HttpGuard(loop, head_s=self._head_s, idle_s=self._idle_s)
        server_logger.addFilter(_is_our_fault)
        self._runner = web.AppRunner(
            self._application(guard),
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
            keepalive_timeout=self._idle_s,
        )
        await self._runner.setup()
        serve = self._runner.server
        assert serve is not None, "setup makes it"
        self._listener = await loop.create_server(lambda: guard.wrap(serve()), host, port)
        bound_port = self._listener.sockets[0].getsockname()[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"

    async def close(self) -> None:
        """Stop listening, after at most a second for answers under way. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _application(self, guard: HttpGuard) -> web.Application:
        @web.middleware
        async def watched(request: web.Request, handler: Handle) -> web.StreamResponse:
            transport = request.transport
            guard.serving(transport)
            try:
                return await handler(request)
            finally:
                guard.served(transport)

        app = web.Application(middlewares=[watched], client_max_size=1024)
        routes: dict[str, Callable[[web.Request], web.Response]] = {
            "/": self._page,
            "/livez": lambda _: web.Response(text="ok\n"),
            "/readyz": self._ready,
            "/health": self._ready,
            "/status": self._status,
            "/metrics": self._metrics,
            "/version": lambda _: _json({"version": installed_version()}),
        }
        for path, answer in routes.items():
            app.router.add_get(path, _handler(answer))
        return app

    def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=PAGE.format(version=installed_version()))

    def _ready(self, _: web.Request) -> web.Response:
        reason = self._state.why_not_ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    def _status(self, _: web.Request) -> web.Response:
        return _json(self._state.status())

    def _metrics(self, request: web.Request) -> web.Response:
        """As OpenMetrics to who asks for it, else in Prometheus' own text form."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Whether a record is worth a log line: aiohttp writes a traceback for whatever garbage is sent to the port."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _json(content: object) -> web.Response:
    body = msgspec.json.encode(content) + b"\n"
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _handler(answer: Callable[[web.Request], web.Response]) -> Handle:
    async def handle(request: web.Request) -> web.StreamResponse:
        return answer(request)

    return handle
