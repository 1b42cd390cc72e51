"""OpenAI's Responses over WebSocket, without I/O: one text frame in, one event out.

`parse_event` turns a frame into a `CreateEvent`, `CancelEvent`, `ResumeEvent` or `StatsEvent`, or
raises a `ProtocolError` that knows its own error event. What the server says is in `events.py`.

    response.create   fields of POST /v1/responses, `stream_id`, `generate`; ours: `tinyvllm`
    response.cancel   {response_id} or {stream_id}; ours, shaped as in OpenAI's Realtime API
    response.resume   {response_id, starting_after, stream_id}; ours: go on, or watch as well
    tinyvllm.stats    {interval_ms}; ours: be told a few times a second what the engine does
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Final

from tinyvllm import (
    ContextLengthError,
    EngineClosedError,
    EngineOverloadedError,
    InvalidParameterError,
    SamplingParams,
    TokenizerError,
)
from tinyvllm.gateway import json_text

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_MESSAGE = 500
"""Characters of an error message: it may quote what the client sent."""
_MAX_ITEMS = 2048
"""Messages of an input, and parts of a message."""
_MAX_LIST = 1024
"""Entries of a list under `tinyvllm` (stop strings, token ids)."""
_MAX_TOOLS = 128
_MAX_DEPTH = 64
"""Objects and lists within each other."""
_MAX_NODES = 50_000
"""Values of one event, in all its lists and objects."""
_STATS_INTERVAL = (0.1, 10.0)

# Fields of OpenAI's response.create that change nothing here, whatever their value: hints, labels,
# and what WebSocket mode makes implicit.
_TOLERATED = frozenset(
    {
        "access_programs",
        "background_options",
        "event_id",
        "include",
        "max_tool_calls",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "user",
    }
)
# Fields that ask for something that is not built: only these neutral values pass.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "image": (None,),
    "moderation": (None,),
    "multi_agent": (None,),
    "prompt": (None,),
    "tool_choice": (None, "auto", "none"),
    "truncation": (None, "disabled"),
}
_OWN = frozenset(
    {
        "type",
        "stream_id",
        "model",
        "input",
        "instructions",
        "previous_response_id",
        "generate",
        "temperature",
        "top_p",
        "max_output_tokens",
        "top_logprobs",
        "metadata",
        "text",
        "tools",
        "tinyvllm",
    }
)
# SamplingParams that have a name of their own in OpenAI's event.
_OPENAI_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
# SamplingParams with no place in a stream of one answer.
_NOT_SERVED = frozenset({"n", "prompt_logprobs"})
_ENGINE_PARAMS = (
    frozenset(f.name for f in dataclasses.fields(SamplingParams))
    - frozenset(_OPENAI_NAMES)
    - _NOT_SERVED
)
# What `tinyvllm` holds beside the engine's sampling parameters.
_REQUEST_PARAMS = ("priority", "resume_seconds", "timeout")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class ProtocolError(Exception):
    """One event of the client cannot be obeyed; the socket stays usable.

    `status` is what HTTP would answer, `code` is for programs, `param` names the field at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_parameter",
        status: int = 400,
        param: str | None = None,
        stream_id: str | None = None,
    ) -> None:
        message = _clip(message)
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.param = param
        self.stream_id = stream_id

    def body(self) -> dict[str, Any]:
        """The error object, as in OpenAI's HTTP API."""
        return {
            "type": _error_type(self.status),
            "code": self.code,
            "message": self.message,
            "param": self.param,
        }

    def event(self) -> bytes:
        """The `error` event: no response came of the client's event."""
        event: dict[str, Any] = {"type": "error", "status": self.status, "error": self.body()}
        if self.stream_id is not None:
            event["stream_id"] = self.stream_id
        return json_text.dumps(event)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateEvent:
    """A valid response.create."""

    stream_id: str | None
    messages: tuple[dict[str, Any], ...]
    """The input alone, as chat messages for the engine."""
    instructions: str | None
    previous_response_id: str | None
    generate: bool
    """False: only put the conversation into the prefix cache."""
    sampling: dict[str, Any]
    """Keyword arguments for `engine.chat`: what the client chose, in SamplingParams' names."""
    priority: int
    timeout: float | None
    """Seconds until the engine gives up on it."""
    resume_seconds: float | None
    """How long it outlives its last socket; None: as the gateway is set."""
    tools: tuple[dict[str, Any], ...]
    """As they came: OpenAI's function tools."""
    tool_choice: str
    text_format: dict[str, Any]
    metadata: dict[str, str]
    top_logprobs: int | None

    def prompt(self, history: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
        """The messages for the engine: instructions, the conversation before, this input."""
        messages = [*history, *self.messages]
        if not self.instructions:
            return messages
        content = self.instructions
        # Templates take one system message, the first.
        if messages and messages[0]["role"] == "system":
            content = f"{content}\n\n{messages.pop(0)['content']}"
        return [{"role": "system", "content": content}, *messages]


@dataclass(frozen=True, slots=True)
class CancelEvent:
    """response.cancel: one response by its id, else everything in one lane."""

    response_id: str | None
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class ResumeEvent:
    """response.resume: every event after number `starting_after`, then live."""

    response_id: str
    starting_after: int
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class StatsEvent:
    """tinyvllm.stats: a snapshot every `interval` seconds; 0 ends it."""

    interval: float


ClientEvent = CreateEvent | CancelEvent | ResumeEvent | StatsEvent


def parse_event(message: str | bytes, *, model: str) -> ClientEvent:
    """One WebSocket message as an event. `model` is the name that is served.

    Raises `ProtocolError` for anything else, never another exception.
    """
    if not isinstance(message, str):
        raise ProtocolError("events are JSON in text frames; this was a binary frame")
    try:
        event = json_text.loads(message)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"the event is not valid JSON: {exc}") from None
    if not isinstance(event, dict):
        raise ProtocolError(f"an event is a JSON object; got {_show(event)}")
    stream_id = event.get("stream_id")
    if stream_id is not None and not (
        isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)
    ):
        raise ProtocolError(
            f"stream_id must be 1 to 256 of [A-Za-z0-9_.-]; got {_show(stream_id)}",
            code="invalid_stream_id",
            param="stream_id",
        )
    try:
        # Few brackets cannot nest deeply: most events are never walked.
        if message.count("[") + message.count("{") > _MAX_DEPTH:
            _check_size(event)
        kind = event.get("type")
        if kind == "response.create":
            return _parse_create(event, stream_id, model)
        if kind == "response.cancel":
            return CancelEvent(_optional_str(event, "response_id"), stream_id)
        if kind == "response.resume":
            return _parse_resume(event, stream_id)
        if kind == "tinyvllm.stats":
            return _parse_stats(event)
        if kind == "response.steer":
            raise ProtocolError(f"{kind} is not supported yet", param="type")
        raise ProtocolError(
            "type must be response.create, response.cancel, response.resume or tinyvllm.stats; "
            f"got {_show(kind)}",
            param="type",
        )
    except ProtocolError as error:
        error.stream_id = stream_id
        raise


