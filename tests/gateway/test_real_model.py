"""The gateway and its page with the real engine and the default model."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.chromium import find_chromium, open_browser
from websockets.asyncio.client import connect

from tinyvllm import DEFAULT_MODEL, AsyncEngine
from tinyvllm.gateway.limits import Limits
from tinyvllm.gateway.server import Gateway

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

pytestmark = pytest.mark.asyncio

RESUME_SECONDS = 0.3
QUESTION = "What is the capital of France?"


async def ask(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    await socket.send(json.dumps({"type": "response.create", **fields}))
    events = []
    async with asyncio.timeout(60):
        while not events or events[-1]["type"].split(".")[1] not in ("completed", "incomplete"):
            events.append(json.loads(await socket.recv()))
            assert events[-1]["type"] not in ("error", "response.failed"), events[-1]
    return events


async def idle(engine: AsyncEngine) -> None:
    """Until no request holds a slot or a block."""
    async with asyncio.timeout(10):
        while True:
            stats = engine.stats()
            if stats.num_running + stats.num_waiting == 0:
                assert stats.num_free_blocks == stats.num_blocks
                return
            await asyncio.sleep(0.005)


async def test_the_wire_gives_what_the_library_gives(smollm2_dir: Path) -> None:
    async with (
        AsyncEngine(smollm2_dir, max_num_seqs=4) as engine,
        Gateway(engine, port=0, limits=Limits(resume_seconds=RESUME_SECONDS)) as gateway,
        connect(f"ws://127.0.0.1:{gateway.port}/v1/responses", proxy=None) as socket,
    ):
        options = {"max_tokens": 40, "temperature": 0}
        async with engine.chat([{"role": "user", "content": QUESTION}], **options) as stream:
            expected = await stream.text()
        events = await ask(socket, input=QUESTION, max_output_tokens=40, temperature=0)
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        response = events[-1]["response"]
        assert "".join(deltas) == response["output"][0]["content"][0]["text"] == expected
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len(deltas) > 3
        assert response["usage"]["output_tokens"] == stream.usage.completion_tokens
        assert response["usage"]["input_tokens"] == stream.usage.prompt_tokens

        # Too long for the model: says so, and the next request works.
        await socket.send(json.dumps({"type": "response.create", "input": "long " * 20_000}))
        async with asyncio.timeout(30):
            while (event := json.loads(await socket.recv()))["type"] != "response.failed":
                pass
        assert event["response"]["error"]["code"] == "context_length_exceeded"

        # A conversation goes on from blocks that are there already.
        events = await ask(
            socket,
            input="And of Italy?",
            previous_response_id=response["id"],
            max_output_tokens=5,
            temperature=0,
        )
        details = events[-1]["response"]["usage"]["input_tokens_details"]
        assert details["cached_tokens"] >= engine.config.block_size

        # Closing the socket frees the request's slot and blocks: a step after the window.
        endless = {"type": "response.create", "input": "Tell me a long story."}
        await socket.send(json.dumps(endless | {"tinyvllm": {"ignore_eos": True}}))
        async with asyncio.timeout(30):
            while json.loads(await socket.recv())["type"] != "response.output_text.delta":
                pass
        assert engine.stats().num_running == 1
        await socket.close()
        closed_at = time.monotonic()
        await idle(engine)
        assert time.monotonic() - closed_at < RESUME_SECONDS + 2


async def test_the_last_viewer_to_leave_frees_the_blocks(smollm2_dir: Path) -> None:
    """Not before the window, in which it may come back, is over; then within a step or two: the
    one that runs, and the one that was launched behind it."""
    async with (
        AsyncEngine(smollm2_dir, max_num_seqs=4) as engine,
        Gateway(engine, port=0, limits=Limits(resume_seconds=RESUME_SECONDS)) as gateway,
    ):
        url = f"ws://127.0.0.1:{gateway.port}/v1/responses"
        event = {"type": "response.create", "input": "Tell me a long story."}
        async with asyncio.timeout(30), connect(url, proxy=None) as second:
            async with connect(url, proxy=None) as first:
                await first.send(json.dumps(event | {"tinyvllm": {"ignore_eos": True}}))
                created = json.loads(await first.recv())
                response_id = created["response"]["id"]
                event = {"type": "response.resume", "response_id": response_id}
                await second.send(json.dumps(event))
                while json.loads(await second.recv())["type"] != "response.output_text.delta":
                    pass
            # One is left: nothing ends.
            await asyncio.sleep(RESUME_SECONDS * 1.5)
            assert engine.stats().num_running == 1
        closed_at = time.monotonic()
        (response,) = gateway.responses.live.values()
        async with asyncio.timeout(10):
            while not response.transcript.ended:
                assert engine.stats().num_running == 1
                await asyncio.sleep(0)
        num_steps = engine.stats().num_steps
        assert time.monotonic() - closed_at >= RESUME_SECONDS * 0.9
        await idle(engine)
        assert engine.stats().num_steps - num_steps <= 2


@pytest.mark.chromium
@pytest.mark.skipif(find_chromium() is None, reason="no chromium in PATH (apt install chromium)")
async def test_the_page_streams_and_stops(smollm2_dir: Path, tmp_path: Path) -> None:
    shots = Path(os.environ.get("TINYVLLM_SHOTS", tmp_path))
    last = "document.querySelector('.message.assistant:last-child')"
    async with (
        AsyncEngine(DEFAULT_MODEL, max_num_seqs=4) as engine,
        Gateway(engine, port=0) as gateway,
        open_browser() as browser,
    ):
        page = await browser.new_page(gateway.url)
        await page.wait_for("document.getElementById('connection')?.dataset.state === 'open'")
        await page.evaluate(
            """for (const [id, value] of [["max-tokens", "60"], ["temperature", "0"]]) {
                const input = document.getElementById(id);
                input.value = value;
                input.dispatchEvent(new Event("input", { bubbles: true }));
            }"""
        )
        # Every state of the answer's DOM, as it was painted.
        await page.evaluate(
            """window.states = new Set();
            new MutationObserver(() => {
                const text = document.querySelector(".message.assistant:last-child .text");
                if (text?.textContent) states.add(text.textContent);
            }).observe(document.getElementById("messages"),
                       { childList: true, subtree: true, characterData: true })"""
        )
        await page.type("Write a short story about a fox.")
        await page.press("Enter")
        await page.wait_for("states.size >= 12", seconds=60)
        await page.click("#stop")
        await page.wait_for(f"{last}.innerText.includes('stopped')")
        states = await page.evaluate("[...states]")
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(states))
        await idle(engine)

        await page.type(QUESTION)
        await page.press("Enter")
        await page.wait_for(
            f"{last}.querySelector('.meta')?.innerText.includes('tok/s')", seconds=60
        )
        assert "tok/s" in await page.evaluate(f"{last}.querySelector('.meta').innerText")
        await page.screenshot(shots / "real-model.png")
        await idle(engine)
        assert page.problems == []
