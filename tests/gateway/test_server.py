"""The gateway over real sockets, with an engine whose tokens the tests push by hand."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest
from support.fake_engine import Script
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tinyvllm import EngineConfig, EngineDeadError, EngineOverloadedError, InvalidParameterError
from tinyvllm.gateway.limits import Limits

if TYPE_CHECKING:
    # The classes of conftest.py, which cannot be imported.
    Harness = Any
    Client = Any

pytestmark = pytest.mark.asyncio

CHAT = "https://chat.example"


def deltas(events: list[dict[str, Any]]) -> list[str]:
    return [e["delta"] for e in events if e["type"] == "response.output_text.delta"]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


async def test_each_token_is_a_frame_as_soon_as_it_exists(running: Harness) -> None:
    client = await running.connect()
    await client.create("Hello?", temperature=0, max_output_tokens=5, tinyvllm={"priority": 2})
    stream = await running.engine.next_stream()
    assert kinds([await client.recv(), await client.recv()]) == ["created", "in_progress"]
    stream.push("Hel")
    assert kinds([await client.recv() for _ in range(3)]) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    for text in ("lo", " wörld", "🎉"):
        stream.push(text)
        assert (await client.recv())["delta"] == text
    stream.push("")  # held back: no frame
    stream.finish()
    events = await client.until("response.completed")
    assert kinds(events) == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["text"] == "Hello wörld🎉"
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    assert stream.messages == [{"role": "user", "content": "Hello?"}]
    assert (stream.params.temperature, stream.params.max_tokens, stream.priority) == (0, 5, 2)
    assert stream.request_id == events[-1]["response"]["tinyvllm"]["tag"]


async def test_cut_at_max_output_tokens_is_incomplete(running: Harness) -> None:
    running.engine.script = Script(("a", "b"), finish_reason="length")
    client = await running.connect()
    await client.create()
    response = (await client.answer())[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_lanes_run_in_parallel_and_in_order_within(running: Harness) -> None:
    client = await running.connect()
    await client.create("a1", stream_id="a")
    await client.create("a2", stream_id="a")
    await client.create("b1", stream_id="b")
    first, second = await running.engine.next_stream(), await running.engine.next_stream()
    assert [s.messages[0]["content"] for s in (first, second)] == ["a1", "b1"]
    # b is told everything while a still runs, and a2 has not begun.
    second.push("B")
    second.finish()
    events = await client.until("response.completed")
    assert {event["stream_id"] for event in events if event["type"] != "response.created"} <= {
        "a",
        "b",
    }
    assert events[-1]["stream_id"] == "b" and len(running.engine.streams) == 2
    first.push("A")
    first.finish()
    assert (await client.until("response.completed"))[-1]["stream_id"] == "a"
    third = await running.engine.next_stream()
    assert third.messages[0]["content"] == "a2"
    third.finish()
    events = await client.answer()
    assert kinds(events)[0] == "created" and events[-1]["stream_id"] == "a"


async def test_the_lane_without_a_name_is_a_lane(running: Harness) -> None:
    running.engine.script = Script(("x",))
    client = await running.connect()
    await client.create("1")
    await client.create("2")
    for _ in range(2):
        events = await client.answer()
        assert events[-1]["type"] == "response.completed"
        assert all("stream_id" not in event for event in events)
    assert [s.messages[0]["content"] for s in running.engine.streams] == ["1", "2"]


async def test_limits_of_lanes_requests_and_active_responses(harness: Harness) -> None:
    await harness.start(limits=Limits(max_active=2, max_lanes=3, max_requests=4))
    client = await harness.connect()
    for lane in ("a", "b", "c"):
        await client.create(lane, stream_id=lane)
    streams = [await harness.engine.next_stream() for _ in range(2)]
    await client.create("d", stream_id="d")
    error = (await client.until("error"))[-1]
    assert (error["status"], error["error"]["code"], error["stream_id"]) == (
        429,
        "websocket_stream_limit_reached",
        "d",
    )
    await client.create("a again", stream_id="a")
    await client.create("a too many", stream_id="a")
    error = (await client.until("error"))[-1]
    assert error["error"]["code"] == "rate_limit_exceeded"
    assert len(harness.engine.streams) == 2  # c waits for one of the two active
    streams[1].finish()
    assert (await client.answer())[-1]["stream_id"] == "b"
    third = await harness.engine.next_stream()
    assert third.messages[0]["content"] == "c"
    # Lane b is free again: names are not used up.
    await client.create("e", stream_id="e")
    streams[0].finish()
    third.finish()
    for _ in range(2):
        (await harness.engine.next_stream()).finish()
    ended = 0
    while ended < 4:
        ended += (await client.recv())["type"] == "response.completed"


async def test_cancel_by_id_aborts_at_once(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    stream = await running.engine.next_stream()
    stream.push("Hel")
    events = await client.until("response.output_text.delta")
    response_id = events[0]["response"]["id"]
    await client.cancel(response_id=response_id)
    events = await client.until("response.incomplete")
    assert stream.aborted.is_set() and not running.engine.live
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "cancelled"}
    assert response["output"][0]["content"][0]["text"] == "Hel"
    # Idempotent: the race of a cancel with the end is no error.
    await client.cancel(response_id=response_id)
    await client.cancel(stream_id="unused")
    await client.cancel(response_id="resp_unknown", stream_id="x")
    error = await client.recv()
    assert (error["status"], error["error"]["code"], error["stream_id"]) == (
        404,
        "response_not_found",
        "x",
    )


async def test_cancel_of_a_lane_ends_what_runs_and_what_waits(running: Harness) -> None:
    client = await running.connect()
    await client.create("1", stream_id="a")
    await client.create("2", stream_id="a")
    await client.create("other")
    stream, other = await running.engine.next_stream(), await running.engine.next_stream()
    await client.cancel(stream_id="a")
    events = await client.until("response.incomplete") + await client.until("response.incomplete")
    cancelled = [event for event in events if event["type"] == "response.incomplete"]
    assert {event["stream_id"] for event in cancelled} == {"a"}
    assert all(event["response"]["output"] == [] for event in cancelled)
    assert stream.aborted.is_set() and not other.aborted.is_set()
    assert len(running.engine.streams) == 2  # the one that waited never reached the engine
    await client.cancel()
    assert "stream_id" not in (await client.until("response.incomplete"))[-1]
    assert other.aborted.is_set()


@pytest.mark.parametrize("how", ["close", "reset", "eof"])
async def test_a_closed_socket_aborts_its_requests(harness: Harness, how: str) -> None:
    """Without a resume window, at once."""
    await harness.start(limits=Limits(resume_seconds=0))
    running = harness
    client, other = await running.connect(), await running.connect()
    for lane in ("a", "b"):
        await client.create(lane, stream_id=lane)
    await client.create("waits", stream_id="a")
    await other.create()
    streams = [await running.engine.next_stream() for _ in range(3)]
    other_stream = next(s for s in streams if s.messages[0]["content"] == "Hi")
    streams.remove(other_stream)
    if how == "close":
        await client.socket.close()
    elif how == "reset":
        sock = client.socket.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.transport.abort()
    else:
        client.socket.transport.write_eof()
    async with asyncio.timeout(5):
        for stream in streams:
            await stream.aborted.wait()
    assert not other_stream.aborted.is_set()
    other_stream.push("still here")
    other_stream.finish()
    assert (await other.answer())[-1]["type"] == "response.completed"
    assert len(running.engine.streams) == 3


async def read_slowly(url: str) -> socket.socket:
    """A raw WebSocket client that reads nothing after the handshake, with small buffers."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    host, _, port = url.removeprefix("ws://").partition("/")[0].partition(":")
    await loop.sock_connect(sock, (host, int(port)))
    return sock