def _check_size(event: dict[str, Any]) -> None:
    level: list[Any] = [event]
    num_nodes = 0
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        num_nodes += len(inner)
        if num_nodes > _MAX_NODES:
            raise ProtocolError(f"an event has at most {_MAX_NODES} values")
        if not inner:
            return
        level = inner
    raise ProtocolError(f"an event nests at most {_MAX_DEPTH} deep")


def _parse_resume(event: dict[str, Any], stream_id: str | None) -> ResumeEvent:
    response_id = _optional_str(event, "response_id")
    if response_id is None:
        raise _fail("response_id", "the id of a response", None)
    starting_after = event.get("starting_after")
    if starting_after is None:
        starting_after = -1
    if not _is_int(starting_after) or not -1 <= starting_after < 2**63:
        raise _fail("starting_after", "a sequence number, or -1", starting_after)
    return ResumeEvent(response_id, starting_after, stream_id)


def _parse_stats(event: dict[str, Any]) -> StatsEvent:
    value = event.get("interval_ms", 250)
    low, high = _STATS_INTERVAL
    if not _is_number(value) or not (value == 0 or low <= value / 1000 <= high):
        raise _fail("interval_ms", f"0 or from {low * 1000:g} to {high * 1000:g}", value)
    return StatsEvent(value / 1000)


