"""SamplingParams: how a request's tokens are drawn and when it stops, in vLLM's terms."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinyvllm.errors import InvalidParameterError, did_you_mean

_GRAMMARS = ("json_schema", "regex", "grammar")
_MAX_LOGPROBS = 20
_MAX_N = 16_384
_MAX_BIASES = 4096
_MAX_BIAS = 100.0  # as in vLLM and OpenAI's API
_FLOAT32_MAX = 3.4028234663852886e38  # ops take these as float32
_FLOAT32_MIN = 1.1754943508222875e-38  # the smallest that is not denormal
_GREEDY_BELOW = 1e-5  # a temperature below means argmax, as in vLLM


def _fail(name: str, want: str, value: object) -> InvalidParameterError:
    return InvalidParameterError(f"{name} must be {want}; got {value!r}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises `InvalidParameterError`, field and value named, when out of range.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Same seed, same tokens, whatever else runs. None draws a fresh one. Choice i of `n` uses
    seed + i: it has the tokens of a request of its own with that seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; a str is taken as one string."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    """Tokens to generate at most; None: as many as max_model_len leaves room for. More than that
    is no error: it is cut to what fits, and finish_reason is then "length"."""
    min_tokens: int = 0
    """EOS and stop_token_ids cannot be drawn before this many tokens."""
    logprobs: int | None = None
    """None: none. k: the drawn token's log-probability and the k most likely, of the raw model
    distribution (natural log)."""
    skip_special_tokens: bool = True
    n: int = 1
    """Outputs to draw for the prompt; more than one needs a temperature."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the output has; from -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for each time that the output has it; from -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the logit of every token of prompt or output if it is positive, else multiplies it;
    above 1 discourages."""
    prompt_logprobs: int | None = None
    """As logprobs, for the tokens of the prompt. Such a request reads no prefix cache."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Token id -> what is added to its logit, from -100 to 100, before the penalties."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else can be drawn. None: everything can."""
    bad_words: tuple[str, ...] = ()
    """Texts that cannot be generated, with a space before them or without; what is kept from being
    drawn is the last of their tokens, where the others precede it."""
    json_schema: str | None = None
    """The text follows this JSON schema, given as JSON text or as a mapping. Like `regex` and
    `grammar`, of which a request has one at most, it needs `pip install llguidance`."""
    regex: str | None = None
    """The whole text matches this regular expression (no look-around, no back references)."""
    grammar: str | None = None
    """The text follows this Lark grammar, from its rule `start`."""

    def __post_init__(self) -> None:
        self._normalize()
        self._check_numbers()
        self._check_integers()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, "True or False", getattr(self, name))
        self._check_grammar()

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def needs_tokenizer(self) -> bool:
        """Even where the prompt is ids."""
        return bool(self.bad_words) or any(getattr(self, name) is not None for name in _GRAMMARS)

    @property
    def adjusts_logits(self) -> bool:
        """The draw is not from the model's own logits."""
        return bool(
            self.min_tokens
            or self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.needs_tokenizer
        )

    def check_vocab(self, vocab_size: int) -> None:
        """Raises `InvalidParameterError` for a token id that the model does not have."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise InvalidParameterError(
                        f"{name} has the token id {token_id}; those of this model are in "
                        f"[0, {vocab_size})",
                        param=name,
                    )

    def _normalize(self) -> None:
        """What may be given in several forms, in one: tuples, int keys, JSON text."""
        values: dict[str, Any] = {
            "stop": _strings("stop", self.stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "logit_bias": _biases(self.logit_bias),
        }
        if self.allowed_token_ids is not None:
            ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise _fail("allowed_token_ids", "None or at least one id", self.allowed_token_ids)
            values["allowed_token_ids"] = ids
        if isinstance(self.json_schema, Mapping):
            try:
                values["json_schema"] = json.dumps(self.json_schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidParameterError(
                    f"json_schema cannot be written as JSON: {error}", param="json_schema"
                ) from error
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _fail(name, "a number", value)
            # Compared before it is made a float, which an int from JSON may be too large for.
            if not low <= value <= high or value > _FLOAT32_MAX:
                kind = "float32" if _FLOAT32_MAX < value < math.inf else "number"
                is_open = high == math.inf
                want = f"a finite {kind} >= {low:g}" if is_open else f"from {low:g} to {high:g}"
                raise _fail(name, want, value)
        if self.top_p == 0.0:
            raise _fail("top_p", "above 0 (for greedy use temperature=0)", self.top_p)
        if self.repetition_penalty < _FLOAT32_MIN:
            raise _fail("repetition_penalty", "above 0 (1 is none)", self.repetition_penalty)

    def _check_integers(self) -> None:
        for name, low, is_optional in (
            ("top_k", -1, False),
            ("min_tokens", 0, False),
            ("max_tokens", 1, True),
            ("logprobs", 0, True),
            ("prompt_logprobs", 0, True),
            ("seed", -(2**63), True),
            ("n", 1, False),
        ):
            value = getattr(self, name)
            if value is None and is_optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise _fail(name, f"an integer >= {low}", value)
        if self.seed is not None and self.seed >= 2**63:
            raise _fail("seed", "below 2**63", self.seed)
        if self.top_k >= 2**31:
            raise _fail("top_k", "below 2**31", self.top_k)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > _MAX_LOGPROBS:
                raise _fail(name, f"at most {_MAX_LOGPROBS}", value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if self.n > _MAX_N:
            raise _fail("n", f"at most {_MAX_N}", self.n)
        if self.n > 1 and self.temperature < _GREEDY_BELOW:
            raise _fail("n", "1 with temperature=0, which draws the same output each time", self.n)

    def _check_grammar(self) -> None:
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        for name in given:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                kind = "JSON text or a mapping" if name == "json_schema" else "a non-empty string"
                raise _fail(name, kind, value)
        if len(given) > 1:
            raise InvalidParameterError(
                f"a request has one of {', '.join(_GRAMMARS)}; got {' and '.join(given)}",
                param=given[1],
            )
        if given and self.ignore_eos:
            raise InvalidParameterError(
                f"ignore_eos cannot be combined with {given[0]}: the text is complete at its EOS",
                param="ignore_eos",
            )

    @classmethod
    def resolve(
        cls,
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """`params` with `overrides` on top; without `params`, over the model's `defaults`."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in overrides:
            if name not in known:
                raise InvalidParameterError(
                    f"SamplingParams has no field {name!r}; {did_you_mean(name, sorted(known))}"
                    f"fields: {', '.join(sorted(known))}",
                    param=name,
                )
        if params is None:
            return cls(**{**(defaults or {}), **overrides})
        if not isinstance(params, SamplingParams):
            hint = "; or pass the fields as keywords" if isinstance(params, Mapping) else ""
            raise InvalidParameterError(
                f"params must be a SamplingParams; got {params!r}{hint}", param="params"
            )
        return dataclasses.replace(params, **overrides) if overrides else params


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, Sequence) or not all(isinstance(s, str) and s for s in items):
        raise _fail(name, "a non-empty string or a sequence of them", value)
    return tuple(items)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str | bytes)
        or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    ):
        raise _fail(name, "a sequence of token ids (integers >= 0)", value)
    return tuple(value)


def _biases(value: object) -> dict[int, float] | None:
    """A copy with int keys, which JSON writes as strings; None for None and {}."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _fail("logit_bias", "a mapping of token ids to numbers", value)
    if len(value) > _MAX_BIASES:
        raise _fail("logit_bias", f"of at most {_MAX_BIASES} token ids", value)
    biases = {}
    for key, bias in value.items():
        is_text = isinstance(key, str) and key.isdecimal() and len(key) < 20
        token_id = int(key) if is_text else key
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise _fail("logit_bias", "a mapping of token ids (integers >= 0) to numbers", value)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise _fail("logit_bias", "a mapping of token ids to numbers", value)
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise _fail("logit_bias", f"from {-_MAX_BIAS:g} to {_MAX_BIAS:g} for each id", value)
        biases[token_id] = float(bias)
    return biases or None
