"""A TCP proxy that treats its connections badly, each in the way that the test asks for."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to one connection, in the direction from server to client."""

    delay: float = 0.0
    """Seconds that each piece is held back."""
    bytes_per_second: float | None = None
    max_piece: int | None = None
    """Writes are split, at random, into pieces of at most so many bytes."""
    reset_after: int | None = None
    """RST to both sides after so many bytes."""
    silent_after: int | None = None
    """Half-open: after so many bytes nothing passes any more, and nobody is told."""
    stall_after: int | None = None
    """After so many bytes the proxy does not read the server any more."""


class ChaosProxy:
    """Forwards to a port of this machine; `faults_of(n)` says how the n-th connection fares."""

    def __init__(self, port: int, faults_of: Callable[[int], Faults], seed: int = 0) -> None:
        self._target = port
        self._faults_of = faults_of
        self._random = random.Random(seed)
        self._num_accepted = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> ChaosProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=4096)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        faults = self._faults_of(self._num_accepted)
        self._num_accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream_reader, upstream = await asyncio.open_connection(
            "127.0.0.1", self._target, limit=4096
        )
        for end in (writer, upstream):
            sock = end.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        up = asyncio.create_task(self._forward(reader, upstream))
        try:
            await self._forward_badly(upstream_reader, writer, faults)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            up.cancel()
            await asyncio.wait({up})
            for end in (writer, upstream):
                end.transport.abort()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.transport.abort()

    async def _forward_badly(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults
    ) -> None:
        num_bytes = 0
        async for piece in self._pieces(reader, faults.max_piece):
            if faults.delay:
                await asyncio.sleep(faults.delay)
            if faults.bytes_per_second is not None:
                await asyncio.sleep(len(piece) / faults.bytes_per_second)
            num_bytes += len(piece)
            if _passed(num_bytes, faults.reset_after):
                # Closing with a linger time of zero sends RST.
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            if _passed(num_bytes, faults.stall_after):
                await asyncio.Event().wait()
            if not _passed(num_bytes, faults.silent_after):
                writer.write(piece)
                await writer.drain()

    async def _pieces(
        self, reader: asyncio.StreamReader, max_piece: int | None
    ) -> AsyncIterator[bytes]:
        while data := await reader.read(4096):
            while data:
                size = len(data) if max_piece is None else self._random.randint(1, max_piece)
                yield data[:size]
                data = data[size:]


def _passed(num_bytes: int, bound: int | None) -> bool:
    return bound is not None and num_bytes >= bound