def _parse_create(event: dict[str, Any], stream_id: str | None, model: str) -> CreateEvent:
    for name, value in event.items():
        if name in _OWN or name in _TOLERATED:
            continue
        if name in _NOT_YET:
            if value not in _NOT_YET[name]:
                raise ProtocolError(
                    f"{name} is not supported yet; got {_show(value)}", param=_clip(name)
                )
        elif name in _OPENAI_NAMES:
            raise ProtocolError(f"unknown field {name!r}: use {_OPENAI_NAMES[name]}", param=name)
        elif name in _ENGINE_PARAMS or name in _REQUEST_PARAMS:
            raise ProtocolError(
                f"{name} is an engine parameter: send it as tinyvllm: {{{name}: ...}}", param=name
            )
        else:
            raise ProtocolError(f"unknown field {_show(name)}", param=_clip(name))
    asked = event.get("model")
    if asked is not None and asked != model:
        raise ProtocolError(
            f"the model {_show(asked)} is not served here; this gateway serves {model!r}",
            code="model_not_found",
            status=404,
            param="model",
        )
    generate = event.get("generate")
    if generate is not None and not isinstance(generate, bool):
        raise _fail("generate", "true or false", generate)
    previous = _optional_str(event, "previous_response_id")
    extra = event.get("tinyvllm")
    if extra is None:
        extra = {}
    if not isinstance(extra, dict):
        raise _fail("tinyvllm", "an object of engine parameters", extra)
    text_format, constraint = _parse_text_format(event.get("text"))
    sampling = _parse_sampling(event, extra, constraint)
    return CreateEvent(
        stream_id=stream_id,
        messages=tuple(_parse_input(event.get("input"), may_be_empty=previous is not None)),
        instructions=_optional_str(event, "instructions"),
        previous_response_id=previous,
        generate=generate is not False,
        sampling=sampling,
        priority=_parse_priority(extra.get("priority", 0)),
        timeout=_parse_seconds(extra, "timeout"),
        resume_seconds=_parse_seconds(extra, "resume_seconds"),
        tools=_parse_tools(event.get("tools")),
        tool_choice=event.get("tool_choice") or "auto",
        text_format=text_format,
        metadata=_parse_metadata(event.get("metadata")),
        top_logprobs=sampling.get("logprobs"),
    )


def _parse_priority(value: object) -> int:
    if not _is_int(value) or abs(value) > 2**31:  # type: ignore[arg-type]
        raise _fail("tinyvllm.priority", "an integer within 32 bits", value)
    assert isinstance(value, int)
    return value


def _parse_seconds(extra: dict[str, Any], name: str) -> float | None:
    value = extra.get(name)
    if value is None:
        return None
    if not _is_number(value) or not 0 <= value <= 86400:
        raise _fail(f"tinyvllm.{name}", "seconds, from 0 to 86400", value)
    return float(value)


def _parse_sampling(
    event: dict[str, Any], extra: dict[str, Any], constraint: dict[str, Any] | None
) -> dict[str, Any]:
    """The client's sampling parameters, checked as far as that is possible without the model."""
    sampling: dict[str, Any] = {}
    for name, openai_name in _OPENAI_NAMES.items():
        value = event.get(openai_name)
        if value is None:
            continue
        if not _is_number(value) or _is_huge(value):
            raise _fail(openai_name, "a number", value)
        sampling[name] = value
    include = event.get("include")
    if isinstance(include, list) and "message.output_text.logprobs" in include:
        sampling.setdefault("logprobs", 0)
    for name, value in extra.items():
        if name in _REQUEST_PARAMS:
            continue
        param = f"tinyvllm.{_clip(name)}"
        if name in _OPENAI_NAMES:
            raise ProtocolError(
                f"{name} goes at the top of the event, as {_OPENAI_NAMES[name]}", param=param
            )
        if name in _NOT_SERVED:
            raise ProtocolError(f"{name} is not supported in a response", param=param)
        if name not in _ENGINE_PARAMS:
            raise ProtocolError(
                f"unknown engine parameter {_show(name)}; there are "
                f"{', '.join(sorted([*_REQUEST_PARAMS, *_ENGINE_PARAMS]))}",
                param=param,
            )
        sampling[name] = _engine_value(param, name, value)
    if constraint is not None:
        # Also where this engine has no such parameter: then it says so, in SamplingParams' words.
        sampling["json_schema"] = constraint
    try:
        SamplingParams.resolve(None, sampling)
    except InvalidParameterError as exc:
        error = error_of(exc)
        if constraint is not None and exc.param == "json_schema":
            error.param = "text.format"
        raise error from None
    return sampling


