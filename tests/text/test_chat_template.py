"""Chat templates: rendered as by transformers, for checked messages, and not trusted."""

from __future__ import annotations

import enum
import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.vocabularies import llama2_style

from tinyvllm.chat_template import ChatTemplate, RenderLimits
from tinyvllm.errors import ChatTemplateError, InvalidParameterError
from tinyvllm.tokenizer import Tokenizer

# In the manner of Llama 3.1: bos, a date, tools in the first user message, refusals, trims.
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# In the manner of Qwen 2.5 and 3: a namespace, a reversed loop, `~`, thinking switched off.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set is_result = message.content and message.content.startswith('<tool_response>') %}
    {%- if ns.multi_step_tool and message.role == "user" and not is_result %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content or '' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content }}
        {%- generation %}{%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}{%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Whitespace control, loop controls, a macro with caller, a recursive loop, filters, lstrip_blocks.
MIXED = """
{% macro line(role, text='') %}
  <{{ role }}> {{ text }} {{ caller() if caller }}
{% endmacro %}
    {% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
{{ line(message.role, message.content|replace('a', 'b')|upper) }}
{% call line('x') %}called {{ loop.index }}/{{ loop.length }}{% endcall %}
    {% if loop.index > 5 %}{% break %}{% endif %}
    {% else %}nobody{% endfor %}
{% for item in [1, [2, [3, 'z<&>']]] recursive %}
{{ loop(item) if item is iterable and item is not string else item }},{% endfor %}
{% generation %}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}
{{ ['x', 'y']|join(', ') ~ 1 ~ none }} {{ {'k': "é<'"}|tojson }} {{ "%s-%05.1f"|format('q', 2.5) }}
{{ "{:>5}|{k!r}".format(3, k='v') }} {{ 'ab' * 3 }} {{ 2 ** 10 % 7 }} {{ [1] + [2] }} {{ 1.5 + 1 }}
{{ (tools or [])|map(attribute='name')|list }} {{ eos_token }}{{ undefined_name }} {{ dict(a=1) }}
"""

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"city": "<'Zürich' & Ko>"}}}
]
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "日本", "n": 1.5}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello!"}],
    "system": [
        {"role": "system", "content": "  Be brief. <b> & 'quotes' \"double\"  "},
        {"role": "user", "content": "Hi\n\nthere 😀 "},
        {"role": "assistant", "content": "<think>hm</think>\n\nHello a banana"},
        {"role": "user", "content": ""},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": '{"t": 3}'},
        {"role": "tool", "content": "cold"},
        {"role": "assistant", "content": "Cold."},
    ],
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
HERE = Path("some/tokenizer.json")


def render(source: str, messages: object = None, **kwargs: Any) -> str:
    limits = kwargs.pop("limits", None)
    template = ChatTemplate({"default": source}, VARIABLES, HERE, limits)
    return template.render(messages or CHATS["one"], **kwargs)  # type: ignore[arg-type]


def transformers_render(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=llama2_style(), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    text = theirs.apply_chat_template(messages, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("source", [LLAMA3, QWEN, MIXED], ids=["llama3", "qwen", "mixed"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "with tools"])
def test_renders_as_transformers(
    source: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    for kwargs in ({}, {"date_string": "1 Jan 2030", "enable_thinking": False}):
        for prompt in (True, False):
            ours = render(source, chat, tools=tools, add_generation_prompt=prompt, **kwargs)
            assert ours == transformers_render(
                source, chat, tools=tools, add_generation_prompt=prompt, **kwargs
            )


@pytest.mark.parametrize("chat", [CHATS["one"], CHATS["system"]])
def test_smollm2_as_transformers(
    smollm2: Tokenizer, smollm2_dir: Path, chat: list[dict[str, Any]]
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    for prompt in (True, False):
        text = smollm2.apply_chat_template(chat, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=prompt
        )
        ids = smollm2.encode_chat(chat, add_generation_prompt=prompt)
        assert ids == theirs.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]


def _model_dir(folder: Path, config: dict[str, Any], **files: str) -> Path:
    backend = llama2_style()
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config})
    )
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".jinja").write_text(text)
    return folder


