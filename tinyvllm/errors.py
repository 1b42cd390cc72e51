"""Every error that tinyvllm raises on purpose.

TinyvllmError
├── InvalidParameterError (ValueError)     a caller's argument is wrong; `.param` names it
│   ├── ConfigError                        an EngineConfig field
│   ├── NotSupportedError                  a documented parameter that is not built yet
│   └── ContextLengthError                 the prompt leaves no room within max_model_len
├── ModelError                             a model directory cannot be used; `.path`
│   ├── ModelNotFoundError                 no such alias, directory or repository
│   ├── ModelConfigError                   config.json / generation_config.json
│   ├── CheckpointError                    safetensors or GGUF; `.path`, `.tensor`
│   └── TokenizerError                     tokenizer.json, chat template
│       └── ChatTemplateError
└── EngineError
    ├── EngineClosedError                  used before start() or after aclose()
    ├── EngineOverloadedError              the waiting queue is full; `.retry_after` seconds
    ├── RequestTimeoutError                the request's `timeout=` is over; `.timeout` seconds
    └── EngineDeadError                    the engine thread failed; `__cause__` says why
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike


class TinyvllmError(Exception):
    """Base of every error raised on purpose by tinyvllm."""


class InvalidParameterError(TinyvllmError, ValueError):
    """A caller's argument is wrong. `param` is its name; the message carries its value."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(InvalidParameterError):
    """A field of `EngineConfig` is unknown, of the wrong type or out of range."""


class NotSupportedError(InvalidParameterError):
    """A documented parameter that this version does not implement yet."""


class ContextLengthError(InvalidParameterError):
    """A prompt leaves no room for an output token within `max_model_len`."""


class ModelError(TinyvllmError):
    """A model cannot be used. `path` is the file or directory that is at fault."""

    def __init__(self, message: str, *, path: str | PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else str(path)


class ModelNotFoundError(ModelError):
    """No alias, directory or repository of that name gives a model."""


class ModelConfigError(ModelError):
    """config.json or generation_config.json is missing, malformed or asks for the unsupported."""


class CheckpointError(ModelError):
    """A weights file is missing, truncated or does not fit config.json. `tensor`: the weight."""

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.tensor = tensor


class TokenizerError(ModelError):
    """tokenizer.json (or the text given to it) cannot be used."""


class ChatTemplateError(TokenizerError):
    """The model has no chat template, or its template refuses these messages."""


class EngineError(TinyvllmError):
    """The engine cannot take or finish a request."""


class EngineClosedError(EngineError):
    """The engine was not started, or has been closed."""


class EngineOverloadedError(EngineError):
    """The queue of waiting requests is full. `retry_after` is a hint in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeoutError(EngineError):
    """A request did not end within its `timeout`, in seconds. Its tokens so far came before."""

    def __init__(self, message: str, *, timeout: float) -> None:
        super().__init__(message)
        self.timeout = timeout


class EngineDeadError(EngineError):
    """The engine thread failed; its exception is chained as `__cause__`."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` for an error's message; empty when nothing known is near `name`."""
    import difflib  # only errors need it

    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
