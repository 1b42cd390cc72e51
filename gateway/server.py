"""The gateway's I/O: one `Gateway` serves one engine on one port.

    Gateway ── Session per socket ── lane per stream_id (FIFO) ── Response ── TokenStream

Pace. A frame leaves in the moment its token is read, straight into the socket. While the socket is
behind (`Connection.paused`), text waits as one string per response, and what was ten tokens becomes
one delta. A response with too much of it stops reading its TokenStream, so that the engine pauses
that request: memory is bounded and nobody else is touched. A socket that takes nothing for
`stall_seconds` is dropped.

Every queue: requests per connection (`max_requests`, then an error event), pending text per
response (`max_pending_chars`, then back-pressure), answers to bad events (`_MAX_OUTBOX`, then the
socket is not read). Client gone: all its requests are aborted at once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import socket
import time
from collections import deque
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, cast

from websockets.asyncio.server import Server, ServerConnection, broadcast, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response as HttpResponse

from tinyvllm import EngineDeadError, TinyvllmError
from tinyvllm.gateway import web
from tinyvllm.gateway.protocol import (
    CancelEvent,
    CreateEvent,
    Outcome,
    ProtocolError,
    ResponseEvents,
    error_of,
    parse_event,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from websockets.http11 import Request
    from websockets.server import ServerProtocol

    from tinyvllm import AsyncEngine, Token, TokenStream

logger = logging.getLogger("tinyvllm.gateway")

_MAX_OUTBOX = 64
"""Error events owed to a socket that is behind; more, and its events are not read."""
_SEND_BUFFER = 64 * 1024
"""SO_SNDBUF: a system default swallows megabytes before a slow reader is noticed."""
_LOGPROB_CHARS = 80
"""About what one log-probability entry takes as JSON."""
_REMEMBERED = 256
"""Ended responses that may still be cancelled without an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one connection."""

    max_active: int = 16
    """Responses that run at once; those of further lanes wait."""
    max_lanes: int = 32
    """Lanes with work in them."""
    max_requests: int = 48
    """Requests that were accepted and have not ended: active, behind others in their lane, or
    waiting for one of `max_active`."""
    max_message_bytes: int = 1024 * 1024
    max_pending_chars: int = 64 * 1024
    """Text of one response that waits for the socket."""
    stall_seconds: float = 30.0
    close_seconds: float = 2.0
    """`Gateway.aclose` waits this long for the clients' side of the closing handshake."""


