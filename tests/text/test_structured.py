"""Structured output: masks follow the grammar for any tokenizer, errors name the cause."""

from __future__ import annotations

import json
import random
import re
import sys

import numpy as np
import pytest
from support.vocabularies import HOLDING, STREAMING, make_tokenizer

from tinyvllm.detokenizer import Detokenizer, token_bytes
from tinyvllm.errors import InvalidParameterError, NotSupportedError
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.structured import GrammarCompiler, Matcher
from tinyvllm.tokenizer import Tokenizer

EOS = 2
# A piece reads otherwise at the start of a text.
POSITIONAL = {"metaspace_always", "metaspace_fallback", "metaspace_first", "none"} | {
    "word_piece",
    "word_piece_plain",
}
SUPPORTED = sorted(set(STREAMING) - POSITIONAL)


def compiler(tokenizer: Tokenizer, padding: int = 5) -> GrammarCompiler:
    """For a model with `padding` more logits than the tokenizer has ids."""
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + padding, [EOS])


def allowed_ids(matcher: Matcher, vocab_size: int) -> list[int]:
    row = np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    return [int(i) for i in bits.nonzero()[0]]


def walk(
    matcher: Matcher, vocab_size: int, rng: random.Random, max_tokens: int
) -> list[int] | None:
    """Random allowed tokens until EOS, which is taken when it comes up; None: never came."""
    ids: list[int] = []
    for _ in range(max_tokens):
        allowed = allowed_ids(matcher, vocab_size)
        assert allowed, "nothing may come next"
        assert matcher.is_complete == (EOS in allowed)
        token_id = EOS if EOS in allowed and rng.random() < 0.3 else rng.choice(allowed)
        matcher.advance(token_id)
        if token_id == EOS:
            return ids
        ids.append(token_id)
    return None


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join([*map(detokenizer.append, ids), detokenizer.finish()])


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("regex", ["[ab]{2,6}\\.", "(é|日|ab|😀)+", "a( a| b)*"])
def test_what_is_drawn_under_the_mask_matches(name: str, regex: str) -> None:
    """Bytes of characters, spaces within pieces, added tokens: the text is what counts."""
    if name == "regex" and regex.startswith("a"):
        pytest.skip("its decoder writes no a")
    tokenizer = make_tokenizer(name)
    grammars = compiler(tokenizer)
    rng = random.Random(1)
    finished = 0
    for _ in range(25):
        matcher = grammars.compile(SamplingParams(regex=regex))
        ids = walk(matcher, tokenizer.vocab_size + 5, rng, 60)
        if ids is not None:
            text = text_of(tokenizer, ids)
            assert re.fullmatch(regex, text), (ids, text)
            finished += 1
    assert finished > 5


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_encoding_of_a_match_is_allowed(name: str) -> None:
    """Token by token as the tokenizer cuts it, where its pieces make that text again."""
    tokenizer = make_tokenizer(name)
    texts = token_bytes(tokenizer, tokenizer.vocab_size)
    grammars = compiler(tokenizer)
    for text in ("ab.", "日é", "😀a"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if any(texts[i] is None for i in ids) or b"".join(texts[i] for i in ids) != text.encode():
            continue  # an unknown character, or a space put before it
        matcher = grammars.compile(SamplingParams(regex=re.escape(text)))
        for token_id in ids:
            assert token_id in allowed_ids(matcher, tokenizer.vocab_size + 5)
            matcher.advance(token_id)
        assert allowed_ids(matcher, tokenizer.vocab_size + 5) == [EOS]


@pytest.mark.parametrize("name", [*HOLDING, *sorted(POSITIONAL)])
def test_a_decoder_without_texts_for_its_tokens_is_named(name: str) -> None:
    with pytest.raises(NotSupportedError, match="regex: this model's tokenizer has a decoder") as e:
        compiler(make_tokenizer(name)).compile(SamplingParams(regex="a"))
    assert e.value.param == "regex"


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_on_the_real_tokenizer(smollm2_dir) -> None:
    tokenizer = Tokenizer.from_dir(smollm2_dir)
    vocab_size = tokenizer.vocab_size
    grammars = GrammarCompiler(tokenizer, vocab_size, [EOS])
    rng = random.Random(3)
    finished = 0
    for _ in range(12):
        ids = walk(grammars.compile(SamplingParams(json_schema=SCHEMA)), vocab_size, rng, 400)
        if ids is None:
            continue
        value = json.loads(text_of(tokenizer, ids))
        assert set(value) <= set(SCHEMA["properties"]) and {"name", "age"} <= set(value)
        assert 0 <= value["age"] <= 120 and len(value["name"]) <= 8
        finished += 1
    assert finished > 3
    matcher = grammars.compile(SamplingParams(json_schema=SCHEMA))
    for token_id in tokenizer.encode('{"name": "Zoë", "age": 7}', add_special_tokens=False):
        assert not matcher.is_complete
        assert token_id in allowed_ids(matcher, vocab_size)
        matcher.advance(token_id)
    assert matcher.is_complete
    assert allowed_ids(matcher, vocab_size) == [EOS]


def test_a_grammar_may_recurse_and_a_fork_goes_on_by_itself() -> None:
    tokenizer = make_tokenizer("byte_level")
    size = tokenizer.vocab_size + 5
    lark = 'start: pair\npair: "(" pair* ")"'
    matcher = compiler(tokenizer).compile(SamplingParams(grammar=lark))
    open_id, close_id = (tokenizer.token_to_id(c) for c in "()")
    for token_id in (open_id, open_id, close_id):
        matcher.advance(token_id)
    fork = matcher.fork()
    assert set(allowed_ids(fork, size)) == {open_id, close_id}
    fork.advance(close_id)
    assert allowed_ids(fork, size) == [EOS]
    assert set(allowed_ids(matcher, size)) == {open_id, close_id}


def test_a_grammar_is_compiled_once_and_each_matcher_starts_at_its_beginning(monkeypatch) -> None:
    tokenizer = make_tokenizer("byte_level")
    grammars = compiler(tokenizer)
    compiled = []
    original = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda *key: compiled.append(key) or original(*key))
    a_id = tokenizer.token_to_id("a")
    for _ in range(3):
        matcher = grammars.compile(SamplingParams(regex="a"))
        assert allowed_ids(matcher, tokenizer.vocab_size + 5) == [a_id]
        matcher.advance(a_id)
    assert compiled == [("regex", "a")]
    for i in range(40):
        grammars.compile(SamplingParams(regex=f"a{i}"))
    grammars.compile(SamplingParams(regex="a"))
    assert len(compiled) == 42
    assert len(grammars._compiled) == 32


