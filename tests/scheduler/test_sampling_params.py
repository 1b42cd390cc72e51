"""SamplingParams: every field, good and bad; messages name field and value."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from tinyvllm.errors import InvalidParameterError
from tinyvllm.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
HUGE = 10**400  # JSON has such integers; float() does not

GOOD = {
    "temperature": (0, 0.0, 1e-9, 0.7, 1, 2.0, 100.0),
    "top_k": (-1, 0, 1, 50, 2**31 - 1),
    "top_p": (1e-9, 0.5, 1, 1.0),
    "min_p": (0, 0.0, 0.5, 1.0),
    "seed": (None, 0, 1, -1, 2**63 - 1, -(2**63)),
    "max_tokens": (None, 1, 5, 2**40),
    "min_tokens": (0, 1, 5),
    "logprobs": (None, 0, 1, 20),
    "include_stop_str_in_output": (True, False),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "n": (1, 2, 16_384),
    "presence_penalty": (-2, -2.0, 0.0, 0.5, 2.0),
    "frequency_penalty": (-2, -2.0, 0.0, 0.5, 2.0),
    "repetition_penalty": (1e-9, 0.5, 1, 1.0, 1.1, 100.0),
    "prompt_logprobs": (None, 0, 1, 20),
    "logit_bias": (None, {1: 2.0}, {0: -100, 5: 100.0}),
    "json_schema": (None, "{}", '{"type": "object"}'),
    "regex": (None, "[0-9]+"),
    "grammar": (None, 'start: "a" | "b"'),
}
SEQUENCES = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")  # good ones: below
BAD = {
    "temperature": (-0.1, -1, NAN, INF, -INF, HUGE, True, False, "0.7", None, [1.0], 1j),
    "top_k": (-2, 2**31, HUGE, 1.5, 1.0, NAN, True, "5", None, [1]),
    "top_p": (0, 0.0, -0.1, 1.1, NAN, INF, HUGE, True, "0.5", None, (0.5,)),
    "min_p": (-0.1, 1.1, NAN, INF, -HUGE, True, "0.5", None, {}),
    "seed": (2**63, -(2**63) - 1, HUGE, 1.5, NAN, True, "1", [1]),
    "stop": ("", ["a", ""], [1], 5, b"x", {"a"}, ["a", None], True, NAN, {"a": 1}),
    "stop_token_ids": (5, [-1], ["5"], "5", b"5", [True], [1.0], [None], {5}, {5: 1}, True, NAN),
    "max_tokens": (0, -1, 1.5, 2.0, NAN, True, "5", [5]),
    "min_tokens": (-1, 1.5, NAN, True, "5", None),
    "logprobs": (-1, 21, HUGE, 1.0, NAN, True, "1", [1]),
    "include_stop_str_in_output": (0, 1, None, "true", NAN),
    "ignore_eos": (0, 1, None, "true", NAN),
    "skip_special_tokens": (0, 1, None, "true", NAN),
    "n": (0, -1, 16_385, 1.0, True, "1", NAN, None, HUGE),
    "presence_penalty": (-2.1, 2.1, NAN, INF, HUGE, False, None, "0", [0.0]),
    "frequency_penalty": (-2.1, 2.1, NAN, INF, -HUGE, False, None, "0", {}),
    "repetition_penalty": (0, 0.0, -1.0, 1e-45, NAN, INF, HUGE, 1e39, True, None, "1"),
    "prompt_logprobs": (-1, 21, HUGE, 1.0, NAN, True, "1", [1]),
    "logit_bias": (
        *({1: 101.0}, {1: -100.5}, {1: NAN}, {1: INF}, {1: HUGE}, {1: "1"}, {1: None}, {1: True}),
        *({-1: 1.0}, {1.0: 1.0}, {"x": 1.0}, {"-1": 1.0}, {"9" * 5000: 1.0}, {True: 1.0}),
        *({None: 1.0}, [1], "x", 5, NAN),
    ),
    "allowed_token_ids": ([], 1, [-1], ["5"], "5", [True], [None], {5}, {5: 1}, True, NAN),
    "bad_words": ("", ["a", ""], [1], 5, b"x", {"a"}, ["a", None], True, NAN, {"a": 1}),
    "json_schema": ("", "  ", b"{}", 5, ["a"], True, NAN),
    "regex": ("", "  ", b"a", 5, ["a"], True),
    "grammar": ("", "  ", b"a", 5, ["a"], {"a": 1}),
}


def pairs(table):
    return [(name, value) for name, values in table.items() for value in values]


def shown(value):
    text = repr(value)
    return text[:40]


def test_every_field_is_tested():
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(BAD) == fields
    assert {*GOOD, *SEQUENCES} == fields


@pytest.mark.parametrize(("name", "value"), pairs(GOOD), ids=lambda v: shown(v))
def test_good_values_are_kept(name, value):
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == value
    others = {f.name for f in dataclasses.fields(SamplingParams)} - {name}
    assert all(getattr(params, other) == getattr(SamplingParams(), other) for other in others)


@pytest.mark.parametrize(("name", "value"), pairs(BAD), ids=lambda v: shown(v))
def test_bad_values_are_named(name, value):
    with pytest.raises(InvalidParameterError) as error:
        SamplingParams(**{name: value})
    assert type(error.value) is InvalidParameterError
    assert isinstance(error.value, ValueError)
    assert error.value.param == name
    assert str(error.value).startswith(f"{name} must be ")
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(-1, "number"), (NAN, "number"), (INF, "number"), (HUGE, "float32"), (1e39, "float32")],
    ids=lambda v: shown(v),
)
def test_a_temperature_has_no_upper_bound_to_name(value, kind):
    with pytest.raises(
        InvalidParameterError, match=rf"^temperature must be a finite {kind} >= 0; "
    ):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1),
        ("prompt_logprobs", None),
        ("logit_bias", None),
        ("logit_bias", {}),
        ("allowed_token_ids", None),
        ("bad_words", None),
        ("bad_words", []),
        ("json_schema", None),
    ],
)
def test_neutral_values_in_other_words(name, value):
    assert SamplingParams(**{name: value}) == SamplingParams()


class _Array:
    """Compares element by element, as numpy's do."""

    def __eq__(self, other):
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias", "bad_words", "json_schema"])
def test_an_array_is_not_compared(name):
    with pytest.raises(InvalidParameterError):
        SamplingParams(**{name: _Array()})


