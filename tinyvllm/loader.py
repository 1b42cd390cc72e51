"""A model directory -> ModelConfig and a Transformer: strict, and fused as the forward wants it.

`load_config` reads config.json and generation_config.json, `load_model` the safetensors weights.
What does not fit is refused with the file and the key or tensor in the message; nothing is guessed.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinyvllm.checkpoint import TensorEntry, open_checkpoint, read_json_object
from tinyvllm.config import ModelConfig, RopeConfig
from tinyvllm.errors import CheckpointError, ModelConfigError, ModelError, NotSupportedError
from tinyvllm.gpu_memory import release_unused
from tinyvllm.models import LayerWeights, ModelWeights, Transformer, rope_cos_sin
from tinyvllm.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tinyvllm.ops import Ops

logger = logging.getLogger(__name__)

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Upper bounds far above any llama: a damaged number must not become a huge loop or allocation.
_MAX_SIZE, _MAX_LAYERS, _MAX_CONTEXT = 1 << 24, 1024, 1 << 24
_SAMPLING_DEFAULTS = {
    "temperature": (0.0, 1e6),
    "top_k": (-1, 2**31 - 1),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
}


class _Fields:
    """One JSON object of a config file; every getter names file, key and value when it refuses."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def fail(self, key: str, want: str) -> ModelConfigError:
        got = repr(self.values.get(key))
        got = got if len(got) <= 200 else got[:200] + "..."
        return ModelConfigError(
            f"{self.path}: {self.prefix}{key} {want}; got {got}", path=self.path
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The value; null counts as absent, as in transformers."""
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, max_value: int = _MAX_SIZE) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= max_value:
            raise self.fail(key, f"must be an integer from 1 to {max_value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < 2.0**63  # also refuses NaN, and integers that no float can hold
        ):
            raise self.fail(key, "must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
            raise self.fail(key, "must be a token id or a list of token ids")
        return tuple(ids)


def load_config(model_dir: Path) -> ModelConfig:
    """Reads config.json and, where there is one, generation_config.json.

    Raises `ModelConfigError` naming file, key and value for what is missing, wrong or unsupported.
    """
    path = model_dir / "config.json"
    fields = _Fields(path, read_json_object(path, ModelConfigError))
    architecture = _architecture(fields)
    if fields.get("quantization_config"):
        raise fields.fail("quantization_config", "is not supported: use unquantized weights")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.fail("hidden_act", 'must be "silu"')
    hidden_size = fields.size("hidden_size")
    num_layers = fields.size("num_hidden_layers", max_value=_MAX_LAYERS)
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    llama, qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
    # Qwen3's class default is not hidden_size / num_heads.
    if fields.get("head_dim") is None and not qwen3 and hidden_size % num_heads:
        raise fields.fail("head_dim", "is needed: num_attention_heads does not divide hidden_size")
    head_dim = fields.size("head_dim", 128 if qwen3 else hidden_size // num_heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "must be even")
    bias = fields.flag("attention_bias") and (llama or qwen3)
    max_position_embeddings = fields.size("max_position_embeddings", max_value=_MAX_CONTEXT)
    generation = _generation_fields(model_dir)
    bos = generation.token_ids("bos_token_id") or fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(fields, max_position_embeddings),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=bias,
        mlp_bias=fields.flag("mlp_bias") and llama,
        qk_norm=qwen3,
        sliding_window=_sliding_window(fields, architecture, num_layers),
        eos_token_ids=generation.token_ids("eos_token_id") or fields.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        sampling_defaults=_sampling_defaults(generation),
    )


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures")
    if names is None:  # old configs say only model_type
        for name, model_type in _ARCHITECTURES.items():
            if fields.get("model_type") == model_type:
                return name
        raise fields.fail("architectures", f"must name one of {', '.join(_ARCHITECTURES)}")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_ARCHITECTURES):
        raise fields.fail("architectures", f"must name one of {', '.join(_ARCHITECTURES)}")
    return str(names[0])


def _rope(fields: _Fields, max_position_embeddings: int) -> RopeConfig:
    """rope_parameters (transformers 5) or rope_scaling (before), either with its old spelling."""
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    scaling = fields.get(key, {})
    if not isinstance(scaling, dict):
        raise fields.fail(key, "must be an object")
    rope = _Fields(fields.path, scaling, f"{key}.")
    type_key = "rope_type" if "rope_type" in scaling else "type"
    rope_type = rope.get(type_key, "default")
    for owner in (fields, rope):
        if owner.get("partial_rotary_factor", 1.0) != 1.0:
            raise owner.fail("partial_rotary_factor", "must be 1")
    theta = (rope if rope.get("rope_theta") is not None else fields).number("rope_theta", 10000.0)
    if rope_type == "default":
        return RopeConfig(rope_theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_theta=theta, rope_type="linear", factor=rope.number("factor"))
    if rope_type != "llama3":
        raise rope.fail(type_key, "must be default, linear or llama3")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.fail("low_freq_factor", f"must be below high_freq_factor ({high})")
    return RopeConfig(
        rope_theta=theta,
        rope_type="llama3",
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.size(
            "original_max_position_embeddings", max_position_embeddings, _MAX_CONTEXT
        ),
    )


def _sliding_window(fields: _Fields, architecture: str, num_layers: int) -> int | None:
    """One window for all layers, or None. Models that mix both kinds of layer are refused."""
    if architecture == "MistralForCausalLM":
        # Absent is the class default of transformers; null switches it off.
        return fields.size("sliding_window", 4096) if _has_window(fields) else None
    if architecture == "LlamaForCausalLM" or not fields.flag("use_sliding_window"):
        return None
    window = fields.size("sliding_window", 4096) if _has_window(fields) else None
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if layer_types == ["full_attention"] * num_layers:
            return None
        if layer_types == ["sliding_attention"] * num_layers:
            return window
        raise fields.fail("layer_types", "must be the same for all layers")
    first = fields.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or 0 < first < num_layers:
        raise fields.fail("max_window_layers", f"must be 0 or at least {num_layers} (all layers)")
    return window if first <= 0 else None


def _has_window(fields: _Fields) -> bool:
    return fields.values.get("sliding_window", 4096) is not None


def _generation_fields(model_dir: Path) -> _Fields:
    path = model_dir / "generation_config.json"
    if not path.exists() and not path.is_symlink():
        return _Fields(path, {})
    return _Fields(path, read_json_object(path, ModelConfigError))


def _sampling_defaults(generation: _Fields) -> dict[str, float]:
    defaults: dict[str, float] = {}
    for key, (low, high) in _SAMPLING_DEFAULTS.items():
        value = generation.get(key)
        if value is None:
            continue
        kinds = int if key == "top_k" else int | float
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            raise generation.fail(key, f"must be a number from {low} to {high}")
        defaults[key] = value
    return defaults


def load_model(
    model_dir: Path,
    config: ModelConfig,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Callable[[str, float], None] | None = None,
) -> Transformer:
    """Maps the safetensors of `model_dir` and copies them, fused and packed for `ops`, to `device`.

    BF16, F16 and F32 may be mixed; all become `dtype`. `max_model_len` sizes the rotary table.
    `progress(phase, fraction)` is called as layers arrive. Raises `CheckpointError` with file and
    tensor before anything is copied if a tensor is missing, unexpected or does not fit `config`;
    for a GPU, `ModelError` if the weights do not fit into its memory, and `NotSupportedError` if
    the kernels were not built for it.
    """
    entries = open_checkpoint(model_dir)
    _check_entries(model_dir, config, entries)
    cos_sin = rope_cos_sin(config.rope, config.head_dim, max_model_len)
    if device.type == "cpu":
        weights = _load_weights(_MappedReader(entries, ops, dtype), config, cos_sin, progress)
    else:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        reader = _StagedReader(entries, ops, dtype, device)
        weights = _load_to_gpu(model_dir, config, reader, cos_sin, progress)
    if progress is not None:
        progress("loading weights", 1.0)
    return Transformer(config, ops, weights)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the weights in `dtype`, and how many more are needed while they are loaded: those
    of the largest weight before it is packed."""
    shapes = expected_shapes(config)
    total = sum(prod(shape) for shape in shapes.values())
    head = config.vocab_size * config.hidden_size
    if config.tie_word_embeddings:
        total += head  # the embedding's rows are looked up, those of the head are packed
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    largest = config.hidden_size * max(heads, 2 * config.intermediate_size)
    if not config.tie_word_embeddings:
        largest = max(largest, head)
    return total * dtype.itemsize, largest * dtype.itemsize


def _load_to_gpu(
    model_dir: Path,
    config: ModelConfig,
    reader: _StagedReader,
    cos_sin: torch.Tensor,
    progress: Callable[[str, float], None] | None,
) -> ModelWeights:
    start, device = perf_counter(), reader.device
    num_bytes, more = weight_bytes(config, reader.dtype)
    free, total = torch.cuda.mem_get_info(device)
    too_large = ModelError(
        f"{model_dir}: the weights take {_gib(num_bytes)} on {device}, and {_gib(more)} more while "
        f"they are loaded; {_gib(free)} of its {_gib(total)} are free: stop other programs there, "
        "choose another device=, or a smaller model",
        path=model_dir,
    )
    if num_bytes + more > free:
        raise too_large
    try:
        with reader.staged(_reading_order(config)):
            weights = _load_weights(reader, config, cos_sin.to(device), progress)
    except torch.OutOfMemoryError as exc:
        raise too_large from exc.with_traceback(None)  # whose frames hold what was loaded
    except RuntimeError as exc:
        if "no kernel image" not in str(exc):
            raise
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"{major}{minor}{'a' if (major, minor) == (9, 0) else ''}-real"
        advice = f"build it again, with CUDAARCHS unset or {arch}" if major >= 8 else 'use "cpu"'
        raise NotSupportedError(
            f"device {str(device)!r}: this tinyvllm has no kernels for compute capability "
            f"{major}.{minor} (8.0 or newer is needed): {advice}",
            param="device",
        ) from exc.with_traceback(None)
    release_unused()  # what was there before packing: the pool is sized by what is free
    seconds = perf_counter() - start
    logger.info(
        "%s of weights on %s in %.2f s (%.1f GB/s)",
        *(_gib(num_bytes), device, seconds, num_bytes / seconds / 1e9),
    )
    return weights


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that `config` calls for, under its HF name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_size, config.attention_out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for idx in range(config.num_layers):
        prefix = f"model.layers.{idx}."
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    return shapes


def _check_entries(model_dir: Path, config: ModelConfig, entries: dict[str, TensorEntry]) -> None:
    expected = expected_shapes(config)
    if missing := [name for name in expected if name not in entries]:
        raise CheckpointError(
            f"{model_dir}: tensor {missing[0]} is missing ({len(missing)} missing in all)",
            path=model_dir,
            tensor=missing[0],
        )
    for name, entry in entries.items():
        if name.endswith("rotary_emb.inv_freq"):  # a constant that old checkpoints carry along
            continue
        shape = expected.get(name)
        if name == "lm_head.weight" and shape is None:
            shape = expected["model.embed_tokens.weight"]
        if shape is None:
            raise CheckpointError(
                f"{entry.path}: tensor {name!r} is unexpected for {config.architecture}",
                path=entry.path,
                tensor=name,
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.path}: tensor {name} has shape {list(entry.shape)}; "
                f"config.json calls for {list(shape)}",
                path=entry.path,
                tensor=name,
            )
        entry.check_dtype()
    head, embed = entries.get("lm_head.weight"), entries["model.embed_tokens.weight"]
    if config.tie_word_embeddings and head and not torch.equal(head.read(), embed.read()):
        raise CheckpointError(
            f"{head.path}: tensor lm_head.weight differs from model.embed_tokens.weight, "
            "but config.json says tie_word_embeddings",
            path=head.path,
            tensor="lm_head.weight",
        )


