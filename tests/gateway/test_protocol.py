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
    SamplingParams,
)
from tinyvllm.gateway import json_text
from tinyvllm.gateway.events import Outcome, Transcript
from tinyvllm.gateway.protocol import (
    CancelEvent,
    CreateEvent,
    ProtocolError,
    ResumeEvent,
    StatsEvent,
    error_of,
    parse_event,
)
from tinyvllm.gateway.tools import Call


@pytest.fixture(params=["orjson", "json"], autouse=True)
def json_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything works the same without orjson."""
    if request.param == "orjson":
        pytest.importorskip("orjson")
    else:
        monkeypatch.setattr(json_text, "loads", json_text.json_loads)
        monkeypatch.setattr(json_text, "dumps", json_text.json_dumps)


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
    assert event.prompt(()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
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
    assert event.prompt(()) == [
        {"role": "system", "content": "First.\n\nSecond."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": ""},
    ]
    earlier = ({"role": "user", "content": "before"},)
    assert event.prompt(earlier)[:3] == [
        {"role": "system", "content": "First."},
        *earlier,
        {"role": "system", "content": "Second."},
    ]


def test_create_with_tools_and_what_came_of_them() -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    event = create(
        tools=[tool],
        input=[
            {"role": "user", "content": "1+2, 3+4"},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a":3}'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ],
    )
    assert event.tools == (tool,)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}},
    ]
    assert event.messages == (
        {"role": "user", "content": "1+2, 3+4"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    )


def test_create_that_goes_on() -> None:
    event = create(previous_response_id="resp_1", input=[], generate=False)
    assert (event.previous_response_id, event.messages, event.generate) == ("resp_1", (), False)
    own = {"priority": 3, "resume_seconds": 0, "timeout": 1.5, "logit_bias": None}
    event = create(tinyvllm=own)
    assert (event.priority, event.resume_seconds, event.timeout) == (3, 0.0, 1.5)


def test_a_json_schema_is_the_engines_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not this engine has it: what SamplingParams says of it is what the client gets."""
    seen: list[dict[str, Any]] = []

    def resolve(_params: None, overrides: dict[str, Any]) -> None:
        seen.append(overrides)
        if "refused" in overrides["json_schema"]:
            raise NotSupportedError("json_schema: no", param="json_schema")

    monkeypatch.setattr(SamplingParams, "resolve", resolve)
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    event = create(text={"format": wanted})
    assert event.sampling == seen[-1] == {"json_schema": {"type": "object"}}
    assert event.text_format == wanted
    create(text={"format": {"type": "json_object"}})
    assert seen[-1] == {"json_schema": {"type": "object"}}
    error = refused(text={"format": {**wanted, "schema": {"refused": 1}}})
    assert (error.code, error.param) == ("invalid_parameter", "text.format")


def test_resume_and_stats() -> None:
    resume = '{"type":"response.resume","response_id":"resp_1","starting_after":5,"stream_id":"s"}'
    assert parse_event(resume, model="m") == ResumeEvent("resp_1", 5, "s")
    resume = '{"type":"response.resume","response_id":"resp_1"}'
    assert parse_event(resume, model="m") == ResumeEvent("resp_1", -1, None)
    assert parse_event('{"type":"tinyvllm.stats"}', model="m") == StatsEvent(0.25)
    stop = '{"type":"tinyvllm.stats","interval_ms":0}'
    assert parse_event(stop, model="m") == StatsEvent(0)


def test_depth_and_size_are_bounded() -> None:
    deep: Any = "x"
    for _ in range(70):
        deep = [deep]
    error = refused(prompt_cache_options=deep)
    assert "nests at most 64" in error.message
    error = refused(prompt_cache_options=[[1] * 60_000] + [[]] * 70)
    assert "at most 50000 values" in error.message
    wide = [[]] * 100
    assert create(prompt_cache_options=wide)


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
        ({"tinyvllm": {"stop": ["x"] * 1025}}, "tinyvllm.stop"),
        ({"tinyvllm": {"logit_bias": {"x": 1}}}, "tinyvllm.logit_bias"),
        ({"tinyvllm": {"resume_seconds": -1}}, "tinyvllm.resume_seconds"),
        ({"tinyvllm": {"timeout": "x"}}, "tinyvllm.timeout"),
        ({"generate": 1}, "generate"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
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
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"tinyvllm": {"n": 2}}, "tinyvllm.n"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"type": "response.steer"}, "type"),
    ],
)
def test_what_is_not_built_says_so_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert "not supported" in error.message
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
        '{"type":"response.resume"}',
        '{"type":"response.resume","response_id":"r","starting_after":-2}',
        '{"type":"response.resume","response_id":"r","starting_after":true}',
        '{"type":"tinyvllm.stats","interval_ms":20}',
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


# What the server says


def transcript(**fields: Any) -> Transcript:
    return Transcript(
        response_id="resp_1",
        tag="5f3a09c1",
        request=create(**fields),
        model="m",
        created_at=1700000000,
        defaults={"temperature": 0.6},
    )


def outcome(status: Any = "completed", **fields: Any) -> Outcome:
    counts = {"num_prompt_tokens": 5, "num_cached_tokens": 2, "num_output_tokens": 3}
    return Outcome(status=status, **counts, **fields)


def read(log: Transcript, start: int = 0, merge: bool = False) -> list[dict[str, Any]]:
    frames = log.read(start, log.num_events, suffix=b"}", merge=merge)
    return [json.loads(frame) for frame in frames]


