"""One socket: frames written straight into the transport, and a watch over the slow and the gone.

`websockets` does not save its user from slow readers: above the high-water mark its own keepalive
waits, and direct writes would grow one buffer without end. So whoever writes looks at `behind`
first, and `Watchdog`, one for all sockets, cuts those that take nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import ServerConnection
from websockets.protocol import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinyvllm.gateway.limits import Limits
    from tinyvllm.gateway.metrics import Metrics

logger = logging.getLogger("tinyvllm.gateway")

_SEND_BUFFER = 64 * 1024
"""SO_SNDBUF: a system default swallows megabytes before a slow reader is noticed."""
_MAX_BUFFERED = 16 * 1024 * 1024
"""Bytes in a transport: only answers to a flood of ping frames can make so many."""
_PING = b'{"type":"tinyvllm.ping"}'
_OPEN = State.OPEN
_FINAL_TEXT = 0x81
"""The first byte of a frame that is a whole text message."""


class Connection(ServerConnection):
    """A socket that knows when it is behind, and tells `on_writable` when it is not any more."""

    def __init__(
        self,
        *args: Any,
        registry: set[Connection],
        refuse_body: Callable[[Connection], bytes | None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._registry = registry
        self._refuse_body = refuse_body
        self._body_refused = False
        self.on_writable: Callable[[], None] | None = None
        self.is_working: Callable[[], bool] = lambda: True
        """Whether something runs on it, so that it is not idle; until there is a session, yes."""
        self.refusal: tuple[int, str] | None = None
        """Close code and reason for a client that may not stay, found in the handshake."""
        self.behind = False
        """The socket has more than it can pass on: text should wait and gather."""
        # For the watchdog.
        self.behind_since: float | None = None
        self.owed = 0
        self.owed_since = 0.0
        self.last_sent = self.last_event = self.loop.time()
        """Kept by the session: when the client last sent an event."""

    @property
    def label(self) -> dict[str, str]:
        """For log records: which socket."""
        return {"connection": str(self.id)[:8]}

    @property
    def is_open(self) -> bool:
        return self.protocol.state is _OPEN

    def write(self, messages: Sequence[bytes]) -> None:
        """Send text messages (UTF-8) now, a frame each, in one write. A socket that is not open
        drops them."""
        protocol = self.protocol
        if protocol.state is not _OPEN or self.transport.is_closing():
            return
        if protocol.extensions:
            for message in messages:
                protocol.send_text(message)
            self.transport.writelines(protocol.data_to_send())
        else:
            # A loop that is full moves 1.3 times as many frames as with the library's.
            self.transport.write(b"".join(map(text_frame, messages)))
        self.last_sent = self.loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._registry.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.paused and self.transport.get_write_buffer_size() > _MAX_BUFFERED:
            self.transport.abort()

    def send_data(self) -> None:
        # websockets refuses a request with a body before any hook, and would only hang up.
        if self.request is None and not self._body_refused:
            reply = self._refuse_body(self)
            if reply is not None:
                self._body_refused = True
                self.transport.write(reply)
        super().send_data()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.behind = True
        self.behind_since = self.owed_since = self.loop.time()
        self.owed = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.behind = False
        self.behind_since = None
        if self.on_writable is not None:
            # Not from here: the transport is in the middle of its own write.
            self.loop.call_soon(self.on_writable)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._registry.discard(self)
        self.behind = False
        self.behind_since = None


def text_frame(message: bytes) -> bytes:
    """A server's frame for a whole text message, without extensions: RFC 6455, section 5.2."""
    length = len(message)
    if length < 126:
        return struct.pack("!BB", _FINAL_TEXT, length) + message
    if length < 1 << 16:
        return struct.pack("!BBH", _FINAL_TEXT, 126, length) + message
    return struct.pack("!BBQ", _FINAL_TEXT, 127, length) + message


class Watchdog:
    """Looks at every socket several times in the shortest limit: the stalled are cut, those too
    far behind and the idle are closed, and the silent are pinged."""

    def __init__(self, connections: set[Connection], limits: Limits, metrics: Metrics) -> None:
        self._connections = connections
        self._limits = limits
        self._metrics = metrics
        self._closing: set[asyncio.Task[None]] = set()
        times = (
            limits.stall_seconds,
            limits.behind_seconds,
            limits.ping_seconds,
            limits.idle_seconds,
        )
        self._period = max(0.01, min(1.0, min(times) / 4))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            now = asyncio.get_running_loop().time()
            for connection in self._connections.copy():
                self._look_at(connection, now)

    def _look_at(self, connection: Connection, now: float) -> None:
        limits = self._limits
        if connection.behind_since is not None:
            owed = connection.transport.get_write_buffer_size()
            if owed < connection.owed:
                connection.owed, connection.owed_since = owed, now
            stalled = now - connection.owed_since > limits.stall_seconds
            behind = now - connection.behind_since
            if stalled or behind > 2 * limits.behind_seconds:
                self._metrics.count("connections_dropped_total", "stalled")
                logger.info("socket cut: the client does not read", extra=connection.label)
                connection.transport.abort()
            elif behind > limits.behind_seconds:
                # A code, although it may arrive late: the client reads, only too slowly.
                self._close(connection, 1013, "this client reads too slowly", "behind")
        elif connection.is_open:
            if now - connection.last_sent > limits.ping_seconds:
                connection.write([_PING])
            quiet = now - connection.last_event > limits.idle_seconds
            if quiet and not connection.is_working():
                self._close(connection, 1000, "idle", "idle")

    def _close(self, connection: Connection, code: int, reason: str, why: str) -> None:
        if not connection.is_open:
            return
        self._metrics.count("connections_dropped_total", why)
        connection.on_writable = None  # nothing more may come before the close frame
        task = asyncio.create_task(connection.close(code, reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
