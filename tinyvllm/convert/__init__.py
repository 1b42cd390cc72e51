"""GGUF -> a model directory: `python -m tinyvllm.convert IN.gguf OUT_DIR`.

Takes the llama, qwen2 and qwen3 architectures in any quantization that the `gguf` package can
expand, and writes config.json, generation_config.json, model.safetensors (BF16), tokenizer.json and
tokenizer_config.json. The directory appears complete or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinyvllm.config import RopeConfig
from tinyvllm.convert.gguf_file import GgufFile
from tinyvllm.convert.gguf_tokenizer import convert_tokenizer, special_token_ids
from tinyvllm.errors import CheckpointError, ModelConfigError, ModelError
from tinyvllm.loader import expected_shapes, load_config
from tinyvllm.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinyvllm.config import ModelConfig
    from tinyvllm.convert.gguf_file import GgufTensor

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# What every published Llama 3 has; GGUF keeps only the factors that follow from it.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_CHUNK_ELEMENTS = 1 << 23  # values expanded to f32 at a time


def convert_gguf(
    gguf_path: Path, out_dir: Path, *, progress: Callable[[str, float], None] | None = None
) -> None:
    """Converts the GGUF file at `gguf_path` to a new model directory `out_dir`.

    Raises `CheckpointError` (file, tensor or key in the message) for a damaged file or what is not
    supported in it, `TokenizerError` for its tokenizer, `ModelError` when `out_dir` cannot be
    written. Whatever happens, `out_dir` is complete or does not exist.
    """
    file = GgufFile(gguf_path)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ModelError(f"{out_dir}: exists already; name a new directory", path=out_dir)
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        # Beside its target, so that the rename at the end stays on one filesystem.
        work_dir = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    except OSError as exc:
        raise ModelError(f"{out_dir}: cannot be written: {exc}", path=out_dir) from exc
    try:
        _convert_into(file, work_dir, progress or (lambda phase, fraction: None))
        work_dir.chmod(0o755)  # mkdtemp's own mode is private
        os.replace(work_dir, out_dir)
    except OSError as exc:
        raise ModelError(f"{out_dir}: cannot be written: {exc}", path=out_dir) from exc
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _convert_into(file: GgufFile, out_dir: Path, progress: Callable[[str, float], None]) -> None:
    tokenizer, tokenizer_config = convert_tokenizer(file)
    _write_json(out_dir / "config.json", _hf_config(file))
    _write_json(out_dir / "generation_config.json", special_token_ids(file))
    _write_json(out_dir / "tokenizer.json", tokenizer)
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    try:
        config = load_config(out_dir)
    except ModelConfigError as exc:
        raise CheckpointError(f"{file.path}: its metadata gives {exc}", path=file.path) from exc
    _write_weights(file, config, out_dir / "model.safetensors", progress)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as out:
        json.dump(value, out, ensure_ascii=False, indent=2)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())


def _hf_config(file: GgufFile) -> dict[str, Any]:
    """config.json as transformers would have it. `load_config` checks the values."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        file.fail(
            f"general.architecture is {str(arch)[:100]!r}; supported: {', '.join(_ARCHITECTURES)}"
        )

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    def get_float(key: str, default: float) -> float:
        value = get(key, default)
        if not isinstance(value, int | float) or not 0 < value < 1e12:
            file.fail(f"{arch}.{key} must be a number above 0; got {str(value)[:100]}")
        # f32 in the file: the nearest short decimal is what the model was made with.
        return float(f"{value:.7g}")

    if get("expert_count", 0):
        file.fail(f"{arch}.expert_count is {get('expert_count')}: experts are not supported")
    embedding = _tensor(file, "token_embd.weight")
    if len(file.metadata["tokenizer.ggml.tokens"]) > embedding.shape[0]:
        file.fail(f"tensor token_embd.weight has {embedding.shape[0]} rows, fewer than tokens")
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    config = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get_float("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": arch == "llama" and "blk.0.ffn_up.bias" in file.tensors,
        **special_token_ids(file),
    }
    rotated = get("rope.dimension_count")
    head_dim = get("attention.key_length", rotated)
    if head_dim is None and _is_positive(num_heads) and _is_positive(hidden_size):
        head_dim = hidden_size // num_heads
    if rotated not in (None, head_dim) or get("attention.value_length", head_dim) != head_dim:
        file.fail(f"{arch}: heads that are rotated only in part, or of two sizes, not supported")
    config["head_dim"] = head_dim
    theta = get_float("rope.freq_base", 10000.0)
    config["rope_theta"] = theta
    config["rope_scaling"] = _rope_scaling(file, arch, theta, head_dim)
    return config


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _rope_scaling(
    file: GgufFile, arch: str, theta: float, head_dim: object
) -> dict[str, Any] | None:
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{arch}.rope.scaling.factor")
    factor = file.metadata.get(f"{arch}.rope.scale_linear") if factor is None else factor
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    if kind == "none" and factor in (None, 0.0, 1.0):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor}
    file.fail(f"{arch}.rope.scaling.type is {kind!r}; supported: none, linear")


