"""tinyvllm: a small, complete, fast LLM inference engine as an async Python library."""

from tinyvllm.async_engine import AsyncEngine
from tinyvllm.config import EngineConfig
from tinyvllm.engine import EngineHealth, EngineStats, SequenceStats
from tinyvllm.errors import (
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidParameterError,
    ModelConfigError,
    ModelError,
    ModelNotFoundError,
    NotSupportedError,
    RequestTimeoutError,
    TinyvllmError,
    TokenizerError,
)
from tinyvllm.hub import DEFAULT_MODEL
from tinyvllm.llm import LLM, ChoiceOutput, RequestOutput
from tinyvllm.metrics import EngineCollector
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.stream import Timings, Token, TokenStream, Usage
from tinyvllm.tokenizer import Tokenizer
from tinyvllm.version import __version__

__all__ = [
    "DEFAULT_MODEL",
    "LLM",
    "AsyncEngine",
    "ChatTemplateError",
    "CheckpointError",
    "ChoiceOutput",
    "ConfigError",
    "ContextLengthError",
    "EngineClosedError",
    "EngineCollector",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineHealth",
    "EngineOverloadedError",
    "EngineStats",
    "InvalidParameterError",
    "ModelConfigError",
    "ModelError",
    "ModelNotFoundError",
    "NotSupportedError",
    "RequestOutput",
    "RequestTimeoutError",
    "SamplingParams",
    "SequenceStats",
    "Timings",
    "TinyvllmError",
    "Token",
    "TokenStream",
    "Tokenizer",
    "TokenizerError",
    "Usage",
    "__version__",
]
