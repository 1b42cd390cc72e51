"""Tiny GGUF files, written with the `gguf` package as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from support.tiny_models import make_tiny_model, random_weights

from tinyvllm.loader import load_config

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

QUANTIZATION = GGMLQuantizationType
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_NAMES = {
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
# A sentencepiece vocabulary: unknown, bos, eos, 256 bytes, letters, and pieces by falling score.
SPM_PIECES = ["▁", "e", "o", "h", "l", "t", "a", "n", "é", "日", "r", "w", "d", "s", "."]
SPM_WORDS = ["▁t", "he", "▁the", "ll", "▁h", "▁he", "hell", "▁hell", "▁hello", "or", "▁w", "▁wor"]
SPM_WORDS += ["ld", "▁world", "▁▁", "an", "and", "▁and"]


def gguf_name(hf_name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    base, suffix = hf_name.rsplit(".", 1)
    if base.startswith("model.layers."):
        _, _, layer, base = base.split(".", 3)
        return f"blk.{layer}.{_NAMES[base]}.{suffix}"
    return f"{_NAMES[base]}.{suffix}"


def permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's own formula for q and k rows."""
    shape = weight.shape
    halves = weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def make_tiny_gguf(
    path: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    quantization: GGMLQuantizationType = QUANTIZATION.F32,
    tokenizer: str = "gpt2",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    drop: tuple[str, ...] = (),
    **config_overrides: Any,
) -> dict[str, torch.Tensor]:
    """Writes a GGUF file to `path`; returns the weights that it holds, by HF name, in f32.

    `metadata` and `tensors` are added under their GGUF names, or replace; `drop` leaves keys or
    tensors out. Matrices are quantized, vectors are F32.
    """
    source = make_tiny_model(path.with_suffix(".source"), architecture, **config_overrides)
    config = load_config(source)
    weights = {n: w.float() for n, w in random_weights(source, torch.float32).items()}
    arch = ARCHITECTURES[architecture]
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    values = {f"{arch}.{key}": value for key, value in values.items()}
    values |= _tokenizer_metadata(source, tokenizer, config.vocab_size) | (metadata or {})
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        if key not in drop:
            _add(writer, key, value)
    stored: dict[str, torch.Tensor] = {}
    written: dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]] = {}
    for name, weight in weights.items():
        heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
        num_heads = next((n for part, n in heads.items() if part in name and arch == "llama"), 0)
        kind = quantization if weight.ndim == 2 else QUANTIZATION.F32
        ours = permute(weight, num_heads) if num_heads else weight
        data = quantize(ours.numpy(), kind)
        written[gguf_name(name)] = (data, kind)
        # A row is quantized by itself, so that permuting and quantizing may be swapped.
        stored[name] = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind).copy())
    for name, array in (tensors or {}).items():
        written[name] = (array, QUANTIZATION.F32)
    for name, (data, kind) in written.items():
        if name not in drop:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _tokenizer_metadata(source: Path, tokenizer: str, vocab_size: int) -> dict[str, Any]:
    if tokenizer == "gpt2":
        contents = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = contents["model"]["vocab"]
        tokens = sorted(vocab, key=vocab.__getitem__)
        merges = [m if isinstance(m, str) else " ".join(m) for m in contents["model"]["merges"]]
        template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": template,
        }
    pieces = [*SPM_PIECES, *SPM_WORDS]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-1e6] * len(SPM_PIECES) + [-float(i) for i in range(len(SPM_WORDS))]
    spare = vocab_size - len(tokens)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *(f"<spare{i}>" for i in range(spare))],
        "tokenizer.ggml.token_type": [*types, *[5] * spare],
        "tokenizer.ggml.scores": [*scores, *[0.0] * spare],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
