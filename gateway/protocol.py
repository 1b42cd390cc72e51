"""OpenAI's Responses over WebSocket, without I/O: client events parsed, server events built.

`parse_event` turns one text frame into a `CreateEvent` or a `CancelEvent`, or raises a
`ProtocolError` that knows its own error event. `ResponseEvents` builds the events of one response,
numbered without gaps, in the order that strict clients expect:

    created, in_progress
    output_item.added, content_part.added      with the first text
    output_text.delta ...
    output_text.done, content_part.done, output_item.done
    completed | incomplete | failed            exactly one, always the last
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from tinyvllm import (
    ContextLengthError,
    EngineClosedError,
    EngineOverloadedError,
    InvalidParameterError,
    SamplingParams,
    TokenizerError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def json_loads(text: str) -> Any:
    """The standard library's parser, as strict as orjson. Raises ValueError or RecursionError."""
    value = json.loads(text, parse_constant=_no_constant)
    # A lone surrogate ("\\ud800") has no UTF-8 form, and no tokenizer takes it.
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


loads: Callable[[str], Any] = json_loads
dumps: Callable[[object], bytes] = json_dumps
if importlib.util.find_spec("orjson") is not None:
    orjson: Any = importlib.import_module("orjson")  # optional, so untyped: lint may not have it
    loads, dumps = orjson.loads, orjson.dumps

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_MAX_MESSAGE = 500
"""Characters of an error message: it may quote what the client sent."""
_MAX_ITEMS = 2048
"""Messages of an input, and parts of a message."""
_MAX_LIST = 64
"""Entries of a list under `tinyvllm` (stop strings, token ids)."""

