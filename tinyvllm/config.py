"""Configuration: what the user chooses (EngineConfig) and what the model says (ModelConfig).

Both are frozen and checked once, in their constructors. No torch here.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from tinyvllm.errors import ConfigError, did_you_mean

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "bfloat16", "float32"),
    "ops": ("native", "reference"),
    "scheduling": ("continuous", "static"),
}
_DEVICE = r"auto|cpu|cuda(:[0-9]{1,4})?"
_POSITIVE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_blocks",
    "expected_seq_len",
    "max_buffered_tokens",
    "max_queued_requests",
    "num_threads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs. Every field has a default that suits the machine.

    Raises `ConfigError`, naming field and value, for anything unknown or out of range.
    """

    device: str = "auto"
    """"auto" (CUDA where there is one), "cpu", "cuda" or "cuda:1"."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Weights, activations and KV cache; "auto" is bfloat16. float32 needs ops="reference"."""
    ops: Literal["native", "reference"] = "native"
    """"reference" runs the model through plain torch: slow, and the specification."""
    max_num_seqs: int | None = None
    """Slots: sequences that run at once. None: 64 on a CPU, 256 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step; decode tokens first, then prompt chunks. None: 256 on a CPU, 8192
    on a GPU, and at least max_num_seqs."""
    max_model_len: int | None = None
    """Prompt plus output tokens of one sequence; None is the model's own limit."""
    block_size: int = 16
    """Tokens per KV block: 16 or 32."""
    num_blocks: int | None = None
    """KV blocks in the pool; None sizes it as max_num_seqs * expected_seq_len * 1.5 tokens,
    capped by half of the free memory."""
    expected_seq_len: int = 1024
    """Tokens a typical sequence reaches; only sizes the default pool."""
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    """Schedule and launch a step before the last one's tokens are known, so that the device never
    waits for the host. Where there are no graphs to launch (enforce_eager, ops="reference") every
    step waits for the last."""
    enforce_eager: bool = False
    """Never capture step graphs: for debugging."""
    scheduling: Literal["continuous", "static"] = "continuous"
    """"static" admits a batch only when the previous one is done: for comparison and teaching."""
    max_buffered_tokens: int = 1024
    """A stream whose reader lags this many tokens is not scheduled until it drains."""
    max_queued_requests: int = 65_536
    """Requests that may wait beyond the max_num_seqs that can run: one more is refused with
    `EngineOverloadedError`."""
    num_threads: int | None = None
    """CPU threads for ops; None is what affinity and cgroup allow."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}",
                    param=name,
                )
        for name in _POSITIVE:
            value = getattr(self, name)
            optional = name not in (
                "expected_seq_len",
                "max_buffered_tokens",
                "max_queued_requests",
            )
            if value is None and optional:
                continue
            low = 2 if name == "max_model_len" else 1  # a prompt's token and one to draw
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be an integer >= {low}; got {value!r}", param=name)
        if not isinstance(self.block_size, int) or self.block_size not in (16, 32):
            raise ConfigError(
                f"block_size must be 16 or 32; got {self.block_size!r}", param="block_size"
            )
        if (
            self.max_num_seqs is not None
            and self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes each step",
                param="max_num_batched_tokens",
            )
        if self.dtype == "float32" and self.ops != "reference":
            raise ConfigError('dtype="float32" needs ops="reference"', param="dtype")
        for name in ("enable_prefix_caching", "enforce_eager", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} must be True or False; got {getattr(self, name)!r}", param=name
                )
        if not isinstance(self.device, str) or not re.fullmatch(_DEVICE, self.device):
            raise ConfigError(
                f'device must be "auto", "cpu", "cuda" or "cuda:N"; got {self.device!r}',
                param="device",
            )

    @classmethod
    def resolve(cls, config: EngineConfig | None, overrides: dict[str, Any]) -> EngineConfig:
        """`config` (or the defaults) with `overrides` on top. Raises `ConfigError`."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in overrides:
            if name not in known:
                raise ConfigError(
                    f"EngineConfig has no field {name!r}; {did_you_mean(name, sorted(known))}"
                    f"fields: {', '.join(sorted(known))}",
                    param=name,
                )
        if config is None:
            return cls(**overrides)
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig; got {config!r}", param="config")
        return dataclasses.replace(config, **overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, HF half-split layout. rope_type: "default", "linear" or "llama3"."""

    rope_theta: float = 10000.0
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a llama-family model, read from config.json by `loader`."""

    architecture: str
    """HF class name: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on q, k, v (Qwen2; Llama with attention_bias, which also puts one on o_proj)."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim of q and k before RoPE (Qwen3)."""
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """generation_config.json first, then config.json."""
    bos_token_id: int | None = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    """temperature, top_k, top_p, min_p, repetition_penalty as generation_config.json gives them."""
