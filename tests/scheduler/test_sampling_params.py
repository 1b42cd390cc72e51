"""SamplingParams: every field, good and bad; messages name field and value."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tinyvllm.errors import InvalidParameterError, NotSupportedError
from tinyvllm.sampling_params import SamplingParams, ignored_defaults

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
}
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
}
NOT_YET = {
    "n": (2, 0, True, "1", NAN, None),
    "presence_penalty": (0.5, -0.5, NAN, False, None, "0"),
    "frequency_penalty": (0.5, -0.5, NAN, False, None, "0"),
    "repetition_penalty": (1.1, 0.9, NAN, True, None, "1"),
    "prompt_logprobs": (0, 1, True, NAN),
    "logit_bias": ({1: 2.0}, {}, "x", NAN),
    "allowed_token_ids": ([1], [], 1, NAN),
    "bad_words": (["x"], [], "x", NAN),
}


def pairs(table):
    return [(name, value) for name, values in table.items() for value in values]


def shown(value):
    text = repr(value)
    return text[:40]


def test_every_field_is_tested():
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert set(BAD) | set(NOT_YET) == fields
    assert set(GOOD) | {"stop", "stop_token_ids"} | set(NOT_YET) == fields


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
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


@pytest.mark.parametrize(("name", "value"), pairs(NOT_YET), ids=lambda v: shown(v))
def test_what_is_to_come_is_refused_by_name(name, value):
    with pytest.raises(NotSupportedError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert str(error.value) == f"{name} is not supported yet; got {value!r}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1),
        ("presence_penalty", 0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1),
        ("prompt_logprobs", None),
        ("logit_bias", None),
        ("allowed_token_ids", None),
        ("bad_words", None),
    ],
)
def test_neutral_values_of_what_is_to_come_are_fine(name, value):
    assert SamplingParams(**{name: value}) == SamplingParams()


class _Array:
    """Compares element by element, as numpy's do."""

    def __eq__(self, other):
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias", "bad_words"])
def test_an_array_is_not_compared(name):
    with pytest.raises(NotSupportedError):
        SamplingParams(**{name: _Array()})


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


def test_a_default_that_is_to_come_does_not_refuse_every_request():
    defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    assert SamplingParams.resolve(None, {}, defaults) == SamplingParams(temperature=0.6)
    with pytest.raises(NotSupportedError, match="repetition_penalty"):
        SamplingParams.resolve(None, {"repetition_penalty": 1.1}, defaults)


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


def test_ignored_defaults():
    defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    assert ignored_defaults(defaults) == {"repetition_penalty": 1.1}
    assert ignored_defaults({"repetition_penalty": 1}) == {}


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