_KNOWN_EVENTS_NOT_YET = frozenset({"response.resume", "response.steer", "tinyvllm.stats"})

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
    "generate": (None, True),
    "image": (None,),
    "moderation": (None,),
    "multi_agent": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "tool_choice": (None, "auto", "none"),
    "tools": (None, []),
    "truncation": (None, "disabled"),
}
_OWN = frozenset(
    {
        "type",
        "stream_id",
        "model",
        "input",
        "instructions",
        "temperature",
        "top_p",
        "max_output_tokens",
        "top_logprobs",
        "metadata",
        "text",
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
_ENGINE_PARAMS = frozenset(
    f.name for f in dataclasses.fields(SamplingParams) if f.name not in _OPENAI_NAMES
)
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

    def event(self) -> bytes:
        """The `error` event: no response came of the client's event."""
        body: dict[str, Any] = {
            "type": "error",
            "status": self.status,
            "error": {
                "type": _error_type(self.status),
                "code": self.code,
                "message": self.message,
                "param": self.param,
            },
        }
        if self.stream_id is not None:
            body["stream_id"] = self.stream_id
        return dumps(body)


@dataclass(frozen=True, slots=True)
class CreateEvent:
    """A valid response.create."""

    stream_id: str | None
    messages: tuple[dict[str, str], ...]
    """Chat messages, `role` and `content`, instructions first."""
    sampling: dict[str, Any]
    """Keyword arguments for `engine.chat`: what the client chose, in SamplingParams' names."""
    priority: int
    instructions: str | None
    metadata: dict[str, str]
    top_logprobs: int | None


@dataclass(frozen=True, slots=True)
class CancelEvent:
    """response.cancel: one response by its id, else everything in one lane."""

    response_id: str | None
    stream_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a response ended. `reason` is for incomplete, `code` and `message` for failed."""

    status: Literal["completed", "incomplete", "failed"]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    reason: Literal["max_output_tokens", "cancelled"] | None = None
    code: str | None = None
    message: str | None = None


# Parsing


def parse_event(message: str | bytes, *, model: str) -> CreateEvent | CancelEvent:
    """One WebSocket message as an event. `model` is the name that is served.

    Raises `ProtocolError` for anything else, never another exception.
    """
    if not isinstance(message, str):
        raise ProtocolError("events are JSON in text frames; this was a binary frame")
    try:
        event = loads(message)
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
        kind = event.get("type")
        if kind == "response.create":
            return _parse_create(event, stream_id, model)
        if kind == "response.cancel":
            return _parse_cancel(event, stream_id)
        if isinstance(kind, str) and kind in _KNOWN_EVENTS_NOT_YET:
            raise ProtocolError(f"{kind} is not supported yet", param="type")
        raise ProtocolError(
            f"type must be response.create or response.cancel; got {_show(kind)}", param="type"
        )
    except ProtocolError as error:
        error.stream_id = stream_id
        raise


def _parse_cancel(event: dict[str, Any], stream_id: str | None) -> CancelEvent:
    response_id = event.get("response_id")
    if response_id is not None and not isinstance(response_id, str):
        raise _fail("response_id", "a string", response_id)
    return CancelEvent(response_id=response_id, stream_id=stream_id)


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
        elif name in _ENGINE_PARAMS or name == "priority":
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
    _check_text_format(event.get("text"))
    instructions = event.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise _fail("instructions", "a string", instructions)
    messages = _parse_input(event.get("input"))
    if instructions:
        if messages and messages[0]["role"] == "system":
            first = messages.pop(0)["content"]
            instructions_and_system = f"{instructions}\n\n{first}"
        else:
            instructions_and_system = instructions
        messages.insert(0, {"role": "system", "content": instructions_and_system})
    sampling, priority = _parse_sampling(event)
    return CreateEvent(
        stream_id=stream_id,
        messages=tuple(messages),
        sampling=sampling,
        priority=priority,
        instructions=instructions,
        metadata=_parse_metadata(event.get("metadata")),
        top_logprobs=sampling.get("logprobs"),
    )


def _parse_sampling(event: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The client's sampling parameters, checked as far as that is possible without the model."""
    sampling: dict[str, Any] = {}
    for name, openai_name in _OPENAI_NAMES.items():
        value = event.get(openai_name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or _is_huge(value):
            raise _fail(openai_name, "a number", value)
        sampling[name] = value
    include = event.get("include")
    if isinstance(include, list) and "message.output_text.logprobs" in include:
        sampling.setdefault("logprobs", 0)
    extra = event.get("tinyvllm")
    if extra is None:
        extra = {}
    if not isinstance(extra, dict):
        raise _fail("tinyvllm", "an object of engine parameters", extra)
    priority = extra.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > 2**31:
        raise _fail("tinyvllm.priority", "an integer within 32 bits", priority)
    for name, value in extra.items():
        param = f"tinyvllm.{_clip(name)}"
        if name == "priority":
            continue
        if name in _OPENAI_NAMES:
            raise ProtocolError(
                f"{name} goes at the top of the event, as {_OPENAI_NAMES[name]}", param=param
            )
        if name not in _ENGINE_PARAMS:
            raise ProtocolError(
                f"unknown engine parameter {_show(name)}; there are priority, "
                f"{', '.join(sorted(_ENGINE_PARAMS))}",
                param=param,
            )
        if isinstance(value, dict) and value:
            raise ProtocolError(f"{name} is not supported yet as an object", param=param)
        if isinstance(value, list) and (
            len(value) > _MAX_LIST or any(isinstance(entry, list | dict) for entry in value)
        ):
            raise _fail(param, f"a flat list of at most {_MAX_LIST} entries", value)
        if _is_huge(value):
            raise _fail(param, "a number within 64 bits", value)
        sampling[name] = value
    try:
        SamplingParams(**sampling)
    except InvalidParameterError as exc:
        raise error_of(exc) from None
    return sampling, priority


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


def _check_text_format(text: object) -> None:
    if text is None:
        return
    if not isinstance(text, dict):
        raise _fail("text", "an object", text)
    kind = text.get("format")
    if kind is None:
        return
    if not isinstance(kind, dict) or not isinstance(kind.get("type"), str):
        raise _fail("text.format", "an object with a type", kind)
    if kind["type"] != "text":
        raise ProtocolError(
            f"text.format.type {_show(kind['type'])} is not supported yet", param="text.format"
        )


def _parse_input(value: object) -> list[dict[str, str]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _fail("input", "a string or a non-empty list of messages", value)
    if len(value) > _MAX_ITEMS:
        raise _fail("input", f"a list of at most {_MAX_ITEMS} messages", value)
    return [_parse_message(item, f"input[{index}]") for index, item in enumerate(value)]


def _parse_message(item: object, where: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise _fail(where, "a message object", item)
    kind = item.get("type", "message")
    if kind != "message":
        if not isinstance(kind, str):
            raise _fail(f"{where}.type", '"message"', kind)
        raise ProtocolError(f"input item {_show(kind)} is not supported yet", param=f"{where}.type")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _fail(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    content = item.get("content")
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": content}
    if not isinstance(content, list) or len(content) > _MAX_ITEMS:
        want = f"a string or a list of at most {_MAX_ITEMS} parts"
        raise _fail(f"{where}.content", want, content)
    parts = [_parse_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    return {"role": _ROLES[role], "content": "".join(parts)}


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
    if isinstance(exc, ContextLengthError):
        return ProtocolError(
            str(exc), code="context_length_exceeded", param="input", stream_id=stream_id
        )
    if isinstance(exc, InvalidParameterError):
        name = exc.param
        if name is not None:
            name = _OPENAI_NAMES.get(name, f"tinyvllm.{name}" if name in _ENGINE_PARAMS else name)
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
        return ProtocolError(
            "the server is shutting down",
            code="server_shutting_down",
            status=503,
            stream_id=stream_id,
        )
    return ProtocolError(
        "the engine failed; the server's log says why",
        code="server_error",
        status=500,
        stream_id=stream_id,
    )


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


# Building


@dataclass(slots=True, kw_only=True)
class ResponseEvents:
    """Builds the events of one response, each a JSON text frame as UTF-8 bytes.

    Call `created` once, `delta` any number of times, `finished` once. The concatenated deltas are
    the text of `output_text.done`.
    """

    response_id: str
    request: CreateEvent
    model: str
    created_at: int
    """Unix time, seconds."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """The model's own sampling parameters, echoed where the request chose none."""
    _sequence_number: int = field(default=0, init=False)
    _item_id: str = field(default="", init=False)
    _text: list[str] = field(default_factory=list, init=False)
    _logprobs: list[dict[str, Any]] = field(default_factory=list, init=False)
    _delta_prefix: bytes = field(default=b"", init=False)
    _suffix: bytes = field(default=b"}", init=False)

    def __post_init__(self) -> None:
        self._item_id = "msg_" + self.response_id.removeprefix("resp_")
        if self.request.stream_id is not None:
            self._suffix = b',"stream_id":' + dumps(self.request.stream_id) + b"}"
        # The one event that is built per token: everything but text and number is constant.
        constant = {"type": "response.output_text.delta", **self._position()}
        self._delta_prefix = dumps(constant)[:-1] + b',"delta":'

    def created(self) -> list[bytes]:
        """The request was accepted."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[bytes]:
        """More text; `logprobs` has one entry per token of it when the request asked for them."""
        encoded = dumps(text)
        frames = [] if self._text else self._open_item()
        self._text.append(text)
        if logprobs:
            self._logprobs.extend(logprobs)
        frames.append(
            b'%b%b,"logprobs":%b,"sequence_number":%d%b'
            % (
                self._delta_prefix,
                encoded,
                dumps(logprobs) if logprobs else b"[]",
                self._next(),
                self._suffix,
            )
        )
        return frames

    def finished(self, outcome: Outcome) -> list[bytes]:
        """The end: closes the item, if there is one, and gives the terminal event.

        A completed response always has an item, even with no text. One that was cancelled or
        failed before its first text has none.
        """
        frames: list[bytes] = []
        output: list[dict[str, Any]] = []
        if outcome.status == "completed" and not self._text:
            frames += self._open_item()
            self._text.append("")
        if self._text:
            text = "".join(self._text)
            part = self._part(text, self._logprobs)
            status = "completed" if outcome.status == "completed" else "incomplete"
            item = self._item(status, [part])
            output.append(item)
            frames += [
                self._event(
                    "response.output_text.done",
                    **self._position(),
                    text=text,
                    logprobs=self._logprobs,
                ),
                self._event("response.content_part.done", **self._position(), part=part),
                self._event("response.output_item.done", output_index=0, item=item),
            ]
        response = self._response(outcome.status, output=output, usage=_usage(outcome))
        if outcome.status == "incomplete":
            response["incomplete_details"] = {"reason": outcome.reason}
        if outcome.status == "failed":
            response["error"] = {"code": outcome.code, "message": outcome.message}
        frames.append(self._event(f"response.{outcome.status}", response=response))
        return frames

    def _open_item(self) -> list[bytes]:
        return [
            self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress", [])
            ),
            self._event("response.content_part.added", **self._position(), part=self._part("", [])),
        ]

    def _next(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number

    def _event(self, kind: str, **fields: object) -> bytes:
        body = dumps({"type": kind, **fields, "sequence_number": self._next()})
        return body[:-1] + self._suffix

    def _position(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _response(
        self,
        status: str,
        *,
        output: list[dict[str, Any]] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        request = self.request
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "model": self.model,
            "output": output or [],
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "max_output_tokens": request.sampling.get("max_tokens"),
            "parallel_tool_calls": True,
            "temperature": self._chosen("temperature"),
            "top_p": self._chosen("top_p"),
            "top_logprobs": request.top_logprobs or 0,
            "tool_choice": "auto",
            "tools": [],
            "previous_response_id": None,
            "reasoning": None,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "usage": usage,
        }

    def _chosen(self, name: str) -> float:
        value: float = self.request.sampling.get(name, self.defaults.get(name, 1.0))
        return value


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "input_tokens": outcome.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": outcome.num_cached_tokens},
        "output_tokens": outcome.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": outcome.num_prompt_tokens + outcome.num_output_tokens,
    }
