"""Load for the gateway: a scripted engine in one process, many clients in another.

    python load.py serve [RATE] [TOKENS]      the gateway's command with a scripted engine in it
    python load.py drive URL COUNT SECONDS    COUNT sockets, one stream each; prints JSON

Each token's text is the time it was made, by the clock that all processes of a machine share, so
that whoever reads it knows how late it is. The engine is a thread that makes one token of every
stream per step and wakes the readers once, through the engine's own `tinyvllm.stream`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
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
        for state in list(self._states.values()):
            if len(state.buffer) >= self.config.max_buffered_tokens:
                continue  # its reader lags
            state.completion_tokens += 1
            self._num_made += 1
            last = state.completion_tokens == self._num_tokens
            text = f"{time.monotonic_ns()} "
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


class _Client(asyncio.Protocol):
    """A WebSocket client that does no more than it must: finds the times in what arrives."""

    def __init__(self, host: str, event: bytes, lateness: list[int]) -> None:
        self._host = host
        self._event = event
        self._lateness = lateness
        self._rest = b""
        self._open = False
        self.num_frames = 0
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(
            f"GET /v1/responses HTTP/1.1\r\nHost: {self._host}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def ask(self) -> None:
        """Send the event: one frame, with a mask of zeros."""
        assert len(self._event) < 126
        self.transport.write(bytes([0x81, 0x80 | len(self._event)]) + bytes(4) + self._event)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if not self._open:
            self._open = True
            assert data.startswith(b"HTTP/1.1 101"), data
            self.opened.set_result(None)
            return
        data = self._rest + data
        end = 0
        for match in _DELTA.finditer(data):
            self.num_frames += 1
            end = match.end()
            for moment in match[1].split():
                self._lateness.append(now - int(moment))
        self._rest = data[max(end, len(data) - _TAIL) :]


async def drive(url: str, count: int, seconds: float) -> dict[str, Any]:
    """Open `count` sockets, start a stream on each, read for `seconds` after the last began."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    loop = asyncio.get_running_loop()
    event = b'{"type":"response.create","input":"x"}'
    lateness: list[int] = []
    clients: list[_Client] = []
    for _ in range(count):
        _, client = await loop.create_connection(
            lambda: _Client(parts.netloc, event, lateness), parts.hostname, parts.port
        )
        await client.opened
        clients.append(client)
    for client in clients:
        client.ask()
        await asyncio.sleep(0)
    await asyncio.sleep(1)  # the crowd of beginnings is not what is measured
    before = sum(client.num_frames for client in clients)
    lateness.clear()
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - started
    late = sorted(lateness)
    frames = sum(client.num_frames for client in clients) - before
    for client in clients:
        client.transport.abort()
    return {
        "streams": count,
        "tokens_per_second": len(late) / elapsed,
        "frames_per_second": frames / elapsed,
        **{
            f"p{q}_ms": late[min(len(late) - 1, len(late) * q // 100)] / 1e6 if late else None
            for q in (50, 99, 100)
        },
    }


def main() -> int:
    command, *rest = sys.argv[1:]
    if command == "serve":
        return serve(float(rest[0]), int(rest[1]), rest[2:])
    url, count, seconds = rest
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(drive(url, int(count), float(seconds)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
