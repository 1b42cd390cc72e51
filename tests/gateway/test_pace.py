"""From the engine's stream to frames: `feed_text`, the frames, and what a late loop sends. With
the engine's own streams, which the test or a scripted engine fills."""

from __future__ import annotations

import asyncio
import json
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
from support.load import ScriptedEngine
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from tinyvllm import SamplingParams, TokenStream
from tinyvllm.gateway.connection import text_frame
from tinyvllm.gateway.server import Gateway
from tinyvllm.stream import StreamState

if TYPE_CHECKING:
    from collections.abc import Callable


def new_stream(**params: Any) -> tuple[StreamState, TokenStream]:
    state = StreamState(
        seq_id=0,
        request_id="r",
        prompt="",
        params=SamplingParams(**params),
        priority=0,
        mailbox=SimpleQueue(),
        resume_below=2,
    )
    return state, TokenStream(state, None)


def put(state: StreamState, *texts: str, reason: Any = None) -> None:
    """Texts as the engine gives them in one step."""
    for text in texts:
        last = text is texts[-1]
        state.buffer.append((text, 1, reason if last else None, None, 0))
    state.wake_reader()


@pytest.mark.asyncio
async def test_feed_text_gives_what_is_ready_at_once() -> None:
    state, stream = new_stream()
    seen: list[tuple[str, str | None]] = []
    put(state, "a", "", "b")
    arrived = asyncio.Event()

    def take(text: str, finish_reason: str | None) -> None:
        seen.append((text, finish_reason))
        arrived.set()

    task = asyncio.create_task(stream.feed_text(take))
    await asyncio.wait_for(arrived.wait(), 5)
    assert seen == [("ab", None)]
    put(state, "c")
    put(state, "d")
    arrived.clear()
    await asyncio.wait_for(arrived.wait(), 5)
    assert seen[1:] == [("cd", None)]
    put(state, "e", "", reason="stop")
    state.end("stop")
    state.wake_reader()
    assert await task is True
    assert seen[2:] == [("e", "stop")]
    assert await stream.text() == "abcde"


@pytest.mark.asyncio
async def test_feed_text_can_be_left_and_numbers_go_on() -> None:
    state, stream = new_stream()
    put(state, *"abc")
    assert await stream.feed_text(lambda text, _: True) is False
    put(state, "d")
    token = await anext(stream)
    assert (token, token.index) == ("d", 3)
    # Many reads are kept as few strings.
    for _ in range(1000):
        put(state, "x", "y")
        assert await stream.feed_text(lambda text, _: True) is False
    put(state, "z", reason="length")
    state.end("length")
    token = await anext(stream)
    assert (token.index, token.finish_reason) == (2004, "length")
    assert await stream.text() == "abcd" + "xy" * 1000 + "z"
    assert len(stream._parts[0]) < 300


@pytest.mark.asyncio
async def test_feed_text_resumes_a_paused_stream_and_raises_what_ended_it() -> None:
    state, stream = new_stream()
    state.paused = True
    put(state, "a")
    assert await stream.feed_text(lambda text, _: True) is False
    assert not state.paused and state.mailbox.get_nowait() == ("resume", state)
    state.error = RuntimeError("gone")
    state.finished = True
    with pytest.raises(RuntimeError, match="gone"):
        await stream.feed_text(lambda text, _: None)


@pytest.mark.asyncio
async def test_feed_text_is_for_one_choice() -> None:
    _, stream = new_stream(n=2)
    with pytest.raises(ValueError, match="has 2"):
        await stream.feed_text(lambda text, _: None)


@pytest.mark.parametrize("length", [0, 1, 125, 126, 127, 65535, 65536, 100_000])
def test_a_frame_is_what_the_library_makes(length: int) -> None:
    message = b"x" * length
    assert text_frame(message) == Frame(Opcode.TEXT, message).serialize(mask=False)


@pytest.mark.asyncio
async def test_a_late_loop_sends_what_gathered_as_one_frame() -> None:
    """So that a loop with too much to do is late by one round of its streams and no more: a round
    costs what its frames cost, not its tokens."""
    engine = ScriptedEngine(rate=200, num_tokens=1_000_000)
    await engine.start()
    try:
        async with (
            Gateway(engine, port=0) as gateway,  # type: ignore[arg-type]
            connect(f"ws://127.0.0.1:{gateway.port}/v1/responses", proxy=None) as socket,
            asyncio.timeout(20),
        ):
            await socket.send('{"type":"response.create","input":"x"}')

            async def delta(is_wanted: Callable[[int], bool]) -> int:
                """Waits for a delta of so many tokens."""
                while True:
                    event = json.loads(await socket.recv())
                    if event["type"] == "response.output_text.delta":
                        count = len(event["delta"].split())
                        if is_wanted(count):
                            return count

            await delta(lambda count: count == 1)
            time.sleep(0.2)  # noqa: ASYNC251  # the loop is busy with something else
            assert await delta(lambda count: count > 1) >= 20
            await delta(lambda count: count == 1)  # it keeps up again
    finally:
        await engine.aclose()
