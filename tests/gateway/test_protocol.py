"""Client events in, server events out: no sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinyvllm import (
    ChatTemplateError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidParameterError,
    NotSupportedError,
)
from tinyvllm.gateway import protocol
from tinyvllm.gateway.protocol import (
    CancelEvent,
    CreateEvent,
    Outcome,
    ProtocolError,
    ResponseEvents,
    error_of,
    parse_event,
)


@pytest.fixture(params=["orjson", "json"], autouse=True)
def json_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything works the same without orjson."""
    if request.param == "orjson":
        pytest.importorskip("orjson")
    else:
        monkeypatch.setattr(protocol, "loads", protocol.json_loads)
        monkeypatch.setattr(protocol, "dumps", protocol.json_dumps)


def create(**fields: Any) -> CreateEvent:
    event = {"type": "response.create", "input": "Hi", **fields}
    parsed = parse_event(json.dumps(event), model="m")
    assert isinstance(parsed, CreateEvent)
    return parsed


def refused(**fields: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as info:
        create(**fields)
    return info.value


def test_create_with_a_string() -> None:
    event = create(
        model="m",
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=12,
        metadata={"k": "v"},
        stream_id="lane-1.a_B",
        stream=True,
        store=False,
        user="u",
        tools=[],
        tool_choice="auto",
        text={"format": {"type": "text"}, "verbosity": "low"},
        tinyvllm={"top_k": 5, "seed": 3, "stop": ["\n"], "priority": -1},
    )
    assert event.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )
    assert event.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 12,
        "top_k": 5,
        "seed": 3,
        "stop": ["\n"],
    }
    assert (event.priority, event.metadata, event.stream_id) == (-1, {"k": "v"}, "lane-1.a_B")


def test_create_with_messages() -> None:
    event = create(
        instructions="First.",
        input=[
            {"role": "developer", "content": "Second."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
                    {"type": "output_text", "text": "c"},
                ],
            },
            {"role": "user", "content": ""},
        ],
    )
    assert event.messages == (
        {"role": "system", "content": "First.\n\nSecond."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": ""},
    )


def test_nothing_chosen_is_left_to_the_model() -> None:
    event = create(temperature=None, top_p=None, metadata=None, tinyvllm=None, model=None)
    assert event.sampling == {} and event.metadata == {} and event.stream_id is None


def test_logprobs_by_number_or_by_include() -> None:
    assert create(top_logprobs=3).sampling == {"logprobs": 3}
    assert create(include=["message.output_text.logprobs"]).top_logprobs == 0
    assert create(include=["reasoning.encrypted_content"]).top_logprobs is None


def test_cancel() -> None:
    parsed = parse_event('{"type":"response.cancel","response_id":"resp_1"}', model="m")
    assert parsed == CancelEvent(response_id="resp_1", stream_id=None)
    parsed = parse_event('{"type":"response.cancel","stream_id":"s"}', model="m")
    assert parsed == CancelEvent(response_id=None, stream_id="s")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 2049}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
            "input[0].content[0].text",
        ),
        ({"instructions": ["x"]}, "instructions"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": [1]}, "metadata"),
        ({"text": "plain"}, "text"),
        ({"text": {"format": "plain"}}, "text.format"),
        ({"tinyvllm": []}, "tinyvllm"),
        ({"tinyvllm": {"top_k": -2}}, "tinyvllm.top_k"),
        ({"tinyvllm": {"min_p": 10**30}}, "tinyvllm.min_p"),
        ({"tinyvllm": {"priority": "high"}}, "tinyvllm.priority"),
        ({"tinyvllm": {"max_tokens": 5}}, "tinyvllm.max_tokens"),
        ({"tinyvllm": {"topk": 5}}, "tinyvllm.topk"),
        ({"tinyvllm": {"stop": ["x"] * 65}}, "tinyvllm.stop"),
        ({"tinyvllm": {"stop": [["x"]]}}, "tinyvllm.stop"),
        ({"top_k": 5}, "top_k"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.code, error.param) == (400, "invalid_parameter", param)


@pytest.mark.parametrize(
    ("name", "use"), [("max_tokens", "max_output_tokens"), ("logprobs", "top_logprobs")]
)
def test_the_engines_name_leads_to_openais(name: str, use: str) -> None:
    error = refused(**{name: 5})
    assert (error.param, error.message) == (name, f"unknown field {name!r}: use {use}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"generate": False}, "generate"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"tinyvllm": {"presence_penalty": 1.0}}, "tinyvllm.presence_penalty"),
        ({"tinyvllm": {"logit_bias": {"5": 1}}}, "tinyvllm.logit_bias"),
        ({"type": "response.resume"}, "type"),
        ({"type": "response.steer"}, "type"),
    ],
)
def test_what_is_not_built_says_so_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert "not supported yet" in error.message
    assert error.code == "invalid_parameter"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00binary",
        "",
        "{",
        "[]",
        "null",
        '"text"',
        "NaN",
        '{"type":"response.create","input":"x","temperature":NaN}',
        '{"type":"response.create","input":"\\ud800"}',
        '{"type":"response.create","stream_id":' + "[" * 5000 + "]" * 5000 + "}",
        '{"type":"response.create","input":"x","temperature":1' + "0" * 400 + "}",
        "{}",
        '{"type":7}',
        '{"type":["response.create"]}',
        '{"type":"response.created"}',
        '{"type":"response.cancel","response_id":7}',
    ],
)
def test_what_is_no_event_gives_an_error_event(raw: str | bytes) -> None:
    with pytest.raises(ProtocolError) as info:
        parse_event(raw, model="m")
    event = json.loads(info.value.event())
    assert event["type"] == "error" and event["status"] == 400
    assert event["error"]["type"] == "invalid_request_error"
    assert "stream_id" not in event