async def held_back(harness: Harness, stream: Any) -> None:
    """Wait until the engine has been paused: a full buffer that nobody reads from."""
    history: list[int] = []

    def is_still() -> bool:
        history.append(stream.num_pushed)
        full = len(stream.buffer) >= harness.engine.config.max_buffered_tokens
        return full and len(history) > 50 and len(set(history[-50:])) == 1

    await harness.wait_for(is_still)


async def test_a_stalled_client_delays_nobody_and_its_tokens_gather(harness: Harness) -> None:
    """A client that stops reading: its text gathers up to a bound, then its request is not read
    any more, so that the engine pauses it. When it reads again nothing is missing."""
    harness.engine.config = EngineConfig(max_buffered_tokens=100)
    await harness.start(limits=Limits(max_pending_chars=2000))
    sock = await read_slowly(harness.url)
    # max_queue 1: the library stops reading its socket as soon as we do.
    slow = await harness.connect(sock=sock, max_queue=1)
    fast = await harness.connect()
    await slow.create("slow")
    slow_stream = await harness.engine.next_stream()
    texts = [f"{i:>9}," for i in range(30_000)]
    pushing = asyncio.create_task(slow_stream.push_all(texts))
    await held_back(harness, slow_stream)
    assert slow_stream.num_pushed < len(texts) and not pushing.done()
    # Nobody else notices.
    for number in range(20):
        await fast.create("fast")
        stream = await harness.engine.next_stream()
        stream.push("quick", str(number))
        stream.finish()
        assert (await fast.answer())[-1]["type"] == "response.completed"
    finishing = asyncio.create_task(finish_after(pushing, slow_stream))
    events = await slow.answer()
    await finishing
    assert "".join(deltas(events)) == "".join(texts)
    assert len(deltas(events)) < len(texts)  # coalesced
    assert max(map(len, deltas(events))) > 1000