def test_no_structure_needs_no_matcher_and_no_llguidance(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = compiler(make_tokenizer("byte_level"))
    assert grammars.compile(SamplingParams()) is None
    with pytest.raises(NotSupportedError, match=r"regex needs .*pip install llguidance") as e:
        grammars.compile(SamplingParams(regex="a"))
    assert e.value.param == "regex"


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("json_schema", "{", "expected"),
        ("json_schema", "[]", "schema must be"),
        ("json_schema", '{"type": "objekt"}', "Invalid type: objekt"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "#/definitions/x"}', "does not exist"),
        ("json_schema", '{"type": "string", "pattern": "("}', "unclosed group"),
        ("json_schema", '{"not": {}}', "Unimplemented"),
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("grammar", "start: foo", "unknown name"),
        ("grammar", 'root ::= "a"', "Expected token"),
    ],
)
def test_a_bad_grammar_is_named(name: str, text: str, cause: str) -> None:
    grammars = compiler(make_tokenizer("byte_level"))
    with pytest.raises(InvalidParameterError, match=rf"(?s)^{name} cannot be used: .*{cause}") as e:
        grammars.compile(SamplingParams(**{name: text}))
    assert type(e.value) is InvalidParameterError
    assert e.value.param == name
    assert grammars.compile(SamplingParams(regex="a")) is not None


def test_a_token_that_the_mask_does_not_have_is_an_error() -> None:
    tokenizer = make_tokenizer("byte_level")
    matcher = compiler(tokenizer).compile(SamplingParams(regex="a"))
    with pytest.raises(InvalidParameterError, match="regex cannot be used"):
        matcher.advance(tokenizer.token_to_id("b"))


def test_a_model_without_an_eos_is_named() -> None:
    tokenizer = make_tokenizer("byte_level")
    with pytest.raises(NotSupportedError, match="no EOS token"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size, []).compile(SamplingParams(regex="a"))