def test_bias_keys_may_be_text_and_the_mapping_is_copied():
    given = {"17": 1, 3: -2.5}
    params = SamplingParams(logit_bias=given)
    given["18"] = 1.0
    assert params.logit_bias == {17: 1.0, 3: -2.5}
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.0}))
    assert params != SamplingParams(logit_bias={3: 1.0})


def test_lists_of_what_may_and_may_not_be_drawn_become_tuples():
    params = SamplingParams(allowed_token_ids=range(2, 4), bad_words="no")
    assert (params.allowed_token_ids, params.bad_words) == ((2, 3), ("no",))


def test_a_schema_may_be_a_mapping():
    params = SamplingParams(json_schema={"type": "object", "properties": {"a": {}}})
    assert json.loads(params.json_schema) == {"type": "object", "properties": {"a": {}}}
    assert dataclasses.replace(params, top_k=3).json_schema == params.json_schema
    with pytest.raises(InvalidParameterError, match="json_schema cannot be written as JSON"):
        SamplingParams(json_schema={"type": {1, 2}})


def test_one_grammar_at_most_and_it_ends_at_an_eos():
    with pytest.raises(InvalidParameterError, match="one of json_schema, regex, grammar; got"):
        SamplingParams(regex="a", json_schema="{}")
    with pytest.raises(InvalidParameterError, match="ignore_eos cannot be combined with regex"):
        SamplingParams(regex="a", ignore_eos=True)


def test_several_outputs_need_a_temperature():
    assert SamplingParams(n=2, temperature=0.1).n == 2
    with pytest.raises(InvalidParameterError, match="n must be 1 with temperature=0"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [3, 100]),
        ("allowed_token_ids", [100, 3]),
        ("logit_bias", {3: 1.0, 100: 1.0}),
    ],
)
def test_ids_beyond_the_vocabulary(name, value):
    params = SamplingParams(**{name: value})
    params.check_vocab(101)
    with pytest.raises(
        InvalidParameterError, match=rf"^{name} has the token id 100; .* in \[0, 100\)$"
    ) as error:
        params.check_vocab(100)
    assert error.value.param == name