def test_the_whole_sequence() -> None:
    log = transcript(max_output_tokens=9, metadata={"k": "v"}, instructions="i")
    log.created()
    log.add_text("Hé")
    log.seal()
    log.add_text('"l')
    log.add_text("lo\n")  # no viewer took it: gathers
    log.finish(outcome())
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
        "tinyvllm": {"tag": "5f3a09c1"},
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
        event["sequence_number"] = number
    assert read(log) == golden
    assert read(log, 7) == golden[7:]
    (frame,) = log.read(4, 5, suffix=b',"stream_id":"s"}', merge=False)
    assert json.loads(frame) == golden[4] | {"stream_id": "s"}
    assert log.messages() == [{"role": "assistant", "content": 'Hé"llo\n'}]


def test_a_viewer_that_fell_behind_reads_several_deltas_as_one() -> None:
    log = transcript()
    log.created()
    for text in "abcde":
        log.add_text(text)
        log.seal()
    whole = read(log)
    merged = read(log, 5, merge=True)
    assert merged == [whole[-1] | {"delta": "bcde", "first_sequence_number": 5}]
    assert read(log, 8, merge=True) == [whole[-1]]  # one alone is as it was
    assert [event["sequence_number"] for event in whole] == list(range(9))


def test_function_calls_are_items() -> None:
    log = transcript(tools=[{"type": "function", "name": "add"}])
    log.created()
    log.add_text("Let me see.")
    log.add_call(Call("add", {"a": 1}), "fc_1", "call_1")
    log.add_text("Done.")
    log.finish(outcome())
    events = read(log)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events[5:-6]]
    assert kinds == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
    ]
    call = {
        "id": "fc_1",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "add",
        "arguments": '{"a":1}',
    }
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert output[1] == call and output[2]["content"][0]["text"] == "Done."
    assert len({item["id"] for item in output}) == 3
    function = {"name": "add", "arguments": {"a": 1}}
    assert log.messages() == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "assistant", "content": "Done."},
    ]


def test_incomplete_by_length() -> None:
    log = transcript()
    log.created()
    log.add_text("x")
    log.finish(outcome("incomplete", reason="max_output_tokens"))
    *_, item_done, terminal = read(log)
    assert item_done["item"]["status"] == "incomplete"
    assert terminal["type"] == "response.incomplete"
    response = terminal["response"]
    assert response["status"] == "incomplete" and response["output"] == [item_done["item"]]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_cancelled_before_any_text_has_no_item() -> None:
    log = transcript()
    log.created()
    log.finish(outcome("incomplete", reason="cancelled"))
    terminal = read(log)[-1]
    assert terminal["sequence_number"] == 2
    assert terminal["response"]["output"] == []
    assert terminal["response"]["incomplete_details"] == {"reason": "cancelled"}


def test_completed_without_text_has_an_empty_item() -> None:
    log = transcript()
    log.created()
    log.finish(outcome())
    events = read(log, 2)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_failed_keeps_its_partial_text() -> None:
    log = transcript()
    log.created()
    log.add_text("par")
    log.finish(outcome("failed", code="server_error", message="why"))
    terminal = read(log)[-1]
    assert terminal["type"] == "response.failed"
    assert terminal["response"]["error"] == {"code": "server_error", "message": "why"}
    assert terminal["response"]["output"][0]["content"][0]["text"] == "par"


def test_logprobs_go_with_their_text_and_add_up() -> None:
    log = transcript(top_logprobs=0)
    log.created()
    entries = [
        {"token": token, "bytes": [97], "logprob": -0.5, "top_logprobs": []} for token in "abc"
    ]
    log.add_logprob(entries[0])  # of a token that is held back
    log.add_logprob(entries[1])
    log.add_text("ab")
    log.seal()
    log.add_logprob(entries[2])
    log.add_text("c")
    log.finish(outcome())
    events = read(log)
    assert events[4]["logprobs"] == entries[:2] and events[5]["logprobs"] == entries[2:]
    assert events[6]["logprobs"] == entries
    assert read(log, 4, merge=True)[0]["logprobs"] == entries


def test_logprobs_without_text_hold_nothing_back() -> None:
    """No reader can take them from the log, so a response must not wait for that."""
    entry = {"token": "", "bytes": [], "logprob": -0.5, "top_logprobs": []}
    log = transcript(top_logprobs=0)
    log.created()
    for _ in range(100):
        log.add_logprob(entry)
    log.seal()
    assert log.pending_size == 0
    log.add_text("a")
    assert log.pending_size > 100
    log.seal()
    assert log.pending_size == 0 and len(read(log)[4]["logprobs"]) == 100
    # Those of a call's tokens are of no text.
    log.add_logprob(entry)
    log.add_call(Call("f", {}), "fc_1", "call_1")
    log.add_text("b")
    log.finish(outcome())
    assert [e["logprobs"] for e in read(log) if e["type"] == "response.output_text.delta"][1] == []


def test_text_that_is_no_unicode_fails_its_response_alone() -> None:
    log = transcript()
    log.created()
    log.add_text("ok")
    log.seal()
    log.add_text("\ud800")
    with pytest.raises((TypeError, ValueError)):
        log.seal()
    log.finish(outcome("failed", code="server_error", message="m"))
    events = read(log)
    assert events[-1]["type"] == "response.failed" and events[4]["delta"] == "ok"


def test_a_log_that_is_forgotten_leaves_the_response() -> None:
    log = transcript()
    log.created()
    log.add_text("x")
    log.finish(outcome())
    log.forget()
    assert log.num_events == 0 and log.ended
    assert log.response()["output"][0]["content"][0]["text"] == "x"