def test_bos_is_not_doubled(tmp_path: Path) -> None:
    """encode() adds a bos to plain text; a template that writes one gets no second."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_dir(_model_dir(tmp_path, {"chat_template": template}))
    assert tokenizer.encode("ab")[:2].count(1) == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]).count(1) == 1


def test_named_templates(tmp_path: Path) -> None:
    config = {
        "chat_template": [
            {"name": "default", "template": "D"},
            {"name": "tool_use", "template": "T"},
            {"name": "rag", "template": "R{{ documents is none }}"},
        ]
    }
    tokenizer = Tokenizer.from_dir(_model_dir(tmp_path, config))
    one = CHATS["one"]
    assert tokenizer.apply_chat_template(one) == "D"
    assert tokenizer.apply_chat_template(one, tools=TOOLS) == "T"
    assert tokenizer.apply_chat_template(one, tools=TOOLS, chat_template="default") == "D"
    assert tokenizer.apply_chat_template(one, chat_template="rag") == "RTrue"
    with pytest.raises(ChatTemplateError, match=r"no chat template 'x'.*'default', 'tool_use'"):
        tokenizer.apply_chat_template(one, chat_template="x")


def test_files_come_before_the_config(tmp_path: Path) -> None:
    folder = _model_dir(
        tmp_path,
        {"chat_template": "config"},
        chat_template="file",
        additional_chat_templates__tool_use="tools",
    )
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.apply_chat_template(CHATS["one"]) == "file"
    assert tokenizer.apply_chat_template(CHATS["one"], tools=TOOLS) == "tools"


def test_no_template_and_no_default(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(_model_dir(tmp_path, {}))
    with pytest.raises(ChatTemplateError, match=r"has no chat template .*base model") as raised:
        tokenizer.encode_chat(CHATS["one"])
    assert raised.value.path == str(tmp_path / "tokenizer.json")
    only = {"chat_template": [{"name": "rag", "template": "R"}]}
    tokenizer = Tokenizer.from_dir(_model_dir(tmp_path, only))
    with pytest.raises(ChatTemplateError, match="no chat template 'default'; it has 'rag'"):
        tokenizer.encode_chat(CHATS["one"])


# Messages.


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages must be a non-empty list"),
        ("hello", "messages must be a non-empty list .* got str 'hello'"),
        ({"role": "user", "content": "x"}, "messages must be a non-empty list .* got dict"),
        (5, "got int 5"),
        (None, "messages must be a non-empty list .* got None$"),
        ([["user", "x"]], r"messages\[0\] must be a mapping"),
        ([CHATS["one"][0], {"content": "x"}], r"messages\[1\]\.role must be .* got None$"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role must be .* got int 3"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role must be"),
        ([{"role": "user"}], r"messages\[0\]\.content must be .* got None$"),
        ([{"role": "user", "content": 1.5}], r"messages\[0\]\.content must be .* got float 1\.5"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\]\.content must be .* got dict"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            r"messages\[0\]\.content\[1\] must be a part of type 'text'.*image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            r"messages\[0\]\.content\[0\]\.text must be a string; got int 3",
        ),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\] must be a part"),
        ([{"role": "u", "content": "x", "t": object()}], r"messages\[0\]\.t must be JSON data"),
        ([{"role": "u", "content": "x", 5: 1}], r"messages\[0\] has the key int 5"),
        ([{"role": "u", "content": "x", "t": b"b"}], r"messages\[0\]\.t must be JSON data"),
    ],
)
def test_wrong_messages_are_named(messages: Any, complaint: str) -> None:
    template = ChatTemplate({"default": "{{ messages }}"}, {}, HERE)
    with pytest.raises(InvalidParameterError, match=complaint) as error:
        template.render(messages)
    assert error.value.param == "messages"


def test_deep_messages_and_wrong_tools() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidParameterError, match="nested more than 64"):
        render("x", [{"role": "user", "content": "x", "extra": deep}])
    for tools in ("x", [1], {"a": 1}):
        with pytest.raises(InvalidParameterError, match="tools must be a list of JSON schemas"):
            render("x", tools=tools)
    assert render("{{ name }}", name="any") == "any"
    with pytest.raises(InvalidParameterError, match=r"template variables\.x must be JSON data"):
        render("x", x=object())


def test_text_parts_become_lines() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == "a\nb\nc"
    assert render("{{ messages[0].content }}.", [{"role": "user", "content": []}]) == "."


def test_subclasses_become_plain_data() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    class Loud(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "LOUD"

    message = {"role": Role.USER, "content": Loud("quiet"), "n": True, "t": (1, 2.5, None)}
    text = render("{{ messages[0].role }} {{ messages[0].content }} {{ messages[0].t }}", [message])
    assert text == "user quiet [1, 2.5, None]"


def test_a_surrogate_in_a_message(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="lone surrogate"):
        smollm2.encode_chat([{"role": "user", "content": "a\ud83d"}])


# Templates that are broken or hostile.


def test_a_template_may_refuse() -> None:
    source = "{{ raise_exception('Roles must alternate: ' ~ messages[0].role) }}"
    with pytest.raises(
        ChatTemplateError, match=r"'default' of some.* refuses .*Roles must alternate: user"
    ):
        render(source)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x\n{% for %}", "is broken: line 2"),
        ("{% frobnicate %}", "is broken: line 1"),
        ("{{ messages | frobnicate }}", "frobnicate"),
        ("{{ messages.nothing.at_all }}", "UndefinedError|undefined|has no attribute"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "failed: TypeError"),
        ("{{ messages | tojson(indent='x', bogus=1) }}", "failed: TypeError"),
        ("{% include 'other' %}", "failed: TypeError|no loader"),
        ("{{ {}|tojson(default=1) }}", "failed: TypeError"),
        ("(" * 3 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "Recursion|broken|failed"),
        ("{{ 1 }}" + "x" * 2**20, "characters long"),
    ],
)
def test_broken_templates(source: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        render(source)


SMALL = RenderLimits(steps=20_000, chars=200_000, seconds=2.0)
HOSTILE = {
    "empty loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "huge range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "output": "{% for a in range(9999) %}{{ 'x' * 999 }}{% endfor %}",
    "literal": "{% for a in range(9999) %}" + "x" * 999 + "{% endfor %}",
    "captured": "{% set y %}{% for a in range(9999) %}{{ 'x' * 999 }}{% endfor %}{% endset %}",
    "captured literal": "{% set y %}{% for a in range(9999) %}"
    + "x" * 99
    + "{% endfor %}{% endset %}",
    "macro literal": "{% macro m() %}" + "x" * 99 + "{% endmacro %}"
    "{% for a in range(9999) %}{% set y = m() %}{% endfor %}",
    "macro recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "macro fan-out": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(40) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive ranges": "{% for i in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "repeat": "{{ 'x' * 10 ** 10 }}",
    "repeat list": "{{ [1] * 10 ** 10 }}",
    "repeat reversed": "{% set n = 10 ** 10 %}{% set y = n * 'x' %}",
    "doubling": "{% set n = namespace(s='x') %}"
    "{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling tilde": "{% set n = namespace(s='x') %}"
    "{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling list": "{% set n = namespace(s=[1]) %}"
    "{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling join": "{% set n = namespace(s='xx') %}"
    "{% for a in range(60) %}{% set n.s = [n.s, n.s]|join %}{% endfor %}",
    "doubling str.join": "{% set n = namespace(s='xx') %}"
    "{% for a in range(60) %}{% set n.s = n.s.join([n.s, n.s]) %}{% endfor %}",
    "doubling replace": "{% set n = namespace(s='xx') %}"
    "{% for a in range(60) %}{% set n.s = n.s|replace('x', n.s) %}{% endfor %}",
    "doubling str.replace": "{% set n = namespace(s='xx') %}"
    "{% for a in range(60) %}{% set n.s = n.s.replace('x', n.s) %}{% endfor %}",
    "nested lists": "{% set n = namespace(s=[1]) %}"
    "{% for a in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "nested lists tojson": "{% set n = namespace(s=[1]) %}"
    "{% for a in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s|tojson }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "big product": "{% set n = namespace(s=2 ** 2000) %}"
    "{% for a in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "center": "{{ 'x'|center(10000000000) }}",
    "str.center": "{{ 'x'.center(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "indent": "{{ 'x\ny'|indent(10000000000) }}",
    "tojson indent": "{{ {'x': 1}|tojson(indent=10000000000) }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "batch": "{{ [1]|batch(10000000000, 'x')|list }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, '10000000000') }}",
    "format percent": "{{ '%10000000000d' % 1 }}",
    "format star": "{{ '%*d' % (10000000000, 1) }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "format attributes": "{{ '{0.__class__.__mro__}'.format(messages).__class__.mro() }}",
    "mutation": "{{ messages.append(1) }}",
    "globals": "{{ raise_exception.__globals__.items() }}",
    "template globals": "{{ self.__init__.__globals__ }}",
    "caller's memory": "{{ strftime_now.__globals__['json'] }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ChatTemplateError):
        render(source, limits=SMALL)
    assert time.perf_counter() - start < 10  # the limit is 2 s; a shared machine is slow


def test_deadline() -> None:
    limits = RenderLimits(steps=10**12, seconds=0.05)
    with pytest.raises(ChatTemplateError, match=r"takes more than 0\.05 s"):
        render(HOSTILE["empty loops"], limits=limits)


def test_the_caller_survives_a_hostile_template() -> None:
    """After a refusal the same object renders the next conversation."""
    source = "{% if messages[0].content == 'bad' %}{{ 'x' * 10 ** 9 }}{% endif %}fine"
    template = ChatTemplate({"default": source}, {}, HERE)
    with pytest.raises(ChatTemplateError, match="the limit is"):
        template.render([{"role": "user", "content": "bad"}])
    assert template.render([{"role": "user", "content": "good"}]) == "fine"


def test_long_chats_are_within_the_limits() -> None:
    chat = [
        {"role": ("user", "assistant")[i % 2], "content": "word 123456789 {:{}} %*d " * 50}
        for i in range(1000)
    ]
    for source in (LLAMA3, QWEN):
        assert len(render(source, chat)) > 1_000_000