class Gateway:
    """Serves `engine`, which must be started; closing the gateway does not close it.

        async with Gateway(engine, host="127.0.0.1", port=8765) as gateway:
            print(gateway.url)
            await gateway.wait_closed()

    `sock`, a bound socket, replaces host and port. `allowed_origins` are sites whose pages may
    connect besides our own. Raises OSError when it cannot listen.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        host: str = "127.0.0.1",
        port: int = 8765,
        sock: socket.socket | None = None,
        allowed_origins: Collection[str] = (),
        compression: Literal["deflate"] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits or Limits()
        self._host = host
        self._port = port
        self._sock = sock
        self._allowed_origins = frozenset(allowed_origins)
        self._loopback = web.is_loopback(host)
        self._compression: Literal["deflate"] | None = compression
        self._assets = web.load_assets()
        self._created = int(time.time())
        self._server: Server | None = None
        self._connections: set[Connection] = set()
        # Kept, since a dead engine refuses to tell.
        self._max_model_len = engine.max_model_len
        self.sampling_defaults: dict[str, float] = dict(engine.model_config.sampling_defaults)

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
            Connection, stall_seconds=limits.stall_seconds, registry=self._connections
        )
        self._server = await serve(
            self._handle,
            **where,
            process_request=self._process_request,
            compression=self._compression,
            max_size=limits.max_message_bytes,
            server_header="tinyvllm",
            create_connection=cast("type[ServerConnection]", new_connection),
        )

    async def aclose(self) -> None:
        """Stop accepting, close every socket with 1012 (service restart), abort their requests."""
        if self._server is None:
            return
        self._server.close(code=1012, reason="the server is shutting down")
        try:
            async with asyncio.timeout(self.limits.close_seconds):
                await self._server.wait_closed()
        except TimeoutError:
            self.abort()
            await self._server.wait_closed()

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
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    @property
    def num_connections(self) -> int:
        """Open sockets, WebSocket or plain HTTP."""
        return len(self._connections)

    async def _handle(self, connection: ServerConnection) -> None:
        assert isinstance(connection, Connection)
        await Session(self, connection).run()

    def _process_request(self, _: ServerConnection, request: Request) -> HttpResponse | None:
        reply = self._route(request)
        if reply is None:
            return None
        return _http(reply, head=request.method == "HEAD")

    def _route(self, request: Request) -> web.Reply | None:
        """The HTTP reply to a request, or None to go on with the WebSocket handshake."""
        path = request.path.partition("?")[0]
        upgrade = ", ".join(request.headers.get_all("Upgrade")).lower()
        if path == web.RESPONSES_PATH:
            if "websocket" not in upgrade:
                return web.upgrade_required()
            refusal = web.origin_error(
                _single(request.headers, "Origin"),
                _single(request.headers, "Host"),
                allowed=self._allowed_origins,
                loopback=self._loopback,
            )
            return refusal if refusal is None else web.error_reply(HTTPStatus.FORBIDDEN, refusal)
        if request.method not in ("GET", "HEAD"):
            return web.error_reply(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.method} is not served here",
                {"Allow": "GET, HEAD"},
            )
        if path in self._assets:
            return self._assets[path]
        if path == "/healthz":
            health = self.engine.health()
            status = HTTPStatus.OK if health.alive else HTTPStatus.SERVICE_UNAVAILABLE
            error = None if health.error is None else type(health.error).__name__
            return web.json_reply(
                status,
                {"alive": health.alive, "last_step_age": health.last_step_age, "error": error},
            )
        if path == "/v1/models":
            details = {
                "max_model_len": self._max_model_len,
                "sampling_defaults": self.sampling_defaults,
            }
            return web.models_reply(self.engine.model_name, self._created, details)
        return web.error_reply(HTTPStatus.NOT_FOUND, f"there is nothing at {path[:200]!r}")


class Connection(ServerConnection):
    """A socket that says when it is behind, and drops a reader that takes nothing."""

    def __init__(
        self, *args: Any, stall_seconds: float, registry: set[Connection], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._registry = registry
        self._stall_seconds = stall_seconds
        self._watchdog: asyncio.TimerHandle | None = None
        self._owed = 0
        self._refused_body = False
        self.writable = asyncio.Event()
        self.writable.set()
        self.session: Session | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._registry.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def send_data(self) -> None:
        # websockets refuses a request with a body before any hook, and would only hang up.
        if not self._refused_body and self.request is None and _has_body(self.protocol):
            self._refused_body = True
            self.transport.write(_http(web.body_refused()).serialize())
        super().send_data()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writable.clear()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._released()
        if self.session is not None:
            # Not from here: the transport is in the middle of its own write.
            self.loop.call_soon(self.session.catch_up)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._registry.discard(self)
        self._released()

    def _released(self) -> None:
        self.writable.set()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def _watch(self) -> None:
        self._owed = self.transport.get_write_buffer_size()
        self._watchdog = self.loop.call_later(self._stall_seconds, self._check_progress)

    def _check_progress(self) -> None:
        if self.transport.get_write_buffer_size() < self._owed:
            self._watch()
        else:
            logger.info("dropped %s: it took nothing for %g s", self.id, self._stall_seconds)
            self.transport.abort()


class Session:
    """One connection's lanes and responses. All of it runs on the connection's loop."""

    def __init__(self, gateway: Gateway, connection: Connection) -> None:
        self.gateway = gateway
        self.connection = connection
        self._lanes: dict[str | None, deque[Response]] = {}
        self._lane_tasks: set[asyncio.Task[None]] = set()
        self._responses: dict[str, Response] = {}  # running; least recently written first
        self._active = asyncio.Semaphore(gateway.limits.max_active)
        self._num_requests = 0
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._outbox: deque[bytes] = deque()

    @property
    def behind(self) -> bool:
        """The socket has more than it can pass on: text should wait and gather."""
        return not self.connection.writable.is_set()

    async def run(self) -> None:
        """Serve the connection until it closes; returns when nothing of it is left."""
        self.connection.session = self
        try:
            while True:
                self._receive(await self.connection.recv())
                while len(self._outbox) >= _MAX_OUTBOX and self.behind:
                    await self.connection.writable.wait()
        except ConnectionClosed:
            pass
        finally:
            self.connection.session = None
            for response in self._responses.values():
                response.abort()
            for task in self._lane_tasks:
                task.cancel()
            if self._lane_tasks:
                await asyncio.wait(self._lane_tasks)

    def _receive(self, message: str | bytes) -> None:
        """Obey one message. Nothing in here waits, so no close can come between its parts."""
        try:
            event = parse_event(message, model=self.gateway.engine.model_name)
            if isinstance(event, CreateEvent):
                self._create(event)
            else:
                self._cancel(event)
        except ProtocolError as error:
            self.tell(error)

    def _create(self, event: CreateEvent) -> None:
        limits = self.gateway.limits
        lane = self._lanes.get(event.stream_id)
        if lane is None and len(self._lanes) >= limits.max_lanes:
            raise ProtocolError(
                f"this connection already has {limits.max_lanes} lanes with work in them",
                code="websocket_stream_limit_reached",
                status=429,
                param="stream_id",
                stream_id=event.stream_id,
            )
        if self._num_requests >= limits.max_requests:
            raise ProtocolError(
                f"this connection already has {limits.max_requests} requests running or waiting",
                code="rate_limit_exceeded",
                status=429,
                stream_id=event.stream_id,
            )
        response = Response(self, event)
        self._num_requests += 1
        if lane is not None:
            lane.append(response)
            return
        lane = self._lanes[event.stream_id] = deque([response])
        task = asyncio.create_task(self._run_lane(event.stream_id, lane))
        self._lane_tasks.add(task)
        task.add_done_callback(self._lane_tasks.discard)

    async def _run_lane(self, stream_id: str | None, lane: deque[Response]) -> None:
        while lane:
            async with self._active:
                response = lane.popleft()
                self._responses[response.id] = response
                try:
                    await response.run()
                finally:
                    del self._responses[response.id]
                    self._num_requests -= 1
                    self._ended.append(response.id)
        del self._lanes[stream_id]

    def _cancel(self, event: CancelEvent) -> None:
        if event.response_id is None:
            # All of the lane: those that wait, and the one that runs.
            for response in self._lanes.get(event.stream_id, ()):
                response.cancel()
            for response in self._responses.values():
                if response.stream_id == event.stream_id:
                    response.cancel()
        elif event.response_id in self._responses:
            self._responses[event.response_id].cancel()
        elif event.response_id not in self._ended:
            raise ProtocolError(
                f"no response {event.response_id!r} on this connection",
                code="response_not_found",
                status=404,
                param="response_id",
                stream_id=event.stream_id,
            )

    def tell(self, error: ProtocolError) -> None:
        """Send an error event, as soon as the socket takes it."""
        if self.behind:
            self._outbox.append(error.event())
        else:
            self.send([error.event()])

    def send(self, frames: list[bytes]) -> None:
        """Write now. Callers look at `behind` first; a closed socket takes and drops it."""
        for frame in frames:
            broadcast((self.connection,), frame, text=True)

    def update(self, response: Response) -> None:
        """Bring the client up to date about a response, unless the socket is behind."""
        if not self.behind:
            self.send(response.take_frames())

    def catch_up(self) -> None:
        """The socket takes data again: send what gathered, those that waited longest first."""
        while self._outbox and not self.behind:
            self.send([self._outbox.popleft()])
        for response in list(self._responses.values()):
            if self.behind:
                return
            frames = response.take_frames()
            if frames:
                self._responses[response.id] = self._responses.pop(response.id)
                self.send(frames)


class Response:
    """One request, from its turn in the lane to its terminal event."""

    def __init__(self, session: Session, event: CreateEvent) -> None:
        gateway = session.gateway
        self.id = "resp_" + secrets.token_hex(16)
        self.stream_id = event.stream_id
        self._session = session
        self._engine = gateway.engine
        self._event = event
        self._events = ResponseEvents(
            response_id=self.id,
            request=event,
            model=gateway.engine.model_name,
            created_at=int(time.time()),
            defaults=gateway.sampling_defaults,
        )
        self._stream: TokenStream | None = None
        self._cancelled = False
        # What the client has not been told yet: see take_frames.
        self._announced = False
        self._pending: list[str] = []
        self._pending_size = 0
        self._pending_logprobs: list[dict[str, Any]] = []
        self._outcome: Outcome | None = None
        self._told = asyncio.Event()
        self._finish_reason: str | None = None  # of the last token that was read

    def cancel(self) -> None:
        """The client wants no more: ends as incomplete, "cancelled". Idempotent."""
        self._cancelled = True
        self.abort()

    def abort(self) -> None:
        """Stop the engine's work for it."""
        if self._stream is not None:
            self._stream.abort()

    async def run(self) -> None:
        """Generate and send. Returns when the client was told of the end."""
        try:
            if not self._cancelled:
                event = self._event
                self._stream = self._engine.chat(
                    list(event.messages),
                    priority=event.priority,
                    request_id=self.id,
                    **event.sampling,
                )
        except Exception as exc:
            self._session.tell(self._error_of(exc))
            return
        self._session.update(self)  # created, in_progress
        try:
            if self._stream is not None:
                await self._read(self._stream)
            self._outcome = self._ended()
        except Exception as exc:
            error = self._error_of(exc)
            self._outcome = self._outcome_of("failed", code=error.code, message=error.message)
        self._session.update(self)
        await self._told.wait()

    async def _read(self, stream: TokenStream) -> None:
        session, limit = self._session, self._session.gateway.limits.max_pending_chars
        want_logprobs = self._event.top_logprobs is not None
        async with stream:
            async for token in stream:
                self._finish_reason = token.finish_reason
                if want_logprobs:
                    entry = self._logprob(token)
                    self._pending_logprobs.append(entry)
                    self._pending_size += _LOGPROB_CHARS * (1 + len(entry["top_logprobs"]))
                if token:
                    self._pending.append(token)
                    self._pending_size += len(token)
                    if not session.behind:
                        session.send(self.take_frames())
                while self._pending_size >= limit and session.behind:
                    await session.connection.writable.wait()
                    session.update(self)

    def take_frames(self) -> list[bytes]:
        """Everything the client has not been told of, in as few frames as that takes."""
        frames: list[bytes] = []
        if not self._announced:
            self._announced = True
            frames = self._events.created()
        if self._pending:
            # Log-probabilities of tokens without text of their own go with the text they belong to.
            text, logprobs = "".join(self._pending), self._pending_logprobs
            self._pending, self._pending_logprobs, self._pending_size = [], [], 0
            frames += self._events.delta(text, logprobs)
        if self._outcome is not None and not self._told.is_set():
            self._told.set()
            frames += self._events.finished(self._outcome)
        return frames

    def _ended(self) -> Outcome:
        """What became of a stream that was read to its end."""
        reason = self._finish_reason
        if reason == "stop":
            return self._outcome_of("completed")
        if reason == "length":
            return self._outcome_of("incomplete", reason="max_output_tokens")
        if self._cancelled:
            return self._outcome_of("incomplete", reason="cancelled")
        message = "the engine ended this response early"
        return self._outcome_of("failed", code="server_error", message=message)

    def _outcome_of(
        self,
        status: Literal["completed", "incomplete", "failed"],
        *,
        reason: Literal["max_output_tokens", "cancelled"] | None = None,
        code: str | None = None,
        message: str | None = None,
    ) -> Outcome:
        usage = None if self._stream is None else self._stream.usage
        return Outcome(
            status=status,
            num_prompt_tokens=0 if usage is None else usage.prompt_tokens,
            num_cached_tokens=0 if usage is None else usage.cached_tokens,
            num_output_tokens=0 if usage is None else usage.completion_tokens,
            reason=reason,
            code=code,
            message=message,
        )

    def _error_of(self, exc: Exception) -> ProtocolError:
        if not isinstance(exc, TinyvllmError) or isinstance(exc, EngineDeadError):
            logger.error("response %s failed", self.id, exc_info=exc)
        return error_of(exc, stream_id=self.stream_id)

    def _logprob(self, token: Token) -> dict[str, Any]:
        """OpenAI's entry for one token: text, UTF-8 bytes, log-probability; and the likeliest."""
        top = [
            _logprob_entry(self._engine.tokenizer.decode([token_id], skip_special_tokens=False), p)
            for token_id, p in (token.top_logprobs or {}).items()
        ]
        text = self._engine.tokenizer.decode([token.id], skip_special_tokens=False)
        return {**_logprob_entry(text, token.logprob or 0.0), "top_logprobs": top}


def _logprob_entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}


def _http(reply: web.Reply, *, head: bool = False) -> HttpResponse:
    body = b"" if head else reply.body
    return HttpResponse(reply.status.value, reply.status.phrase, Headers(reply.headers), body)


def _has_body(protocol: ServerProtocol) -> bool:
    """Whether the handshake failed because the request has a body, by length or in chunks."""
    cause = None if protocol.handshake_exc is None else protocol.handshake_exc.__cause__
    return isinstance(cause, NotImplementedError) or str(cause) == "unsupported request body"


def _single(headers: Headers, name: str) -> str | None:
    """A header's value; of several (never sent by browsers) one that matches nothing."""
    values = headers.get_all(name)
    return ", ".join(values) if values else None
