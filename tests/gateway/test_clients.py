"""Unmodified clients of others: openai-python, openai-node, and Autobahn's fuzzing client."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.client_installs import node_with, python_with
from support.fake_engine import FakeEngine, Script

from tinyvllm.gateway.connection import Connection
from tinyvllm.gateway.limits import Limits
from tinyvllm.gateway.server import Gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.fake_engine import FakeStream

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

CLIENTS = Path(__file__).parent / "clients"
# Of the websockets library, not of ours.
KNOWN_DEVIATIONS = {"7.1.5", "9.3.1", "9.3.2", "9.4.1", "9.4.2"}


def script(stream: FakeStream) -> Script:
    """What the engine says, by what it is asked."""
    text = stream.messages[-1]["content"]
    if text == "call":
        assert stream.tools is not None and stream.tools[0]["function"]["name"] == "add"
        return Script(('<tool_call>{"name": "add", ', '"arguments": {"a": 1}}', "</tool_call>"))
    if text == "slow":
        return Script(("slow ", "answer"), interval=0.3)
    if text == "endless":
        return Script(("word ",) * 100_000, interval=0.01)
    said = " | ".join(message["content"] for message in stream.messages)
    return Script(("You", " said: ", said), interval=0.05)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(script=script)
    async with Gateway(engine, port=0, token="test-token") as gateway:  # type: ignore[arg-type]
        yield engine, f"http://127.0.0.1:{gateway.port}/v1"
    await engine.aclose()


async def run(*command: str) -> Any:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI", "PYTHONPATH"))}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])


def check(seen: dict[str, Any], engine: FakeEngine) -> None:
    """What both clients must have seen."""
    create, previous = seen["create"], seen["previous"]
    assert create["text"] == "".join(create["deltas"]) == "You said: Brief. | Hello"
    assert create["status"] == "completed" and len(create["deltas"]) == 3
    assert previous["text"] == "You said: Hello | You said: Brief. | Hello | And then?"
    assert seen["tools"]["calls"] == [["add", '{"a":1}']]
    assert seen["lanes"] == [["b", "You said: quick"], ["a", "slow answer"]]
    assert seen["not_found"]["error"][:3] == [
        404,
        "previous_response_not_found",
        "previous_response_id",
    ]
    assert seen["closed"]
    endless = next(s for s in engine.streams if s.messages[-1]["content"] == "endless")
    assert endless.aborted.is_set() and not engine.live


async def wait_until_idle(engine: FakeEngine) -> None:
    async with asyncio.timeout(10):
        while True:
            if not engine.live:
                return
            await asyncio.sleep(0.01)


async def test_openai_python() -> None:
    python = await asyncio.to_thread(python_with, "openai", "websockets>=17")
    async with serving() as (engine, url):
        seen = await run(str(python), str(CLIENTS / "openai_python.py"), url)
        await wait_until_idle(engine)
        check(seen, engine)
    assert seen["create"]["output_tokens"] == 4
    assert seen["create"]["kinds"][0] == "response.created"
    assert seen["model"]["error"][:3] == [404, "model_not_found", "model"]
    assert seen["parameter"]["error"][:3] == [400, "invalid_parameter", "temperature"]
    assert seen["own"]["status"] == "completed"
    own = next(s for s in engine.streams if s.messages[-1]["content"] == "own")
    assert (own.params.top_k, own.params.seed) == (3, 1)
    assert "401" in seen["wrong_token"]


async def test_openai_node() -> None:
    folder = await asyncio.to_thread(node_with, "openai", "ws")
    async with serving() as (engine, url):
        seen = await run("node", str(CLIENTS / "openai_node.mjs"), url, str(folder))
        await wait_until_idle(engine)
        check(seen, engine)


class EchoGateway(Gateway):
    """Says back what it hears, as Autobahn's cases want it: the same sockets, no protocol."""

    async def _handle(self, connection: Any) -> None:
        assert isinstance(connection, Connection)
        async for message in connection:
            await connection.send(message)


AUTOBAHN = """
import asyncio, json, os, sys
import kosoku
async def main():
    try:
        return await kosoku.run_fuzzingclient(sys.argv[1], None, None, concurrency=4)
    except kosoku.FailureError as exc:
        return exc.results
print(json.dumps([
    [r.case_id, r.behavior.value, r.behavior_close.value] for r in asyncio.run(main())
]), flush=True)
os._exit(0)  # the client's library, native code, aborts at times when the interpreter ends
"""


@pytest.mark.slow
async def test_autobahn() -> None:
    """Every case of the fuzzing client, but for what the library is known for."""
    python = await asyncio.to_thread(python_with, "kosoku")
    engine = FakeEngine()
    limits = Limits(max_message_bytes=32 * 1024 * 1024)
    async with EchoGateway(engine, port=0, limits=limits) as gateway:  # type: ignore[arg-type]
        url = f"ws://127.0.0.1:{gateway.port}/v1/responses"
        results = await run(str(python), "-c", AUTOBAHN, url)
    good = {"OK", "NON-STRICT", "INFORMATIONAL", "UNIMPLEMENTED"}
    bad = {case for case, *verdicts in results if not set(verdicts) <= good}
    assert len(results) > 250
    assert bad <= KNOWN_DEVIATIONS, {r[0]: r for r in results if r[0] in bad}
