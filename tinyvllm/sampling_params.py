"""SamplingParams: how a request's tokens are drawn and when it stops, in vLLM's terms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.errors import InvalidParameterError, NotSupportedError, did_you_mean

# Documented, and to come: any value but the neutral one raises NotSupportedError by name.
_NOT_YET: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
}
_MAX_LOGPROBS = 20
_FLOAT32_MAX = 3.4028234663852886e38  # ops take these as float32


def _fail(name: str, want: str, value: object) -> InvalidParameterError:
    return InvalidParameterError(f"{name} must be {want}; got {value!r}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises `InvalidParameterError` (field and value named) when out of range, `NotSupportedError`
    for parameters that this version only documents.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Same seed, same tokens, whatever else runs. None draws a fresh one."""
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NOT_YET.items():
            value = getattr(self, name)
            if isinstance(value, bool) or (
                value is not None if neutral is None else value != neutral
            ):
                raise NotSupportedError(f"{name} is not supported yet; got {value!r}", param=name)
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
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
        for name, low_int in (
            ("top_k", -1),
            ("min_tokens", 0),
            ("max_tokens", 1),
            ("logprobs", 0),
            ("seed", -(2**63)),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "logprobs", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low_int:
                raise _fail(name, f"an integer >= {low_int}", value)
        if self.seed is not None and self.seed >= 2**63:
            raise _fail("seed", "below 2**63", self.seed)
        if self.top_k >= 2**31:
            raise _fail("top_k", "below 2**31", self.top_k)
        if self.logprobs is not None and self.logprobs > _MAX_LOGPROBS:
            raise _fail("logprobs", f"at most {_MAX_LOGPROBS}", self.logprobs)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, "True or False", getattr(self, name))

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
            # A model's own default that is not built yet must not refuse every plain request; the
            # engine warns of it once, when it loads.
            known_defaults = {k: v for k, v in (defaults or {}).items() if k not in _NOT_YET}
            return cls(**{**known_defaults, **overrides})
        if not isinstance(params, SamplingParams):
            hint = "; or pass the fields as keywords" if isinstance(params, Mapping) else ""
            raise InvalidParameterError(
                f"params must be a SamplingParams; got {params!r}{hint}", param="params"
            )
        return dataclasses.replace(params, **overrides) if overrides else params


def ignored_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model's `defaults` that ask for what is not built yet: `resolve` drops them."""
    return {k: v for k, v in defaults.items() if k in _NOT_YET and v != _NOT_YET[k]}


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
