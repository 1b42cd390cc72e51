"""Whatever a client sends, it gets an error event or a normal response: never silence, never a
dead task."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_engine import FakeEngine, Script
from websockets.asyncio.client import connect

from tinyvllm.gateway.protocol import ClientEvent, ProtocolError, parse_event
from tinyvllm.gateway.server import Gateway

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "system", "message", "input_text", "text", 10**400, -1, 1e308])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "format"]) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
fields = st.sampled_from(
    "model input instructions temperature top_p max_output_tokens top_logprobs metadata stream_id "
    "text tools tool_choice include previous_response_id generate stream tinyvllm response_id x"
    " event_id background store starting_after interval_ms".split()
)
engine_params = st.dictionaries(
    st.sampled_from(
        "top_k min_p seed stop stop_token_ids min_tokens ignore_eos logit_bias priority n y "
        "skip_special_tokens bad_words prompt_logprobs max_tokens resume_seconds timeout "
        "json_schema allowed_token_ids".split()
    ),
    values,
    max_size=3,
)
parts = st.lists(
    st.fixed_dictionaries({"type": st.just("input_text"), "text": st.text(max_size=9)}), max_size=3
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "developer"]),
            "content": st.text(max_size=9) | parts,
        }
    ),
    min_size=1,
    max_size=3,
)
events = st.builds(
    lambda kind, given_input, extra, params: {
        "type": kind,
        "input": given_input,
        **({"tinyvllm": params} if params else {}),
        **extra,
    },
    st.sampled_from(
        ["response.create"] * 4
        + ["response.cancel", "response.resume", "tinyvllm.stats", "response.steer", "x"]
    )
    | values,
    st.text(max_size=20) | messages | values,
    st.dictionaries(fields, values, max_size=2),
    engine_params,
)


def encode(value: Any) -> str:
    return json.dumps(value)  # with NaN, Infinity and lone surrogates, as a bad client would


raw = (
    events.map(encode)
    | values.map(encode)
    | st.text(max_size=40).filter(lambda text: text.isprintable())
    | st.binary(max_size=20)
)


@given(raw)
@settings(max_examples=400, deadline=None)
def test_parsing_gives_an_event_or_a_protocol_error(message: str | bytes) -> None:
    try:
        event = parse_event(message, model="m")
    except ProtocolError as error:
        decoded = json.loads(error.event())
        assert decoded["type"] == "error" and 400 <= decoded["status"] < 500
        assert isinstance(decoded["error"]["message"], str)
    else:
        assert isinstance(event, ClientEvent)


@given(st.lists(raw, min_size=1, max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_server_answers_every_event(sent: list[str | bytes]) -> None:
    asyncio.run(_answer_all(sent))


async def _answer_all(sent: list[str | bytes]) -> None:
    engine = FakeEngine("m", script=Script(("a", "b")))
    gateway = Gateway(engine, port=0)  # type: ignore[arg-type]
    async with gateway:
        url = f"ws://127.0.0.1:{gateway.port}/v1/responses"
        async with connect(url, compression=None, proxy=None) as socket:
            for message in sent:
                await socket.send(message)
            # Whatever came before: the socket works, and its last request ends normally.
            await socket.send('{"type":"response.create","input":"end","stream_id":"the-end"}')
            started, ended, errors = set(), set(), 0
            async with asyncio.timeout(20):
                while "the-end" not in ended or started != ended:
                    event = json.loads(await socket.recv())
                    if event["type"].startswith("tinyvllm."):
                        continue
                    lane = event.get("stream_id")
                    if event["type"] == "error":
                        errors += 1
                    elif event["type"] == "response.created":
                        started.add(lane)
                        ended.discard(lane)
                    elif event["type"].split(".")[1] in ("completed", "incomplete", "failed"):
                        ended.add(lane)
            assert errors <= len(sent)
    await engine.aclose()
    assert not engine.live
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others
