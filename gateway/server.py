"""The gateway: one `Gateway` serves one engine on one port.

    Gateway ── Connection per socket ── Session ── lane per stream_id (FIFO) ─┐
       │                                                        watches       │
       └── Responses ── Response ── TokenStream                 ◄─────────────┘

It takes sockets, answers plain HTTP, decides who may connect, and ends: `drain` refuses new work,
lets what runs finish and tells every client; `aclose` closes; `abort` cuts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Response as HttpResponse

from tinyvllm import EngineError, __version__
from tinyvllm.gateway import json_text, web
from tinyvllm.gateway.auth import Auth, choose_subprotocol
from tinyvllm.gateway.connection import Connection, Watchdog
from tinyvllm.gateway.limits import Limits
from tinyvllm.gateway.metrics import CONTENT_TYPE, Metrics, render_gauges
from tinyvllm.gateway.response import Responses, not_found
from tinyvllm.gateway.session import Session
from tinyvllm.gateway.stats import Stats

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Collection, Sequence

    from websockets.http11 import Request
    from websockets.server import ServerProtocol
    from websockets.typing import Subprotocol

    from tinyvllm import AsyncEngine

__all__ = ["Gateway", "Limits"]

logger = logging.getLogger("tinyvllm.gateway")

_RESPONSE_PATH = re.compile(re.escape(web.RESPONSES_PATH) + r"/(resp_[0-9a-f]{1,64})(/cancel)?")
_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login", "/logout"})
"""Served without the token, beside the page's files."""
_RETRY_AFTER = {"Retry-After": "5"}


