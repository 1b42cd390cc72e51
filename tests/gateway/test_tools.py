"""Calls out of the texts that models write them in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm.gateway.tools import Call, CallParser, template_tools

ADD = Call("add", {"a": 1, "b": "x"})
JSON = json.dumps({"name": "add", "arguments": ADD.arguments})
LLAMA = json.dumps({"name": "add", "parameters": ADD.arguments})
TAG = f"<tool_call>\n{JSON}\n</tool_call>"


def parse(pieces: list[str]) -> list[str | Call]:
    """The whole answer, with neighbouring text put together."""
    parser = CallParser(["add"])
    out: list[str | Call] = []
    for piece in [*(p for text in pieces for p in parser.feed(text)), *parser.finish()]:
        if isinstance(piece, str) and out and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TAG, [ADD]),
        (f"{TAG}\n{TAG}", [ADD, ADD]),
        (f"Let me see.\n{TAG}\nDone.", ["Let me see.", ADD, "\nDone."]),
        (f"<tool_call>{JSON}", [ADD]),  # the end of the message closes the tag
        (f"a < b <tool {TAG}", ["a < b <tool", ADD]),
        (LLAMA, [ADD]),
        (f"[{JSON}, {JSON}]", [ADD, ADD]),
        ('{"type": "function", "function": ' + JSON + "}", [ADD]),
        ("plain text", ["plain text"]),
        ("  spaces stay \n", ["  spaces stay \n"]),
        ('{"answer": 42, "and": "more than forty characters of JSON"}', None),
        ('{"name": "Ada", "parameters": {}}', None),  # no tool of that name
        ("[1, 2, 3]", None),
        ("<tool_call>no JSON</tool_call> after", None),
        ('<tool_call>{"name": "other"}</tool_call>', None),
        ("<tool_call>", None),
        (f"text {LLAMA}", None),
        ("", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_text_and_calls(text: str, expected: list[str | Call] | None, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(pieces) == ([text] if expected is None else expected)


@given(st.lists(st.sampled_from(["<tool", "_call>", "</tool_call>", "x", " ", "{", "}", '"', "["])))
def test_no_text_is_lost(pieces: list[str]) -> None:
    assert parse(pieces) == ([text] if (text := "".join(pieces)) else [])


def test_text_is_not_held_back_without_need() -> None:
    parser = CallParser(["add"])
    assert parser.feed("Hello") == ["Hello"]
    assert parser.feed(" <to") == []
    assert parser.feed("ken") == [" <token"]


def test_the_shape_that_templates_want() -> None:
    tool = {"type": "function", "name": "add", "strict": True}
    assert template_tools([tool]) == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