@pytest.mark.parametrize("stream_id", ["", "a" * 257, "sp ace", "ü", 5, ["a"]])
def test_an_invalid_stream_id(stream_id: object) -> None:
    error = refused(stream_id=stream_id)
    assert (error.code, error.param, error.stream_id) == ("invalid_stream_id", "stream_id", None)


def test_errors_echo_the_lane_and_stay_short() -> None:
    error = refused(stream_id="a", model="x" * 100_000)
    assert (error.status, error.code, error.stream_id) == (404, "model_not_found", "a")
    event = json.loads(error.event())
    assert event["stream_id"] == "a" and len(error.event()) < 1500


def test_errors_of_the_engine() -> None:
    expected = [
        (ContextLengthError("9 > 8", param="prompt"), 400, "context_length_exceeded", "input"),
        (
            InvalidParameterError("x", param="max_tokens"),
            400,
            "invalid_parameter",
            "max_output_tokens",
        ),
        (NotSupportedError("x", param="min_p"), 400, "invalid_parameter", "tinyvllm.min_p"),
        (ChatTemplateError("no template"), 400, "invalid_parameter", "input"),
        (EngineOverloadedError("full", retry_after=2.5), 429, "rate_limit_exceeded", None),
        (EngineClosedError("closed"), 503, "server_shutting_down", None),
        (EngineDeadError("secret detail"), 500, "server_error", None),
        (RuntimeError("secret detail"), 500, "server_error", None),
    ]
    for exc, status, code, param in expected:
        error = error_of(exc, stream_id="s")
        assert (error.status, error.code, error.param) == (status, code, param), exc
        assert error.stream_id == "s" and "secret" not in error.message


# Building


def build(**fields: Any) -> ResponseEvents:
    return ResponseEvents(
        response_id="resp_1",
        request=create(**fields),
        model="m",
        created_at=1700000000,
        defaults={"temperature": 0.6},
    )


