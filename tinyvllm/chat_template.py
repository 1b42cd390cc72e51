"""Chat templates: messages -> prompt text, by the model's own jinja2 template in a sandbox.

A template comes with the weights and is not trusted. It runs in jinja2's immutable sandbox with the
helpers that Hugging Face gives templates, and within `RenderLimits`:

    bounded       loop iterations and calls together, wall-clock time (checked at each of them),
                  characters put out (into the prompt or a `{% set %}` block), `range`, and the size
                  of what `+ * ** % ~`, string methods and filters make of strings
    not bounded   lists that a template nests in themselves, one single filter over a long list;
                  both still end, and the deadline is checked at the next loop step or call
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from tinyvllm.errors import ChatTemplateError, InvalidParameterError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_SOURCE_CHARS = 2**20
_MAX_CHARS = 2**24
_MAX_ITEMS = 2**20  # in a value that is written out
_MAX_NESTING = 64  # of JSON values in messages and tools
# A width, count or precision above this is an attack; no template pads a line to a megabyte.
_MAX_INT_ARGUMENT = 2**20
_MAX_INT_BITS = 4096
_TEXT_PART_TYPES = ("text", "input_text", "output_text")
# Format strings with a width or precision that is huge, or that comes from a value.
_WIDE_FORMAT = re.compile(
    r"%[^a-zA-Z%(]*(\([^()]*\))?[^a-zA-Z%]*(\d{7,}|\*)|\{[^{}]*\d{7,}|\{[^{}]*:[^{}]*\{"
)


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may use."""

    steps: int = 1_000_000
    """Loop iterations and calls, together."""
    chars: int = _MAX_CHARS
    """Characters put out, and in any one string on the way."""
    seconds: float = 5.0


class ChatTemplate:
    """The chat templates of one model; safe to use from several threads at once.

    Templates are compiled on first use. `sources` maps a name to jinja2 source ("default" is
    taken, or "tool_use" when tools are given), `variables` are the special tokens
    (`bos_token`, ...), `path` is the file that is named in errors.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str],
        path: Path,
        limits: RenderLimits | None = None,
    ) -> None:
        self._sources = dict(sources)
        self._variables = dict(variables)
        self._path = path
        self._limits = limits or RenderLimits()
        self._sandbox: _Sandbox | None = None
        self._compiled: dict[str, Template] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of `messages` by the template of that name (None: see the class).

        `variables` are passed to it as they are.

        Raises `InvalidParameterError` for messages, tools or variables that are wrong (which, and
        why), `ChatTemplateError`: no such template, or one that refuses these messages, is broken
        or goes over the limits.
        """
        data = {
            "documents": None,
            **self._variables,
            **_plain(variables, "template variables", "template_options"),
            "messages": check_messages(messages),
            "tools": None if tools is None else _check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        name = self._choose(chat_template, has_tools=tools is not None)
        where = f"chat template {name!r} of {self._path}"
        try:
            template = self._compile(name)
            template.environment.start(self._limits)  # type: ignore[attr-defined]
            return "".join(template.generate(data))
        except _LimitError as error:
            raise ChatTemplateError(f"{where} {error}", path=self._path) from error
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{where} is broken: line {error.lineno}: {error.message}", path=self._path
            ) from error
        except TemplateError as error:
            raise ChatTemplateError(
                f"{where} refuses these messages: {error}", path=self._path
            ) from error
        except Exception as error:  # a template can raise anything that its operations raise
            raise ChatTemplateError(
                f"{where} failed: {type(error).__name__}: {error}", path=self._path
            ) from error

    def _choose(self, name: str | None, *, has_tools: bool) -> str:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ChatTemplateError(
                f"{self._path} has no chat template {name!r}; it has "
                f"{', '.join(map(repr, self._sources)) or 'none'}. Choose one by name, or pass "
                "finished text to generate()",
                path=self._path,
            )
        return name

    def _compile(self, name: str) -> Template:
        with self._lock:
            if name not in self._compiled:
                source = self._sources[name]
                if len(source) > _MAX_SOURCE_CHARS:
                    raise _LimitError(
                        f"is {len(source)} characters long; the limit is {_MAX_SOURCE_CHARS}"
                    )
                if self._sandbox is None:
                    self._sandbox = _Sandbox()
                self._sandbox.start(self._limits)
                self._compiled[name] = self._sandbox.from_string(source)
            return self._compiled[name]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain data for a template; `InvalidParameterError` says which is wrong, and how.

    Content is a string, or a list of text parts, which become one string, a part per line.
    Keys whose value is None are dropped; extra keys (`name`, `tool_calls`, ...) are kept.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidParameterError(
            f"messages must be a non-empty list of {{'role', 'content'}}; got {_brief(messages)}",
            param="messages",
        )
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameterError(
            f"{where} must be a mapping with 'role' and 'content'; got {_brief(message)}",
            param="messages",
        )
    plain: dict[str, Any] = {
        key: value for key, value in _plain(message, where, "messages").items() if value is not None
    }
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameterError(
            f"{where}.role must be a non-empty string; got {_brief(role)}", param="messages"
        )
    content = plain.get("content")
    if isinstance(content, list):
        parts = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        plain["content"] = "\n".join(parts)
    elif not isinstance(content, str) and not (content is None and "tool_calls" in plain):
        raise InvalidParameterError(
            f"{where}.content must be a string or a list of text parts; got {_brief(content)}",
            param="messages",
        )
    return plain


