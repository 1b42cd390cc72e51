"""A gateway on a free port with a fake engine, a small client, and a check that nothing is left."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest_asyncio
from support.fake_engine import FakeEngine
from websockets.asyncio.client import connect

from tinyvllm.gateway.server import Gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from websockets.asyncio.client import ClientConnection

    from tinyvllm.gateway.limits import Limits

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


class Client:
    """One WebSocket; `recv` gives events, checked for gap-free numbers per response."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self._numbers: dict[str | None, int] = {}

    async def send(self, event: dict[str, Any] | str | bytes) -> None:
        await self.socket.send(json.dumps(event) if isinstance(event, dict) else event)

    async def create(self, text: str = "Hi", **fields: Any) -> None:
        await self.send({"type": "response.create", "input": text, **fields})

    async def cancel(self, **fields: Any) -> None:
        await self.send({"type": "response.cancel", **fields})

    async def recv(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            event: dict[str, Any] = json.loads(await self.socket.recv())
        if event["type"].startswith("response."):
            self._check_number(event)
        return event

    def _check_number(self, event: dict[str, Any]) -> None:
        lane, number = event.get("stream_id"), event["sequence_number"]
        first = event.get("first_sequence_number", number)
        if event["type"] == "response.created":
            assert number == 0
        elif lane in self._numbers:  # else the first event of a resume
            assert self._numbers[lane] + 1 == first <= number
        self._numbers[lane] = number
        if event["type"] in TERMINAL:
            del self._numbers[lane]

    async def resume(self, response_id: str, **fields: Any) -> None:
        await self.send({"type": "response.resume", "response_id": response_id, **fields})

    async def until(self, kind: str | tuple[str, ...]) -> list[dict[str, Any]]:
        """Events up to and with the first of that type."""
        kinds = (kind,) if isinstance(kind, str) else kind
        events = [await self.recv()]
        while events[-1]["type"] not in kinds:
            events.append(await self.recv())
        return events

    async def answer(self) -> list[dict[str, Any]]:
        """One whole response; its deltas must add up to its text."""
        events = await self.until(TERMINAL)
        done = [event for event in events if event["type"] == "response.output_text.done"]
        if done:
            assert text_of(events) == done[0]["text"]
        return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


class Harness:
    """What a test gets: engine, gateway, and as many clients as it wants."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.gateway: Gateway
        self._stack = AsyncExitStack()

    async def start(self, *, limits: Limits | None = None, **options: Any) -> None:
        self.gateway = Gateway(self.engine, port=0, limits=limits, **options)  # type: ignore[arg-type]
        await self.gateway.start()

    def restart_on(self, port: int) -> None:
        """A new gateway for the same engine, not started yet, as after a restart."""
        self.gateway = Gateway(self.engine, port=port)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.gateway.port}/v1/responses"

    async def connect(self, **options: Any) -> Client:
        options = {"compression": None, "proxy": None, "close_timeout": 0.2, **options}
        return Client(await self._stack.enter_async_context(connect(self.url, **options)))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for what has no event of its own."""
        async with asyncio.timeout(10):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Wait until no connection is left."""
        await self.wait_for(lambda: self.gateway.num_connections == 0)

    async def aclose(self) -> None:
        await self._stack.aclose()
        await self.gateway.aclose()
        await self.engine.aclose()


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    """Not started: tests say `await harness.start()`. Afterwards nothing may be left of it."""
    before = asyncio.all_tasks()
    harness = Harness()
    yield harness
    live_before_close = set(harness.engine.live)
    await harness.aclose()
    assert not harness.engine.live
    assert harness.gateway.num_connections == 0
    async with asyncio.timeout(10):
        while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.wait(left)
    assert all(stream.aborted.is_set() for stream in live_before_close)


@pytest_asyncio.fixture
async def running(harness: Harness) -> Harness:
    """The same, started with the default limits."""
    await harness.start()
    return harness