def _engine_value(param: str, name: str, value: Any) -> Any:
    """A value under `tinyvllm` for SamplingParams, which checks it further."""
    if name == "logit_bias" and isinstance(value, dict):
        # JSON has no integer keys.
        try:
            return {int(key): bias for key, bias in value.items()}
        except ValueError:
            raise _fail(param, "an object of token id: bias", value) from None
    if isinstance(value, list) and (
        len(value) > _MAX_LIST or any(isinstance(entry, list | dict) for entry in value)
    ):
        raise _fail(param, f"a flat list of at most {_MAX_LIST} entries", value)
    if _is_huge(value):
        raise _fail(param, "a number within 64 bits", value)
    return value


def _parse_metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if (
        not isinstance(value, dict)
        or len(value) > 16
        or not all(
            isinstance(entry, str) and len(key) <= 64 and len(entry) <= 512
            for key, entry in value.items()
        )
    ):
        raise _fail(
            "metadata", "an object of at most 16 strings (keys to 64, values to 512 long)", value
        )
    return value


def _parse_text_format(text: object) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """`text.format` to echo, and the JSON schema that it asks for."""
    plain: dict[str, Any] = {"type": "text"}
    if text is None:
        return plain, None
    if not isinstance(text, dict):
        raise _fail("text", "an object", text)
    wanted = text.get("format")
    if wanted is None:
        return plain, None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if not isinstance(wanted, dict) or not isinstance(kind, str):
        raise _fail("text.format", "an object with a type", wanted)
    if kind == "text":
        return plain, None
    if kind == "json_object":
        return wanted, {"type": "object"}
    if kind == "json_schema":
        schema = wanted.get("schema")
        if not isinstance(schema, dict):
            raise _fail("text.format.schema", "a JSON schema object", schema)
        return wanted, schema
    raise ProtocolError(f"text.format.type {_show(kind)} is not supported yet", param="text.format")


def _parse_tools(value: object) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_TOOLS:
        raise _fail("tools", f"a list of at most {_MAX_TOOLS} tools", value)
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise _fail(where, "a tool object", tool)
        if tool.get("type") != "function":
            raise ProtocolError(
                f"{where}: a tool of type {_show(tool.get('type'))} is not supported yet; "
                "only function is",
                param=f"{where}.type",
            )
        name = tool.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise _fail(f"{where}.name", "1 to 64 of [A-Za-z0-9_-]", name)
        if not isinstance(tool.get("description"), str | None):
            raise _fail(f"{where}.description", "a string", tool["description"])
        if not isinstance(tool.get("parameters"), dict | None):
            raise _fail(f"{where}.parameters", "a JSON schema object", tool["parameters"])
    return tuple(value)


