"""Function tools: into the chat template, and calls back out of the model's text. No I/O.

Models say their calls in the text they were trained to write. Three ways are known here:

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>     Hermes, Qwen; among other text
    {"name": "f", "parameters": {...}}                            Llama 3; the whole answer
    [{"name": "f", "arguments": {...}}, ...]                      Mistral; the whole answer

Only names that the request offered are calls. Everything else stays text, and nothing is lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyvllm.gateway import json_text

if TYPE_CHECKING:
    from collections.abc import Iterable

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# How an answer begins that is a call as a whole; looked at when this much of it is there.
_WHOLE = re.compile(r'\s*\[?\s*\{\s*"(name|type|function|arguments|parameters)"')
_WHOLE_CHARS = 40


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function that the model asks for."""

    name: str
    arguments: dict[str, Any]

    @property
    def arguments_json(self) -> str:
        return json_text.dumps(self.arguments).decode()


def template_tools(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a response.create in the shape that chat templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


class CallParser:
    """Splits an answer that grows into text and calls. Holds back what may become a call."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._started = False  # some text, or a call, is out: the answer is no call as a whole
        self._called = False

    def feed(self, text: str) -> list[str | Call]:
        """What is certain after more text."""
        self._held += text
        if not self._started and self._may_be_whole():
            return []
        out: list[str | Call] = []
        while True:
            before, tag, rest = self._held.partition(_OPEN)
            if not tag:
                break
            inside, closed, after = rest.partition(_CLOSE)
            if not closed:
                self._put_text(out, before.rstrip())
                self._held = self._held[len(before.rstrip()) :]
                return out
            calls = self._calls_in(inside)
            self._held = after
            if calls:
                self._put_text(out, before.rstrip())
                self._put_calls(out, calls)
            else:
                self._put_text(out, before + tag + inside + closed)
        safe = len(self._held) - _overlap(self._held, _OPEN)
        safe = len(self._held[:safe].rstrip())
        self._put_text(out, self._held[:safe])
        self._held = self._held[safe:]
        return out

    def finish(self) -> list[str | Call]:
        """What was still held back, at the end of the answer."""
        held, self._held = self._held, ""
        out: list[str | Call] = []
        # A model may leave its last tag open: the end of the message closes it.
        before, tag, inside = held.partition(_OPEN)
        calls = self._calls_in(inside if tag else held) if tag or not self._started else []
        if calls:
            self._put_text(out, before.rstrip() if tag else "")
            self._put_calls(out, calls)
        elif not self._called or held.strip():
            self._put_text(out, held)
        return out

    def _may_be_whole(self) -> bool:
        text = self._held.lstrip()
        if text and text[0] not in "{[":
            return False
        return len(text) < _WHOLE_CHARS or _WHOLE.match(text) is not None

    def _calls_in(self, text: str) -> list[Call]:
        """The calls that `text` consists of, or none."""
        try:
            parsed = json_text.loads(text.strip())
        except (ValueError, RecursionError):
            return []
        entries = parsed if isinstance(parsed, list) else [parsed]
        calls = [self._call(entry) for entry in entries]
        return [call for call in calls if call is not None] if all(calls) else []

    def _call(self, entry: Any) -> Call | None:
        if not isinstance(entry, dict):
            return None
        if isinstance(entry.get("function"), dict):
            entry = entry["function"]
        name = entry.get("name", entry.get("function"))
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return Call(name, arguments)

    def _put_text(self, out: list[str | Call], text: str) -> None:
        if text:
            self._started = True
            out.append(text)

    def _put_calls(self, out: list[str | Call], calls: list[Call]) -> None:
        self._started = self._called = True
        out += calls


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