class _Reader:
    """Checked entries -> tensors in the model's dtype, on its device."""

    def __init__(self, entries: dict[str, TensorEntry], ops: Ops, dtype: torch.dtype) -> None:
        self._entries, self._ops, self.dtype = entries, ops, dtype

    def read(self, *names: str) -> torch.Tensor:
        """The tensors of these names, joined along their first dimension: always a copy."""
        raise NotImplementedError

    def packed(self, *names: str) -> torch.Tensor:
        """Their rows, joined, in the layout that the linears of `ops` read."""
        return self.pack(self.read(*names))

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.pack_linear(weight)

    def packed_gated(self, gate: str, up: str) -> torch.Tensor:
        """Both, in the layout that `ops.norm_gated_linear` reads."""
        return self._ops.pack_gated_linear(self.read(gate, up))

    def _empty(
        self, entries: Sequence[TensorEntry], device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """For all of them, joined."""
        num_rows = sum(entry.shape[0] for entry in entries)
        return torch.empty((num_rows, *entries[0].shape[1:]), dtype=self.dtype, device=device)


class _MappedReader(_Reader):
    """On a CPU: one copy, out of the mapped file."""

    def read(self, *names: str) -> torch.Tensor:
        entries = [self._entries[name] for name in names]
        if any(entry.check_dtype() != self.dtype for entry in entries):
            parts = [entry.read().to(self.dtype, copy=True) for entry in entries]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        # By numpy: torch would split each copy over its threads, and on a busy machine the waiting
        # for one another takes ten times as long as the copy.
        joined = self._empty(entries)
        np.concatenate(
            [entry.raw() for entry in entries], out=joined.view(torch.uint8).numpy().reshape(-1)
        )
        return joined


class _StagedReader(_Reader):
    """On a GPU: some are copied while the next are read, `with staged(names)` in that order."""

    def __init__(
        self, entries: dict[str, TensorEntry], ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(entries, ops, dtype)
        self.device = device

    @contextmanager
    def staged(self, names: Iterable[str], **sizes: int) -> Iterator[None]:
        """What it holds, pinned memory and threads, is gone afterwards. `sizes`: of `Staging`."""
        entries = [self._entries[name] for name in names]
        with Staging(entries, self.device, **sizes) as self._staging:
            yield

    def read(self, *names: str) -> torch.Tensor:
        entries = [self._entries[name] for name in names]
        joined, row = self._empty(entries, self.device), 0
        for entry in entries:
            self._staging.copy_to(joined[row : row + entry.shape[0]], entry)
            row += entry.shape[0]
        return joined


class _Order(_Reader):
    """Only notes what it is asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def read(self, *names: str) -> torch.Tensor:
        self.names += names
        return torch.empty(0)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def packed_gated(self, gate: str, up: str) -> torch.Tensor:
        return self.read(gate, up)


def _reading_order(config: ModelConfig) -> list[str]:
    """The names of all weights, as `_load_weights` reads them."""
    order = _Order()
    _load_weights(order, config, torch.empty(0), None)
    return order.names


def _load_weights(
    reader: _Reader,
    config: ModelConfig,
    cos_sin: torch.Tensor,
    progress: Callable[[str, float], None] | None,
) -> ModelWeights:
    layers = []
    for idx in range(config.num_layers):
        if progress is not None:
            progress("loading weights", idx / config.num_layers)
        layers.append(_load_layer(reader, config, f"model.layers.{idx}."))
    embed_tokens = reader.read("model.embed_tokens.weight")
    tied = config.tie_word_embeddings
    return ModelWeights(
        embed_tokens=embed_tokens,
        layers=tuple(layers),
        norm=reader.read("model.norm.weight"),
        lm_head=reader.pack(embed_tokens) if tied else reader.packed("lm_head.weight"),
        cos_sin=cos_sin,
    )


def _load_layer(reader: _Reader, config: ModelConfig, prefix: str) -> LayerWeights:
    attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = tuple(f"{attn}{name}_proj." for name in "qkv")
    gate_up = (f"{mlp}gate_proj.", f"{mlp}up_proj.")

    def weights(names: tuple[str, ...]) -> torch.Tensor:
        return reader.packed(*(f"{name}weight" for name in names))

    def biases(wanted: bool, *names: str) -> torch.Tensor | None:
        return reader.read(*(f"{name}bias" for name in names)) if wanted else None

    return LayerWeights(
        input_layernorm=reader.read(f"{prefix}input_layernorm.weight"),
        qkv_proj=weights(qkv),
        o_proj=weights((f"{attn}o_proj.",)),
        post_attention_layernorm=reader.read(f"{prefix}post_attention_layernorm.weight"),
        gate_up_proj=reader.packed_gated(*(f"{name}weight" for name in gate_up)),
        down_proj=weights((f"{mlp}down_proj.",)),
        qkv_bias=biases(config.attention_bias, *qkv),
        o_bias=biases(config.attention_out_bias, f"{attn}o_proj."),
        gate_up_bias=biases(config.mlp_bias, *gate_up),
        down_bias=biases(config.mlp_bias, f"{mlp}down_proj."),
        q_norm=reader.read(f"{attn}q_norm.weight") if config.qk_norm else None,
        k_norm=reader.read(f"{attn}k_norm.weight") if config.qk_norm else None,
    )