def _parse_input(value: object, *, may_be_empty: bool) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if may_be_empty and (value is None or value == []):
        return []
    if not isinstance(value, list) or not value:
        raise _fail("input", "a string or a non-empty list of messages", value)
    if len(value) > _MAX_ITEMS:
        raise _fail("input", f"a list of at most {_MAX_ITEMS} messages", value)
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        message = _parse_item(item, f"input[{index}]")
        last = messages[-1] if messages else {}
        if message is None:
            continue
        if "tool_calls" in message and "tool_calls" in last:
            # Calls made at once are one message of the assistant.
            last["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
    return messages


def _parse_item(item: object, where: str) -> dict[str, Any] | None:
    """One input item as a chat message; None for one that says nothing to the model."""
    if not isinstance(item, dict):
        raise _fail(where, "a message object", item)
    kind = item.get("type", "message")
    if kind == "message":
        return _parse_message(item, where)
    if kind == "reasoning":
        return None
    if kind == "function_call":
        arguments = _item_str(item, "arguments", where)
        try:
            parsed = json_text.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise _fail(f"{where}.arguments", "a JSON object as a string", arguments)
        return tool_call_message(
            _item_str(item, "call_id", where), _item_str(item, "name", where), parsed
        )
    if kind == "function_call_output":
        call_id = _item_str(item, "call_id", where)
        content = _parse_content(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    if not isinstance(kind, str):
        raise _fail(f"{where}.type", '"message"', kind)
    raise ProtocolError(f"input item {_show(kind)} is not supported yet", param=f"{where}.type")


def tool_call_message(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call that the assistant made, as chat templates want it."""
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _parse_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _fail(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = _parse_content(item.get("content"), f"{where}.content")
    return {"role": _ROLES[role], "content": content}


def _parse_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > _MAX_ITEMS:
        raise _fail(where, f"a string or a list of at most {_MAX_ITEMS} parts", content)
    return "".join(_parse_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _parse_part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise _fail(where, "a content part object", part)
    kind = part.get("type")
    if kind not in ("input_text", "output_text", "text"):
        if not isinstance(kind, str):
            raise _fail(f"{where}.type", "input_text or output_text", kind)
        raise ProtocolError(
            f"content part {_show(kind)} is not supported yet", param=f"{where}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise _fail(f"{where}.text", "a string", text)
    return text


def error_of(exc: Exception, *, stream_id: str | None = None) -> ProtocolError:
    """What a client is told about an exception of the engine.

    Messages of tinyvllm's own errors are made for users; anything else stays in the server's log.
    """
    if isinstance(exc, ProtocolError):
        return exc
    if isinstance(exc, ContextLengthError):
        return ProtocolError(
            str(exc), code="context_length_exceeded", param="input", stream_id=stream_id
        )
    if isinstance(exc, InvalidParameterError):
        name = exc.param
        if name is not None:
            name = _OPENAI_NAMES.get(name, f"tinyvllm.{name}" if name in _ENGINE_PARAMS else name)
            name = "input" if name in ("messages", "prompt") else name
        return ProtocolError(str(exc), param=name, stream_id=stream_id)
    if isinstance(exc, TokenizerError):
        return ProtocolError(str(exc), param="input", stream_id=stream_id)
    if isinstance(exc, EngineOverloadedError):
        return ProtocolError(
            f"{exc} (retry after {exc.retry_after:.3g} s)",
            code="rate_limit_exceeded",
            status=429,
            stream_id=stream_id,
        )
    if isinstance(exc, EngineClosedError):
        return shutting_down(stream_id)
    return ProtocolError(
        "the engine failed; the server's log says why",
        code="server_error",
        status=500,
        stream_id=stream_id,
    )


def shutting_down(stream_id: str | None = None) -> ProtocolError:
    return ProtocolError(
        "the server is shutting down",
        code="server_shutting_down",
        status=503,
        stream_id=stream_id,
    )


def _optional_str(event: dict[str, Any], name: str) -> str | None:
    value = event.get(name)
    if value is not None and not isinstance(value, str):
        raise _fail(name, "a string", value)
    return value


def _item_str(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _fail(f"{where}.{name}", "a string", value)
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_huge(value: object) -> bool:
    """Integers that no float can hold break arithmetic instead of comparing as out of range."""
    return isinstance(value, int) and abs(value) >= 2**63


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _fail(param: str, want: str, value: object) -> ProtocolError:
    return ProtocolError(f"{param} must be {want}; got {_show(value)}", param=param)


def _show(value: object) -> str:
    """A value for an error message: short, and safe for any nesting."""
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _clip(repr(value), 80)


def _clip(text: str, limit: int = _MAX_MESSAGE) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