async def finish_after(pushing: asyncio.Task[None], stream: Any) -> None:
    await pushing
    stream.finish()


async def test_a_cancel_gets_through_while_the_socket_is_behind(harness: Harness) -> None:
    await harness.start(limits=Limits(max_pending_chars=2000))
    slow = await harness.connect(sock=await read_slowly(harness.url), max_queue=1)
    await slow.create()
    stream = await harness.engine.next_stream()
    pushing = asyncio.create_task(stream.push_all(["x" * 100] * 20_000))
    await held_back(harness, stream)
    await slow.cancel()
    async with asyncio.timeout(10):
        await stream.aborted.wait()
    pushing.cancel()
    response = (await slow.answer())[-1]["response"]
    assert response["incomplete_details"] == {"reason": "cancelled"}


async def test_a_client_that_takes_nothing_is_dropped(harness: Harness) -> None:
    await harness.start(limits=Limits(max_pending_chars=2000, stall_seconds=0.2, resume_seconds=0))
    slow = await harness.connect(sock=await read_slowly(harness.url), max_queue=1)
    await slow.create()
    stream = await harness.engine.next_stream()
    pushing = asyncio.create_task(stream.push_all(["x" * 100] * 50_000))
    async with asyncio.timeout(10):
        await stream.aborted.wait()
    pushing.cancel()
    await harness.idle()


async def test_error_events_to_a_client_that_does_not_read_are_bounded(harness: Harness) -> None:
    """It floods bad events and reads no answers: the server stops reading it."""
    await harness.start(limits=Limits(stall_seconds=0.3, max_events_per_second=0))
    slow = await harness.connect(sock=await read_slowly(harness.url), max_queue=1)

    async def flood() -> None:
        while True:
            await slow.send({"type": "response.create", "input": 1, "stream_id": "a" * 200})

    with pytest.raises(ConnectionClosed):
        async with asyncio.timeout(20):
            await flood()
    await harness.idle()


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("{", "invalid_parameter"),
        ("[1]", "invalid_parameter"),
        (b'{"type":"response.create","input":"x"}', "invalid_parameter"),
        ('{"type":"response.create","input":"x","model":"gpt-9"}', "model_not_found"),
        ('{"type":"response.create","input":"x","stream_id":"a b"}', "invalid_stream_id"),
        ('{"type":"response.resume","response_id":"resp_1"}', "response_not_found"),
        ('{"type":"response.resume"}', "invalid_parameter"),
    ],
)
async def test_a_bad_event_leaves_the_socket_usable(
    running: Harness, raw: str | bytes, code: str
) -> None:
    running.engine.script = Script(("ok",))
    client = await running.connect()
    await client.send(raw)
    assert (await client.recv())["error"]["code"] == code
    await client.create()
    assert (await client.answer())[-1]["type"] == "response.completed"


async def test_an_oversize_message_closes_with_1009(harness: Harness) -> None:
    await harness.start(limits=Limits(max_message_bytes=1000))
    client = await harness.connect()
    await client.create("x" * 2000)
    with pytest.raises(ConnectionClosed) as info:
        await client.recv()
    assert info.value.rcvd is not None and info.value.rcvd.code == 1009