class Gateway:
    """Serves `engine`, which must be started; closing the gateway does not close it.

        async with Gateway(engine, host="127.0.0.1", port=8765) as gateway:
            print(gateway.url)
            await gateway.wait_closed()

    `sock`, a bound socket, replaces host and port. `token` is what clients must show. Pages of
    `allowed_origins` may connect besides our own. Raises OSError when it cannot listen.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        host: str = "127.0.0.1",
        port: int = 8765,
        sock: socket.socket | None = None,
        token: str | None = None,
        allowed_origins: Collection[str] = (),
        compression: Literal["deflate"] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.responses = Responses(engine, self.limits, self.metrics)
        self.stats = Stats(engine, self.responses, lambda: self.num_connections)
        self._host = host
        self._port = port
        self._sock = sock
        self._auth = Auth(token)
        self._allowed_origins = frozenset(allowed_origins)
        self._loopback = web.is_loopback(host)
        self._compression: Literal["deflate"] | None = compression
        self._ssl = ssl_context
        self._assets = web.load_assets()
        self._created = int(time.time())
        self._started_at = time.monotonic()
        self._server: Server | None = None
        self._connections: set[Connection] = set()
        self._sessions: set[Session] = set()
        self._watchdog: asyncio.Task[None] | None = None
        # Kept, since a dead engine refuses to tell.
        self._max_model_len = engine.max_model_len

    # --- Life cycle -----------------------------------------------------------------------------

    async def __aenter__(self) -> Gateway:
        if self._server is None:
            await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Listen. Returns when connections are accepted."""
        where: dict[str, Any] = (
            {"host": self._host, "port": self._port} if self._sock is None else {"sock": self._sock}
        )
        limits = self.limits
        new_connection = functools.partial(
            Connection, registry=self._connections, refuse_body=_refuse_body
        )
        self._server = await serve(
            self._handle,
            **where,
            process_request=self._process_request,
            select_subprotocol=_select_subprotocol,
            compression=self._compression,
            max_size=limits.max_message_bytes,
            open_timeout=limits.handshake_seconds,
            ping_interval=limits.ping_seconds,
            ping_timeout=limits.pong_seconds,
            close_timeout=limits.close_seconds,
            ssl=self._ssl,
            server_header="tinyvllm",
            logger=_websockets_logger(),
            create_connection=cast("type[ServerConnection]", new_connection),
        )
        watchdog = Watchdog(self._connections, limits, self.metrics)
        self._watchdog = asyncio.create_task(watchdog.run())

    async def drain(self, seconds: float) -> None:
        """Refuse new work and tell every client; return when all that runs has ended, and the
        clients know, or after `seconds`: then what still runs ends as failed. Call `aclose` after.
        """
        if self.responses.draining:
            return
        self.responses.draining = True
        logger.info("draining", extra={"seconds": seconds, "responses": len(self.responses.live)})
        notice = json_text.dumps({"type": "tinyvllm.draining", "seconds": seconds})
        closing = []
        for session in self._sessions.copy():
            session.tell(notice)
            if not session.is_answering:
                closing.append(asyncio.create_task(session.close_for_restart()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet()
        for response in list(self.responses.live.values()):
            response.shut_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.close_seconds):
                await self._quiet()
        for task in closing:
            task.cancel()

    async def _quiet(self) -> None:
        """Wait until nothing runs, and every client was told the end of what it watches. Once in a
        life: looked at, rather than announced by everything that may end it."""
        while self.responses.live or any(s.is_answering for s in self._sessions):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def aclose(self) -> None:
        """Stop accepting, end what runs, close every socket with 1012 (service restart)."""
        if self._server is None:
            return
        self.responses.draining = True
        await self.responses.aclose()
        self._server.close(code=1012, reason="the server is restarting")
        try:
            async with asyncio.timeout(self.limits.close_seconds):
                await self._server.wait_closed()
        except TimeoutError:
            self.abort()
            await self._server.wait_closed()
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.wait({self._watchdog})

    def abort(self) -> None:
        """Cut every socket now, without a closing handshake; `aclose` then returns at once."""
        for connection in self._connections.copy():
            connection.transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the gateway has been closed."""
        if self._server is not None:
            await self._server.wait_closed()

    @property
    def port(self) -> int:
        """The port that is listened on: useful when 0 was asked for."""
        if self._server is None:
            raise RuntimeError("the gateway is not started")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where the chat page is."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self._host, self._host)
        scheme = "http" if self._ssl is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/"

    @property
    def num_connections(self) -> int:
        """Open sockets, WebSocket or plain HTTP."""
        return len(self._connections)

    # --- WebSocket ------------------------------------------------------------------------------

    async def _handle(self, connection: ServerConnection) -> None:
        assert isinstance(connection, Connection)
        if connection.refusal is not None:
            await connection.close(*connection.refusal)
            return
        self.metrics.count("connections_total")
        logger.info("socket open", extra=connection.label)
        session = Session(connection, self.responses, self.stats, self.limits, self.metrics)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            logger.info("socket closed", extra={**connection.label, "code": connection.close_code})

    def _admit(self, connection: Connection, request: Request) -> web.Reply | None:
        """The reply that refuses a WebSocket handshake; None lets it go on."""
        headers = request.headers
        origin = _single(headers, "Origin")
        refusal = web.origin_error(
            origin,
            _single(headers, "Host"),
            allowed=self._allowed_origins,
            loopback=self._loopback,
        )
        if refusal is not None:
            self.metrics.count("connections_refused_total", "origin")
            return web.error_reply(HTTPStatus.FORBIDDEN, refusal)
        if not self._may(headers):
            self.metrics.count("connections_refused_total", "unauthorized")
            if origin is None:
                return web.unauthorized()
            # A page sees no status of a failed handshake, only close codes.
            connection.refusal = (1008, "unauthorized")
            return None
        if self.responses.draining:
            self.metrics.count("connections_refused_total", "draining")
            return web.error_reply(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the server is shutting down",
                _RETRY_AFTER,
                code="server_shutting_down",
            )
        if self.num_connections > self.limits.max_connections:
            self.metrics.count("connections_refused_total", "limit")
            return web.error_reply(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"this server already has {self.limits.max_connections} connections",
                _RETRY_AFTER,
                code="websocket_connection_limit_reached",
            )
        return None

    def _may(self, headers: Headers) -> bool:
        return self._auth.allows(
            authorization=_single(headers, "Authorization"),
            subprotocols=_single(headers, "Sec-WebSocket-Protocol"),
            cookie=_single(headers, "Cookie"),
        )

    # --- HTTP -----------------------------------------------------------------------------------

    def _process_request(
        self, connection: ServerConnection, request: Request
    ) -> HttpResponse | None:
        assert isinstance(connection, Connection)
        path = request.path.partition("?")[0]
        upgrade = ", ".join(request.headers.get_all("Upgrade")).lower()
        if path == web.RESPONSES_PATH and "websocket" in upgrade:
            reply = self._admit(connection, request)
            return None if reply is None else _http(reply)
        return _http(self._route(request, path), head=request.method == "HEAD")

    def _route(self, request: Request, path: str) -> web.Reply:
        method = request.method
        if method not in ("GET", "HEAD", "POST"):
            return _not_allowed(method, "GET, HEAD, POST")
        if path in self._assets:
            return self._assets[path] if method != "POST" else _not_allowed(method, "GET, HEAD")
        if path not in _OPEN_PATHS and not self._may(request.headers):
            return web.unauthorized()
        if method == "POST":
            return self._post(request, path)
        if path == web.RESPONSES_PATH:
            return web.upgrade_required()
        if path == "/healthz":
            return self._healthz()
        if path == "/readyz":
            return self._readyz()
        if path == "/metrics":
            return web.text_reply(self.metrics_text(), CONTENT_TYPE)
        if path == "/v1/models":
            return self._models()
        if (match := _RESPONSE_PATH.fullmatch(path)) and not match[2]:
            return self._response(match[1])
        return _not_found(path)

    def _post(self, request: Request, path: str) -> web.Reply:
        if path == "/login":
            if not self._auth.allows_bearer(_single(request.headers, "Authorization")):
                return web.unauthorized()
            secure = self._ssl is not None
            return web.empty_reply({"Set-Cookie": self._auth.cookie_header(secure=secure)})
        if path == "/logout":
            return web.empty_reply({"Set-Cookie": self._auth.clear_cookie_header()})
        if (match := _RESPONSE_PATH.fullmatch(path)) and match[2]:
            return self._response(match[1], cancel=True)
        if path in _OPEN_PATHS or path in ("/metrics", "/v1/models", web.RESPONSES_PATH):
            return _not_allowed("POST", "GET, HEAD")
        return _not_found(path)

    def _healthz(self) -> web.Reply:
        """The process: it answers, so it is alive."""
        uptime = round(time.monotonic() - self._started_at, 3)
        return web.json_reply(
            HTTPStatus.OK, {"alive": True, "version": __version__, "uptime_seconds": uptime}
        )

    def _readyz(self) -> web.Reply:
        """The engine: whether new requests should come here."""
        health, draining = self.engine.health(), self.responses.draining
        ready = health.alive and not draining
        return web.json_reply(
            HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE,
            {
                "ready": ready,
                "draining": draining,
                "engine_alive": health.alive,
                "last_step_age": health.last_step_age,
                "error": None if health.error is None else type(health.error).__name__,
            },
        )

    def _models(self) -> web.Reply:
        details = {
            "max_model_len": self._max_model_len,
            "sampling_defaults": self.responses.sampling_defaults,
            "resume_seconds": self.limits.resume_seconds,
            "max_num_seqs": self.engine.stats().max_num_seqs,
            "block_size": self.engine.config.block_size,
        }
        return web.models_reply(self.engine.model_name, self._created, details)

    def _response(self, response_id: str, *, cancel: bool = False) -> web.Reply:
        response = self.responses.find(response_id)
        if response is None:
            return web.protocol_error_reply(not_found(response_id))
        if cancel:
            response.cancel()
        return web.json_reply(HTTPStatus.OK, response.transcript.response())

    def metrics_text(self) -> str:
        """Prometheus text: the engine's metrics, then the gateway's."""
        live = self.responses.live.values()
        gauges = {
            "connections": self.num_connections,
            "responses": len(live),
            "viewers": sum(response.num_viewers for response in live),
            "draining": int(self.responses.draining),
        }
        return self._engine_metrics() + self.metrics.render(gauges)

    def _engine_metrics(self) -> str:
        tell = getattr(self.engine, "metrics_text", None)
        try:
            if tell is not None:
                text: str = tell()
                return text if text.endswith("\n") else text + "\n"
            stats = dataclasses.asdict(self.engine.stats())
        except EngineError:
            return ""
        numbers = {name: value for name, value in stats.items() if isinstance(value, int | float)}
        return render_gauges("tinyvllm_engine_", numbers)


def _select_subprotocol(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return cast("Subprotocol | None", choose_subprotocol(offered))


def _http(reply: web.Reply, *, head: bool = False) -> HttpResponse:
    body = b"" if head else reply.body
    return HttpResponse(reply.status.value, reply.status.phrase, Headers(reply.headers), body)


def _not_found(path: str) -> web.Reply:
    return web.error_reply(HTTPStatus.NOT_FOUND, f"there is nothing at {path[:200]!r}")


def _not_allowed(method: str, allowed: str) -> web.Reply:
    return web.error_reply(
        HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not served here", {"Allow": allowed}
    )


def _refuse_body(connection: Connection) -> bytes | None:
    """The reply to a request with a body, by length or in chunks, which websockets refuses."""
    protocol: ServerProtocol = connection.protocol
    cause = None if protocol.handshake_exc is None else protocol.handshake_exc.__cause__
    if isinstance(cause, NotImplementedError) or str(cause) == "unsupported request body":
        return _http(web.body_refused()).serialize()
    return None


def _websockets_logger() -> logging.Logger:
    """For the library's own records. At DEBUG it would write every frame, with what people say."""
    library = logging.getLogger("tinyvllm.gateway.websockets")
    library.setLevel(logging.WARNING)
    library.addFilter(_without_scanners)
    return library


def _without_scanners(record: logging.LogRecord) -> bool:
    """Whatever opens a port and is no HTTP client is no error of ours."""
    return record.getMessage() != "opening handshake failed"


def _single(headers: Headers, name: str) -> str | None:
    """A header's value; of several (never sent by browsers) one that matches nothing."""
    values = headers.get_all(name)
    return ", ".join(values) if values else None