def _llama3_rope(file: GgufFile, theta: float, head_dim: object) -> dict[str, Any]:
    """rope_freqs holds one divisor per rotated pair: Llama 3's, or it is refused."""
    tensor = _tensor(file, "rope_freqs.weight")
    divisors = tensor.dequantize_rows(0, len(tensor.data)).reshape(-1)
    factor = float(divisors.max())
    if len(divisors) * 2 != head_dim:
        file.fail(f"tensor rope_freqs.weight has {len(divisors)} values for head_dim {head_dim}")
    plain = RopeConfig(rope_theta=theta)
    scaled = RopeConfig(
        rope_theta=theta,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_max_position_embeddings=_LLAMA3_CONTEXT,
    )
    size = 2 * len(divisors)
    expected = inverse_frequencies(plain, size) / inverse_frequencies(scaled, size)
    if not np.allclose(divisors, expected.numpy(), rtol=1e-3):
        file.fail("tensor rope_freqs.weight is not what Llama 3's rope scaling gives")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor {name} is missing", path=file.path, tensor=name)
    return file.tensors[name]


def _gguf_name(hf_name: str) -> str:
    base, _, suffix = hf_name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, base = base.split(".", 3)
        return f"blk.{layer}.{_HF_TO_GGUF[base]}.{suffix}"
    return f"{_HF_TO_GGUF[base]}.{suffix}"


def _write_weights(
    file: GgufFile, config: ModelConfig, path: Path, progress: Callable[[str, float], None]
) -> None:
    """Streams every tensor into one safetensors file, a chunk of rows in memory at a time."""
    shapes = expected_shapes(config)
    names = {hf_name: _gguf_name(hf_name) for hf_name in shapes}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for hf_name, shape in shapes.items():
        tensor = _tensor(file, names[hf_name])
        if tensor.shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name} has shape {list(tensor.shape)}; its metadata "
                f"calls for {list(shape)}",
                path=file.path,
                tensor=tensor.name,
            )
        end = offset + 2 * math.prod(shape)
        header[hf_name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    if extra := file.tensors.keys() - {*names.values(), "rope_freqs.weight"}:
        name = min(extra)
        raise CheckpointError(
            f"{file.path}: tensor {name!r} is unexpected", path=file.path, tensor=name
        )
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the data
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        begin = out.tell()
        for hf_name, name in names.items():
            progress("converting weights", (out.tell() - begin) / offset)
            for values in _bfloat16_chunks(
                file.tensors[name], _num_permuted_heads(file, config, hf_name)
            ):
                out.write(values)
        out.flush()
        os.fsync(out.fileno())
    progress("converting weights", 1.0)


def _num_permuted_heads(file: GgufFile, config: ModelConfig, hf_name: str) -> int:
    """Heads whose rows llama.cpp interleaved: q and k of its llama architecture, else 0."""
    if file.metadata["general.architecture"] != "llama":
        return 0
    if ".q_proj." in hf_name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in hf_name else 0


def _bfloat16_chunks(tensor: GgufTensor, num_permuted_heads: int) -> Iterator[bytes]:
    """The tensor's BF16 bytes in HF order. In a permuted head, rows 2i and 2i+1 are HF's rows i
    and i + head_dim/2: the two halves that are rotated together."""
    num_rows, row_size = len(tensor.data), tensor.shape[-1]
    if len(tensor.shape) == 1 and num_permuted_heads:  # a bias: one head is a piece of the row
        values = tensor.dequantize_rows(0, 1).reshape(num_permuted_heads, -1, 2)
        yield _bfloat16_bytes(values.swapaxes(1, 2))
        return
    head_rows = num_rows // num_permuted_heads if num_permuted_heads else 1
    step = max(1, _CHUNK_ELEMENTS // (row_size * head_rows)) * head_rows
    for begin in range(0, num_rows, step):
        rows = tensor.dequantize_rows(begin, begin + step)
        if num_permuted_heads:
            yield _bfloat16_bytes(rows.reshape(-1, head_rows // 2, 2, row_size).swapaxes(1, 2))
        else:
            yield _bfloat16_bytes(rows)


def _bfloat16_bytes(values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """Rounds to nearest even, as torch does."""
    contiguous = np.ascontiguousarray(values)
    if not contiguous.flags.writeable:  # f32 straight from the mapped file; torch warns about it
        contiguous = contiguous.copy()
    return torch.from_numpy(contiguous).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
