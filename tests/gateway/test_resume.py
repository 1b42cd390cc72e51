"""A response has a life of its own: many viewers, late ones, lost ones, and none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from support.fake_engine import Script

from tinyvllm import EngineConfig
from tinyvllm.gateway.limits import Limits

if TYPE_CHECKING:
    # The classes of conftest.py, which cannot be imported.
    Harness = Any
    Client = Any

pytestmark = pytest.mark.asyncio

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def without_lane(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in event.items() if k != "stream_id"} for event in events]


async def begin(harness: Harness, client: Client, *texts: str) -> tuple[Any, str, list[Any]]:
    """A response with these tokens out: its stream, its id, and its events so far."""
    await client.create()
    stream = await harness.engine.next_stream()
    events = []
    for text in texts:
        stream.push(text)
        events += await client.until("response.output_text.delta")
    return stream, events[0]["response"]["id"], events


async def test_late_viewers_get_the_history_and_then_the_same_as_everyone(
    running: Harness,
) -> None:
    first = await running.connect()
    stream, response_id, events = await begin(running, first, "He", "llo")
    late, later = await running.connect(), await running.connect()
    await late.resume(response_id, stream_id="w")
    assert without_lane([await late.recv() for _ in events]) == events
    stream.push(", you")
    await later.resume(response_id, starting_after=events[-1]["sequence_number"])
    stream.push("!")
    stream.finish()
    whole = events + await first.until(TERMINAL)
    watched = await late.until(TERMINAL)
    assert {event["stream_id"] for event in watched} == {"w"}
    assert events + without_lane(watched) == whole
    assert events + await later.until(TERMINAL) == whole
    assert text_of(whole) == "Hello, you!"


@pytest.mark.parametrize("how", ["close", "cut"])
async def test_a_lost_socket_loses_no_token(running: Harness, how: str) -> None:
    client = await running.connect()
    stream, response_id, events = await begin(running, client, "a", "b")
    if how == "close":
        await client.socket.close()
    else:
        client.socket.transport.abort()
    await running.idle()
    for text in "cdefg":
        stream.push(text)  # nobody watches: gathers
    again = await running.connect()
    await again.resume(response_id, starting_after=events[-1]["sequence_number"])
    rest = await again.until("response.output_text.delta")
    assert [event["sequence_number"] for event in rest] == [events[-1]["sequence_number"] + 1]
    assert rest[0]["delta"] == "cdefg"
    stream.push("h")
    stream.finish()
    events += rest + await again.until(TERMINAL)
    assert (
        text_of(events) == "abcdefgh" == events[-1]["response"]["output"][0]["content"][0]["text"]
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_resume_that_comes_in_a_long_silent_prompt(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    stream = await running.engine.next_stream()
    response_id = (await client.recv())["response"]["id"]
    await client.socket.close()
    again = await running.connect()
    await again.resume(response_id, starting_after=0)
    assert (await again.recv())["type"] == "response.in_progress"
    stream.push("x")
    stream.finish()
    assert text_of(await again.answer()) == "x"


async def test_what_ended_can_be_read_for_a_while(harness: Harness) -> None:
    await harness.start(limits=Limits(resume_seconds=0.3))
    harness.engine.script = Script(("x", "y"))
    client = await harness.connect()
    await client.create()
    events = await client.answer()
    response_id = events[0]["response"]["id"]
    await client.resume(response_id)
    assert await client.answer() == events
    await client.resume(response_id, starting_after=events[-1]["sequence_number"], stream_id="s")
    error = await client.recv()
    assert (error["error"]["param"], error["stream_id"]) == ("starting_after", "s")
    response = harness.gateway.responses.find(response_id)
    await harness.wait_for(lambda: response.transcript.num_events == 0)
    await client.resume(response_id)
    error = await client.recv()
    assert (error["status"], error["error"]["code"]) == (410, "resume_window_exceeded")


async def test_without_viewers_a_response_is_cancelled_after_the_window(harness: Harness) -> None:
    await harness.start(limits=Limits(resume_seconds=0.3))
    client, second = await harness.connect(), await harness.connect()
    stream, response_id, _ = await begin(harness, client, "a")
    await second.resume(response_id)
    await second.until("response.output_text.delta")
    await client.socket.close()
    # Watched: lives on beyond the window.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await stream.aborted.wait()
    loop = asyncio.get_running_loop()
    closed_at = loop.time()
    await second.socket.close()
    async with asyncio.timeout(5):
        await stream.aborted.wait()
    assert 0.25 < loop.time() - closed_at < 2
    assert not harness.engine.live


async def test_a_request_may_ask_for_no_window(running: Harness) -> None:
    client = await running.connect()
    await client.create(tinyvllm={"resume_seconds": 0})
    stream = await running.engine.next_stream()
    await client.recv()
    await client.socket.close()
    async with asyncio.timeout(5):
        await stream.aborted.wait()


async def test_any_viewer_may_cancel(running: Harness) -> None:
    client, second = await running.connect(), await running.connect()
    stream, response_id, _ = await begin(running, client, "a")
    await second.resume(response_id, stream_id="w")
    await second.until("response.output_text.delta")
    await second.cancel(stream_id="w")
    for viewer in (client, second):
        terminal = (await viewer.until(TERMINAL))[-1]
        assert terminal["response"]["incomplete_details"] == {"reason": "cancelled"}
    assert stream.aborted.is_set()


async def test_a_viewer_that_reads_slowly_hinders_no_other(harness: Harness) -> None:
    """One of two viewers of the same answer stops reading. The other has every token at once; the
    slow one, when it reads again, has the same text in fewer, larger pieces."""
    harness.engine.config = EngineConfig(max_buffered_tokens=100)
    await harness.start(limits=Limits(max_pending_chars=2000))
    fast, slow = (
        await harness.connect(),
        await harness.connect(sock=await slow_socket(harness), max_queue=1),
    )
    await fast.create()
    stream = await harness.engine.next_stream()
    response_id = (await fast.recv())["response"]["id"]
    await slow.resume(response_id)
    texts = [f"{i:>9}," for i in range(8000)]

    async def produce() -> None:
        for text in texts:
            await stream.push_all([text])
            await asyncio.sleep(0)  # a token a step, each a frame of its own
            await asyncio.sleep(0)
        stream.finish()

    producing = asyncio.create_task(produce())
    seen = await fast.answer()
    await producing
    assert text_of(seen) == "".join(texts) and len(seen) > 1000
    behind = await slow.answer()
    assert text_of(behind) == "".join(texts)
    assert behind[-1] == seen[-1]
    merged = [event for event in behind if "first_sequence_number" in event]
    assert merged and len(behind) < len(seen)


async def slow_socket(harness: Harness) -> Any:
    import socket

    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", harness.gateway.port))
    return sock


async def test_a_client_that_never_catches_up_is_told_so(harness: Harness) -> None:
    await harness.start(limits=Limits(max_pending_chars=2000, behind_seconds=0.3, stall_seconds=30))
    sock = await slow_socket(harness)
    slow = await harness.connect(sock=sock, max_queue=1)
    await slow.create()
    stream = await harness.engine.next_stream()
    pushing = asyncio.create_task(stream.push_all(["x" * 500] * 20_000))
    dropped = harness.gateway.metrics.value
    await harness.wait_for(lambda: dropped("connections_dropped_total", "behind") == 1)
    events = []
    with pytest.raises(Exception, match="1013"):
        while True:
            events.append(await slow.recv())
    pushing.cancel()
    # It may come again: nothing was lost.
    again = await harness.connect()
    await again.resume(events[0]["response"]["id"], starting_after=events[-1]["sequence_number"])
    next_event = await again.recv()
    assert next_event["type"] == "response.output_text.delta"
    await again.cancel()
    await again.until("response.incomplete")


# Conversations


async def test_previous_response_id_goes_on(running: Harness) -> None:
    running.engine.script = Script(("ans", "wer"))
    client = await running.connect()
    await client.create("one", instructions="Be brief.")
    first = (await client.answer())[-1]["response"]
    other = await running.connect()
    await other.create("two", previous_response_id=first["id"])
    second = (await other.answer())[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    await client.create([], previous_response_id=second["id"], instructions="Now long.")
    await client.answer()
    one = {"role": "user", "content": "one"}
    said = {"role": "assistant", "content": "answer"}
    two = {"role": "user", "content": "two"}
    prompts = [stream.messages for stream in running.engine.streams]
    assert prompts == [
        [{"role": "system", "content": "Be brief."}, one],
        [one, said, two],  # instructions are not inherited
        [{"role": "system", "content": "Now long."}, one, said, two, said],
    ]


async def test_a_previous_response_that_is_not_there(harness: Harness) -> None:
    await harness.start(limits=Limits(max_conversations=1))
    harness.engine.script = Script(("x",))
    client = await harness.connect()
    await client.create("1")
    forgotten = (await client.answer())[-1]["response"]["id"]
    await client.create("2")
    await client.answer()
    await client.create("3", previous_response_id=forgotten, stream_id="s")
    error = await client.recv()
    assert (error["status"], error["error"]["code"], error["stream_id"]) == (
        404,
        "previous_response_not_found",
        "s",
    )
    harness.engine.script = None
    await client.create("4")
    stream = await harness.engine.next_stream()
    running_id = (await client.recv())["response"]["id"]
    await client.create("5", previous_response_id=running_id, stream_id="s")
    assert "not ended" in (await client.until("error"))[-1]["error"]["message"]
    await client.cancel()
    await harness.wait_for(lambda: not harness.engine.live)
    assert stream is not None


async def test_generate_false_warms_the_cache(running: Harness) -> None:
    client = await running.connect()
    await client.create("a long document", generate=False)
    stream = await running.engine.next_stream()
    assert stream.params.max_tokens == 1 and not stream.add_generation_prompt
    stream.push("The", finish_reason="length")
    stream._end("length")
    response = (await client.answer())[-1]["response"]
    assert (response["status"], response["output"]) == ("completed", [])
    assert response["usage"]["output_tokens"] == 0
    running.engine.script = Script(("x",))
    await client.create("question", previous_response_id=response["id"])
    await client.answer()
    assert [m["content"] for m in running.engine.streams[-1].messages] == [
        "a long document",
        "question",
    ]


async def test_function_tools(running: Harness) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    running.engine.script = Script(("Let me", " see. ", call[:20], call[20:]))
    client = await running.connect()
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": {}}
    await client.create("1+1", tools=[tool])
    response = (await client.answer())[-1]["response"]
    message, function_call = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (function_call["name"], function_call["arguments"]) == ("add", '{"a":1}')
    stream = running.engine.streams[-1]
    assert stream.tools[0]["function"]["name"] == "add"
    output = {"type": "function_call_output", "call_id": function_call["call_id"], "output": "2"}
    running.engine.script = Script(("2",))
    await client.create([output], previous_response_id=response["id"], tools=[tool])
    await client.answer()
    _, asked, told = running.engine.streams[-1].messages
    assert asked["tool_calls"][0]["id"] == told["tool_call_id"] == function_call["call_id"]
    assert told["role"] == "tool" and told["content"] == "2"
    await client.create("x", tools=[tool], tool_choice="none")
    await client.answer()
    assert running.engine.streams[-1].tools is None


# What else the server says


async def test_a_request_that_waits_for_a_slot_is_queued(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    stream = await running.engine.next_stream()
    stream.waiting = True
    queued = (await client.until("response.queued"))[-1]
    assert queued["response"]["status"] == "queued" and queued["sequence_number"] == 2
    stream.waiting = False
    stream.push("x")
    stream.finish()
    assert text_of(await client.answer()) == "x"


async def test_stats_on_request(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    stream = await running.engine.next_stream()
    tag = (await client.until("response.in_progress"))[0]["response"]["tinyvllm"]["tag"]
    await client.send({"type": "tinyvllm.stats", "interval_ms": 100})
    stats = await client.recv()
    assert stats["type"] == "tinyvllm.stats" and "sequence_number" not in stats
    assert stats["slots"] == {"total": 64, "running": 1, "waiting": 0, "paused": 0}
    assert stats["blocks"]["total"] == stats["blocks"]["free"] + stats["blocks"]["used"] == 64
    (sequence,) = stats["sequences"]
    assert (sequence["tag"], sequence["state"]) == (tag, "prefill")
    stream.push("x", "y")
    while (await client.recv())["type"] != "tinyvllm.stats":
        pass
    stats = await client.recv()
    while stats["type"] != "tinyvllm.stats":
        stats = await client.recv()
    assert stats["sequences"][0]["state"] == "decode"
    assert stats["sequences"][0]["output_tokens"] == 2
    assert stats["tokens_per_second"] > 0 and stats["num_output_tokens"] == 2
    assert (stats["responses"], stats["viewers"], stats["connections"]) == (1, 1, 1)
    await client.send({"type": "tinyvllm.stats", "interval_ms": 0})
    stream.finish()
    await client.until("response.completed")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.socket.recv()


async def test_pings_while_nothing_else_flows_and_an_end_to_idleness(harness: Harness) -> None:
    await harness.start(limits=Limits(ping_seconds=0.1, idle_seconds=0.6))
    client = await harness.connect()
    await client.create()
    await harness.engine.next_stream()
    await client.until("response.in_progress")
    for _ in range(8):  # longer than idle_seconds: a response is work
        assert await client.recv() == {"type": "tinyvllm.ping"}
    await client.cancel()
    with pytest.raises(Exception, match="1000"):
        while True:
            await client.recv()


async def test_the_rate_of_events_is_bounded(harness: Harness) -> None:
    await harness.start(limits=Limits(max_events_per_second=1, max_events_burst=3))
    client = await harness.connect()
    for _ in range(5):
        await client.cancel()
    error = await client.recv()
    assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_a_drain_lets_what_runs_finish_and_tells_everyone(harness: Harness) -> None:
    await harness.start(limits=Limits(close_seconds=0.5))
    busy, idle, stuck = [await harness.connect() for _ in range(3)]
    await busy.create("busy")
    first = await harness.engine.next_stream()
    await busy.create("waits")
    await stuck.create("stuck")
    await harness.engine.next_stream()
    await busy.until("response.in_progress")
    draining = asyncio.create_task(harness.gateway.drain(1.0))
    assert await idle.recv() == {"type": "tinyvllm.draining", "seconds": 1.0}
    with pytest.raises(Exception, match="1012"):
        await idle.recv()
    await busy.until("tinyvllm.draining")
    await busy.create("new", stream_id="s")
    assert (await busy.until("error"))[-1]["error"]["code"] == "server_shutting_down"
    first.push("done")
    first.finish()
    assert text_of(await busy.answer()) == "done"
    assert (await busy.recv())["error"]["code"] == "server_shutting_down"  # "waits"
    with pytest.raises(Exception, match="1012"):
        await busy.recv()
    failed = (await stuck.until(TERMINAL))[-1]
    assert failed["response"]["error"]["code"] == "server_shutting_down"
    await draining
    assert not harness.engine.live