async def test_what_the_engine_refuses_is_an_error_event(running: Harness) -> None:
    client = await running.connect()
    for refusal, status, code in (
        (EngineOverloadedError("full", retry_after=1.0), 429, "rate_limit_exceeded"),
        (InvalidParameterError("no", param="min_tokens"), 400, "invalid_parameter"),
        (EngineDeadError("dead"), 500, "server_error"),
    ):
        running.engine.refuse = refusal
        await client.create(stream_id="a")
        error = await client.recv()
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)
        assert error["stream_id"] == "a"


async def test_an_engine_failure_ends_the_response_as_failed(
    running: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    client = await running.connect()
    for error in (EngineDeadError("secret"), RuntimeError("secret")):
        await client.create()
        stream = await running.engine.next_stream()
        stream.push("par", "tial")
        stream.fail(error)
        with caplog.at_level(logging.ERROR):
            events = await client.answer()
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert "secret" not in json.dumps(events)
        assert "secret" in caplog.text


async def test_a_stream_that_the_engine_aborts_is_failed(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    (await running.engine.next_stream()).abort()
    assert (await client.answer())[-1]["type"] == "response.failed"


async def test_logprobs(running: Harness) -> None:
    client = await running.connect()
    await client.create(top_logprobs=1)
    stream = await running.engine.next_stream()
    stream.push("", logprob=-0.25, top_logprobs={7: -0.25})  # held back: goes with the next text
    stream.push("x", logprob=-1.0, top_logprobs={8: -0.5})
    events = await client.until("response.output_text.delta")
    assert events[-1]["logprobs"] == [
        {
            "token": "<100>",
            "bytes": list(b"<100>"),
            "logprob": -0.25,
            "top_logprobs": [{"token": "<7>", "bytes": list(b"<7>"), "logprob": -0.25}],
        },
        {
            "token": "<101>",
            "bytes": list(b"<101>"),
            "logprob": -1.0,
            "top_logprobs": [{"token": "<8>", "bytes": list(b"<8>"), "logprob": -0.5}],
        },
    ]
    assert stream.params.logprobs == 1


async def test_close_tells_clients_1012_and_refuses_new_ones(running: Harness) -> None:
    client = await running.connect()
    await client.create()
    stream = await running.engine.next_stream()
    url = running.url
    await running.gateway.aclose()
    assert stream.aborted.is_set()
    with pytest.raises(ConnectionClosed) as info:
        await client.until("never")
    assert info.value.rcvd is not None and info.value.rcvd.code == 1012
    with pytest.raises(OSError):
        await connect(url, proxy=None)


async def test_close_does_not_wait_for_dead_clients(harness: Harness) -> None:
    await harness.start(limits=Limits(close_seconds=0.1))
    await harness.connect(sock=await read_slowly(harness.url), max_queue=1)
    silent = socket.create_connection(("127.0.0.1", harness.gateway.port))
    with silent:
        await harness.wait_for(lambda: harness.gateway.num_connections == 2)
        async with asyncio.timeout(5):
            await harness.gateway.aclose()


@pytest.mark.parametrize(
    ("origin", "host", "options", "status"),
    [
        (None, None, {}, 101),
        ("http://{}", None, {}, 101),
        ("http://evil.example", None, {}, 403),
        ("null", None, {}, 403),
        ("http://127.0.0.1:1", None, {}, 403),
        # DNS rebinding: the attacker's name resolves to us, so Origin and Host agree.
        ("http://evil.example", "evil.example", {}, 403),
        (CHAT, None, {"allowed_origins": ["https://chat.example"]}, 101),
        (
            "https://chat.example",
            "chat.example",
            {"allowed_origins": ["https://chat.example"]},
            101,
        ),
    ],
)
async def test_who_may_connect(
    harness: Harness, origin: str | None, host: str | None, options: dict[str, Any], status: int
) -> None:
    await harness.start(**options)
    headers = {} if host is None else {"Host": host}
    if origin is not None:
        headers["Origin"] = origin.format(f"127.0.0.1:{harness.gateway.port}")
    if status == 101:
        client = await harness.connect(additional_headers=headers)
        await client.send("{")
        assert (await client.recv())["type"] == "error"
        return
    with pytest.raises(InvalidStatus) as info:
        await harness.connect(additional_headers=headers)
    assert info.value.response.status_code == status