def outcome(status: Any = "completed", **fields: Any) -> Outcome:
    counts = {"num_prompt_tokens": 5, "num_cached_tokens": 2, "num_output_tokens": 3}
    return Outcome(status=status, **counts, **fields)


def decode(frames: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(frame) for frame in frames]


def test_the_whole_sequence() -> None:
    events = build(max_output_tokens=9, metadata={"k": "v"}, instructions="i", stream_id="s")
    frames = [
        *events.created(),
        *events.delta("Hé"),
        *events.delta('"llo\n'),
        *events.finished(outcome()),
    ]
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1700000000,
        "status": "in_progress",
        "model": "m",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": "i",
        "metadata": {"k": "v"},
        "max_output_tokens": 9,
        "parallel_tool_calls": True,
        "temperature": 0.6,
        "top_p": 1.0,
        "top_logprobs": 0,
        "tool_choice": "auto",
        "tools": [],
        "previous_response_id": None,
        "reasoning": None,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": False,
        "background": False,
        "usage": None,
    }
    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    item = {"id": "msg_1", "type": "message", "role": "assistant"}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    part = {**empty, "text": 'Hé"llo\n'}
    done = {**item, "status": "completed", "content": [part]}
    usage = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    golden: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        {"type": "response.in_progress", "response": response},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **where, "part": empty},
        {"type": "response.output_text.delta", **where, "delta": "Hé", "logprobs": []},
        {"type": "response.output_text.delta", **where, "delta": '"llo\n', "logprobs": []},
        {"type": "response.output_text.done", **where, "text": 'Hé"llo\n', "logprobs": []},
        {"type": "response.content_part.done", **where, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {
            "type": "response.completed",
            "response": {**response, "status": "completed", "output": [done], "usage": usage},
        },
    ]
    for number, event in enumerate(golden):
        event.update(sequence_number=number, stream_id="s")
    assert decode(frames) == golden


def test_without_stream_id_none_is_echoed() -> None:
    events = build()
    frames = [*events.created(), *events.delta("x"), *events.finished(outcome())]
    assert all("stream_id" not in event for event in decode(frames))


def test_incomplete_by_length() -> None:
    events = build()
    events.created()
    events.delta("x")
    *_, item_done, terminal = decode(
        events.finished(outcome("incomplete", reason="max_output_tokens"))
    )
    assert item_done["item"]["status"] == "incomplete"
    assert terminal["type"] == "response.incomplete"
    response = terminal["response"]
    assert response["status"] == "incomplete" and response["output"] == [item_done["item"]]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_cancelled_before_any_text_has_no_item() -> None:
    events = build()
    events.created()
    (terminal,) = decode(events.finished(outcome("incomplete", reason="cancelled")))
    assert terminal["sequence_number"] == 2
    assert terminal["response"]["output"] == []
    assert terminal["response"]["incomplete_details"] == {"reason": "cancelled"}


def test_completed_without_text_has_an_empty_item() -> None:
    events = build()
    events.created()
    decoded = decode(events.finished(outcome()))
    assert [event["type"].removeprefix("response.") for event in decoded] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert decoded[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_failed_carries_the_error() -> None:
    events = build()
    events.created()
    events.delta("x")
    *_, terminal = decode(events.finished(outcome("failed", code="server_error", message="why")))
    assert terminal["type"] == "response.failed"
    assert terminal["response"]["error"] == {"code": "server_error", "message": "why"}
    assert terminal["response"]["output"][0]["content"][0]["text"] == "x"


def test_logprobs_are_in_deltas_and_at_the_end() -> None:
    entry = {"token": "x", "bytes": [120], "logprob": -0.5, "top_logprobs": []}
    events = build(top_logprobs=0)
    events.created()
    delta = decode(events.delta("x", [entry]))[-1]
    done = decode(events.finished(outcome()))
    assert delta["logprobs"] == [entry] and done[0]["logprobs"] == [entry]
    assert done[1]["part"]["logprobs"] == [entry]
