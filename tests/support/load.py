"""Load for the gateway: a scripted engine in one process, many clients in another.

    python load.py serve [RATE] [TOKENS]      the gateway's command with a scripted engine in it
    python load.py drive URL COUNT SECONDS    COUNT sockets, one stream each; prints JSON

Each token's text is the time its step began, by the clock that all processes of a machine share,
so that whoever reads it knows how late it is: from there to its last byte in the reader's hands.
The engine is a thread that makes one token of every stream per step and wakes the readers once,
through the engine's own `tinyvllm.stream`. The reader only keeps what it reads until the end, so
that a core is enough for 100,000 frames a second; it says how busy that core was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import re
import select
import socket
import sys
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from tinyvllm import EngineConfig, EngineHealth, EngineStats, SamplingParams, TokenStream
from tinyvllm.gateway.__main__ import main as gateway_main
from tinyvllm.stream import StreamState, wake

_DELTA = re.compile(rb'"delta":"([0-9 ]*)"')
_ASK = b'{"type":"response.create","input":"x"}'
_TAIL = 512
"""Bytes of a delta event at most that may have been cut off by the end of a read."""


class ScriptedEngine:
    """`rate` tokens a second for every stream, `num_tokens` each, whatever is asked."""

    def __init__(self, rate: float, num_tokens: int, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.model_name = "scripted"
        self.max_model_len = 1 << 20
        self.model_config = SimpleNamespace(sampling_defaults={})
        self._period = 1 / rate
        self._num_tokens = num_tokens
        self._mailbox: SimpleQueue[Any] = SimpleQueue()
        self._states: dict[int, StreamState] = {}
        self._ids = itertools.count()
        self._num_made = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted engine", daemon=True)

    async def start(self) -> None:
        self._thread.start()

    async def aclose(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.join)

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, last_step_age=None, error=None)

    def stats(self) -> EngineStats:
        counts = {field.name: 0 for field in dataclasses.fields(EngineStats)}
        made = {"num_running": len(self._states), "num_output_tokens": self._num_made}
        return EngineStats(**(counts | made | {"sequences": ()}))  # type: ignore[arg-type]

    def chat(
        self, messages: Any, *, priority: int = 0, request_id: str = "", **_: Any
    ) -> TokenStream:
        state = StreamState(
            seq_id=next(self._ids),
            request_id=request_id,
            prompt=messages,
            params=SamplingParams(),
            priority=priority,
            mailbox=self._mailbox,
            resume_below=max(1, self.config.max_buffered_tokens // 2),
        )
        state.time_scheduled = time.perf_counter()
        stream = TokenStream(state, self)
        self._mailbox.put(("add", state))
        return stream

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._stop.is_set():
            # A step that comes late is not made up for: no real engine could.
            due = max(due + self._period, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            while not self._mailbox.empty():
                kind, state = self._mailbox.get()
                if kind == "add":
                    self._states[state.seq_id] = state
                elif kind == "abort" and self._states.pop(state.seq_id, None):
                    state.end("abort")
            self._step()

    def _step(self) -> None:
        waiters = []
        text = f"{time.monotonic_ns()} "
        for state in list(self._states.values()):
            if len(state.buffer) >= self.config.max_buffered_tokens:
                continue  # its reader lags
            state.completion_tokens += 1
            self._num_made += 1
            last = state.completion_tokens == self._num_tokens
            state.buffer.append((text, 1, "length" if last else None, None, 0))
            if last:
                del self._states[state.seq_id]
                state.end("length")
            waiter = state.waiter
            if waiter is not None and not waiter.notified:
                waiter.notified = True
                waiters.append(waiter)
        wake(waiters)


def serve(rate: float, num_tokens: int, argv: list[str]) -> int:
    """The gateway's own command, with a scripted engine."""

    def new_engine(_: str, config: EngineConfig) -> Any:
        return ScriptedEngine(rate, num_tokens, config)

    return gateway_main(argv, new_engine=new_engine)


class _Client:
    """A WebSocket client that does no more than it must: keeps what arrives, and when."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.sendall(
            f"GET /v1/responses HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        reply = b""
        while not reply.endswith(b"\r\n\r\n"):
            reply += self.socket.recv(1)
        assert reply.startswith(b"HTTP/1.1 101"), reply
        self.socket.setblocking(False)
        self.arrived: list[tuple[int, bytes]] = []

    def ask(self) -> None:
        """Send the event: one frame, with a mask of zeros."""
        self.socket.send(bytes([0x81, 0x80 | len(_ASK)]) + bytes(4) + _ASK)

    def read(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, "the gateway hung up"
        self.arrived.append((time.monotonic_ns(), data))

    def lateness(self) -> tuple[int, list[int]]:
        """Frames with text, and for each token in them nanoseconds from its making to the arrival
        of its last byte."""
        num_frames, late, rest = 0, [], b""
        for moment, data in self.arrived:
            data = rest + data
            end = 0
            for match in _DELTA.finditer(data):
                num_frames += 1
                end = match.end()
                late += [moment - int(made) for made in match[1].split()]
            rest = data[max(end, len(data) - _TAIL) :]
        return num_frames, late


def drive(url: str, count: int, seconds: float) -> dict[str, Any]:
    """Open `count` sockets, start a stream on each, read for `seconds` after the last began."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    gc.disable()  # what arrives is kept: there is nothing to collect
    clients: dict[int, _Client] = {}
    ready = select.epoll()
    for _ in range(count):
        client = _Client(parts.hostname, parts.port)
        clients[client.socket.fileno()] = client
        ready.register(client.socket, select.EPOLLIN)

    def read_until(deadline: float) -> None:
        while (left := deadline - time.perf_counter()) > 0:
            for fd, _ in ready.poll(left, count):
                clients[fd].read()

    for client in clients.values():
        client.ask()
        read_until(time.perf_counter() + 1e-4)
    read_until(time.perf_counter() + 1)  # the crowd of beginnings is not what is measured
    for client in clients.values():
        client.arrived.clear()
    busy, started = time.process_time(), time.perf_counter()
    read_until(started + seconds)
    elapsed = time.perf_counter() - started
    busy = time.process_time() - busy
    num_frames, late = 0, []
    for client in clients.values():
        client.socket.close()
        frames, times = client.lateness()
        num_frames += frames
        late += times
    late.sort()
    return {
        "streams": count,
        "tokens_per_second": len(late) / elapsed,
        "frames_per_second": num_frames / elapsed,
        **{
            f"p{q}_ms": late[min(len(late) - 1, len(late) * q // 100)] / 1e6 if late else None
            for q in (50, 99, 100)
        },
        "reader_busy": busy / elapsed,
    }


def main() -> int:
    command, *rest = sys.argv[1:]
    if command == "serve":
        return serve(float(rest[0]), int(rest[1]), rest[2:])
    url, count, seconds = rest
    print(json.dumps(drive(url, int(count), float(seconds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