def _text_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type", "text") not in _TEXT_PART_TYPES:
        raise InvalidParameterError(
            f"{where} must be a part of type 'text'; got {_brief(part)}: only text is supported",
            param="messages",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParameterError(
            f"{where}.text must be a string; got {_brief(text)}", param="messages"
        )
    return text


def _check_tools(tools: object) -> list[Any]:
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidParameterError(
            f"tools must be a list of JSON schemas; got {_brief(tools)}", param="tools"
        )
    return [_plain(tool, f"tools[{i}]", "tools") for i, tool in enumerate(tools)]


def _plain(value: Any, where: str, param: str, depth: int = 0) -> Any:
    """A copy in exact JSON types: a template may call methods of whatever else it is given.

    `where` is the value's place in the caller's argument `param`.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not str(value), which an enum overrides
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth == _MAX_NESTING:
        raise InvalidParameterError(
            f"{where} is nested more than {_MAX_NESTING} levels deep", param=param
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidParameterError(
                    f"{where} has the key {_brief(key)}; keys must be strings", param=param
                )
        return {
            str(key): _plain(item, f"{where}.{key}", param, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", param, depth + 1) for i, item in enumerate(value)]
    raise InvalidParameterError(f"{where} must be JSON data; got {_brief(value)}", param=param)


def _brief(value: object) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


class _LimitError(Exception):
    """A template went over a limit; `render` names the template."""


class _Budget:
    """What is left of `RenderLimits` in one rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self.limits = limits
        self.steps = limits.steps
        self.chars = limits.chars
        self.deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _LimitError(f"takes more than {self.limits.steps} loop steps and calls")
        if time.monotonic() > self.deadline:
            raise _LimitError(f"takes more than {self.limits.seconds:g} s")

    def put(self, chars: int) -> None:
        self.chars -= chars
        if self.chars < 0:
            raise _LimitError(f"writes more than {self.limits.chars} characters")

    def check_size(self, size: int) -> None:
        if size > self.limits.chars:
            raise _LimitError(f"makes a value too large; the limit is {self.limits.chars} elements")


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training: here its body only."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Meter(NodeTransformer):
    """Puts the calls that count into a parsed template.

    Loops charge a step and their body's literal text per iteration, macros their literal text per
    call; `a ~ b` goes through the size check of `+`.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        size = nodes.Const(_literal_chars(node.body))
        node.iter = nodes.Filter(node.iter, "_counted", [size], [], None, None, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        size = nodes.Const(_literal_chars(node.body))
        charge = nodes.Filter(size, "_charged", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=node.lineno)


def _literal_chars(body: Iterable[nodes.Node]) -> int:
    return sum(len(text.data) for part in body for text in part.find_all(nodes.TemplateData))


class _MeteredCodeGenerator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        _Meter().visit(node).set_environment(self.environment)
        super().visit_Template(node, frame)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, with Hugging Face's helpers and with limits."""

    code_generator_class = _MeteredCodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self._local = threading.local()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: self._guard_filter(name, f) for name, f in self.filters.items()}
        self.filters["_counted"] = self._counted
        self.filters["_charged"] = self._charged
        self.filters["_concat"] = self._concat
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def start(self, limits: RenderLimits) -> None:
        """Opens this thread's budget; constant folding at compile time runs under one too."""
        self._local.budget = _Budget(limits)

    @property
    def _budget(self) -> _Budget:
        budget: _Budget = self._local.budget
        return budget

    def _finalize(self, value: Any) -> Any:
        """Every `{{ value }}`: containers are measured before they are written out."""
        self._budget.put(len(value) if isinstance(value, str) else _text_size(value))
        return value

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._budget.step()
        if isinstance(obj, LoopContext) and args:  # loop(children) of a recursive loop
            args = (self._counted(context, args[0], 0), *args[1:])
        else:
            method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
            if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str):
                self._check_str_call(method, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right, self._budget)
        return super().call_binop(context, operator, left, right)

    def _check_str_call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, text = method.__name__, method.__self__
        self._check_ints((*args, *kwargs.values()))
        if name in ("format", "format_map"):
            _check_format(text)
        elif name == "join" and args:
            self._budget.check_size(_text_size(args[0]) + len(text) * _length(args[0]))
        elif name == "replace":
            self._check_replace(text, *args)

    def _check_ints(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > _MAX_INT_ARGUMENT:
                raise _LimitError(f"uses a width or count of {value}")

    def _check_replace(self, text: str, old: Any = None, new: Any = None, *_: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self._budget.check_size(len(text) + text.count(old) * len(new))

    def _guard_filter(self, name: str, function: Any) -> Any:
        # jinja2 passes a context or environment first to the filters it has marked so.
        value_at = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            value, rest = args[value_at], args[value_at + 1 :]
            self._check_ints((*rest, *kwargs.values()))
            if name == "replace":
                self._check_replace(str(value), *rest)
            elif name == "join":
                separator = str(kwargs.get("d", rest[0] if rest else ""))
                value = value if isinstance(value, Mapping | str | Sequence) else list(value)
                args = (*args[:value_at], value, *rest)
                self._budget.check_size(_text_size(value) + len(separator) * _length(value))
            elif name == "format":
                _check_format(str(value))
            elif name in ("string", "tojson", "pprint"):
                self._budget.check_size(_text_size(value))
            result = function(*args, **kwargs)
            if isinstance(result, str):
                self._budget.check_size(len(result))
            return result

        return guarded

    # Context filters are never folded into constants at compile time.
    @pass_context
    def _counted(
        self, _context: Context, items: Iterable[Any], literal_chars: int
    ) -> Iterator[Any]:
        budget = self._budget
        for item in items:
            budget.step()
            budget.put(literal_chars)
            yield item

    @pass_context
    def _charged(self, _context: Context, literal_chars: int) -> None:
        self._budget.put(literal_chars)

    @pass_context
    def _concat(self, _context: Context, parts: list[Any]) -> str:
        self._budget.check_size(sum(_text_size(part) for part in parts))
        return "".join(map(str, parts))


def _check_binop(operator: str, left: Any, right: Any, budget: _Budget) -> None:
    if operator == "%":
        if isinstance(left, str):
            _check_format(left)
    elif operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.check_size(len(left) + len(right))
    elif operator == "*":
        for sized, times in ((left, right), (right, left)):
            if hasattr(sized, "__len__") and isinstance(times, int):
                budget.check_size(len(sized) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise _LimitError(f"computes an integer of {bits} bits")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text.replace("{{", "")):
        raise _LimitError("formats with a huge width, or one that comes from a value")


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _text_size(value: Any) -> int:
    """A lower bound of len(str(value)); beyond every limit for more than a million items, since
    lists that a template nests in themselves may stand for far more.
    """
    if isinstance(value, str):
        return len(value)
    size, count, waiting = 0, 0, [value]
    while waiting:
        item = waiting.pop()
        count += 1
        if count > _MAX_ITEMS:
            return sys.maxsize
        if isinstance(item, Mapping):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        size += len(item) if isinstance(item, str) else 1
    return size


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain json.dumps: jinja2's own tojson escapes for HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