@pytest.mark.parametrize(
    ("value", "want"),
    [("END", ("END",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ((), ()), ([], ()), (None, ())],
)
def test_stop_becomes_a_tuple(value, want):
    assert SamplingParams(stop=value).stop == want


@pytest.mark.parametrize(
    ("value", "want"), [([1, 2], (1, 2)), ((0,), (0,)), (range(3), (0, 1, 2)), ([], ()), (None, ())]
)
def test_stop_token_ids_become_a_tuple(value, want):
    assert SamplingParams(stop_token_ids=value).stop_token_ids == want


def test_min_tokens_above_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InvalidParameterError, match=r"min_tokens must be at most max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_frozen_and_hashable():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5
    assert hash(params) == hash(SamplingParams(stop="a", stop_token_ids=(1,)))


def test_resolve_puts_overrides_over_params():
    params = SamplingParams(temperature=0.5, top_k=3)
    assert SamplingParams.resolve(params, {}, {"temperature": 0.9}) is params
    resolved = SamplingParams.resolve(params, {"top_k": 7}, {"temperature": 0.9, "min_p": 0.2})
    assert resolved == SamplingParams(temperature=0.5, top_k=7)
    assert params.top_k == 3


def test_resolve_puts_overrides_over_the_models_defaults():
    defaults = {"temperature": 0.6, "top_p": 0.9}
    assert SamplingParams.resolve(None, {}) == SamplingParams()
    resolved = SamplingParams.resolve(None, {"top_p": 0.5}, defaults)
    assert resolved == SamplingParams(temperature=0.6, top_p=0.5)


def test_every_default_of_a_model_counts():
    defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    params = SamplingParams.resolve(None, {}, defaults)
    assert params == SamplingParams(temperature=0.6, repetition_penalty=1.1)
    params = SamplingParams.resolve(None, {"repetition_penalty": 1.0}, defaults)
    assert not params.has_penalties


@pytest.mark.parametrize("name", ["temprature", "max_new_tokens", ""])
@pytest.mark.parametrize("params", [None, SamplingParams()])
def test_resolve_names_the_unknown(name, params):
    with pytest.raises(InvalidParameterError, match=f"no field '{name}'.*temperature") as error:
        SamplingParams.resolve(params, {name: 1})
    assert error.value.param == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("Top_P", "top_p")],
)
def test_resolve_knows_what_was_meant(name, meant):
    with pytest.raises(InvalidParameterError, match=rf"did you mean '{meant}'\? fields: "):
        SamplingParams.resolve(None, {name: 1})
    with pytest.raises(InvalidParameterError, match="no field 'xyz'; fields: "):
        SamplingParams.resolve(None, {"xyz": 1})


@pytest.mark.parametrize(
    ("fields", "penalties", "tokenizer", "adjusts"),
    [
        (
            {"temperature": 0.3, "top_k": 3, "logprobs": 2, "prompt_logprobs": 1},
            False,
            False,
            False,
        ),
        ({"presence_penalty": -0.1}, True, False, True),
        ({"frequency_penalty": 0.1}, True, False, True),
        ({"repetition_penalty": 0.9}, True, False, True),
        ({"logit_bias": {1: 0.0}}, False, False, True),
        ({"allowed_token_ids": [1]}, False, False, True),
        ({"min_tokens": 1}, False, False, True),
        ({"bad_words": "x"}, False, True, True),
        ({"json_schema": "{}"}, False, True, True),
        ({"regex": "a"}, False, True, True),
        ({"grammar": "start: /a/"}, False, True, True),
    ],
)
def test_what_a_request_needs(fields, penalties, tokenizer, adjusts):
    params = SamplingParams(**fields)
    assert params.has_penalties is penalties
    assert params.needs_tokenizer is tokenizer
    assert params.adjusts_logits is adjusts


def test_a_bias_for_more_tokens_than_the_limit():
    SamplingParams(logit_bias=dict.fromkeys(range(4096), 1.0))
    with pytest.raises(InvalidParameterError, match="logit_bias must be of at most 4096"):
        SamplingParams(logit_bias=dict.fromkeys(range(4097), 1.0))


def test_a_dict_is_told_of_keywords():
    with pytest.raises(InvalidParameterError, match=r"; or pass the fields as keywords$"):
        SamplingParams.resolve({"temperature": 0}, {})


@pytest.mark.parametrize("params", [{"temperature": 1.0}, "greedy", 0, SamplingParams])
def test_resolve_wants_sampling_params(params):
    with pytest.raises(
        InvalidParameterError, match="params must be a SamplingParams; got"
    ) as error:
        SamplingParams.resolve(params, {})
    assert error.value.param == "params"


def test_resolve_checks_what_it_combines():
    with pytest.raises(InvalidParameterError, match="min_tokens"):
        SamplingParams.resolve(SamplingParams(max_tokens=3), {"min_tokens": 4})
