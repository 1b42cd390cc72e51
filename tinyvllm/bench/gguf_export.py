"""A checkpoint directory as a BF16 GGUF without a vocabulary, for llama.cpp to be measured with.

Token ids go in and come out, so no tokenizer is needed. The weights are the same bits that the
other engines read; norms are F32, as llama.cpp wants them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from tinyvllm import hub, loader
from tinyvllm.bench.contenders import UnavailableError
from tinyvllm.config import ModelConfig, RopeConfig
from tinyvllm.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from collections.abc import Iterator

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
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


def cached_bf16_gguf(model_dir: Path) -> Path:
    """The GGUF of `model_dir`, written to the cache directory unless it is there already."""
    stamp = "".join(
        f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}\n"
        for path in sorted(model_dir.glob("*.safetensors"))
    )
    key = hashlib.sha256(f"{model_dir.resolve()}\n{stamp}".encode()).hexdigest()[:16]
    path = hub.cache_dir() / "bench" / f"{key}-bf16.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        os.close(handle)
        try:
            export_bf16_gguf(model_dir, Path(name))
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def export_bf16_gguf(model_dir: Path, path: Path) -> None:
    """Write `path`. Raises `UnavailableError` for an architecture that has no GGUF name here."""
    import gguf

    config = loader.load_config(model_dir)
    arch = _ARCHITECTURES.get(config.architecture)
    if arch is None:
        raise UnavailableError(f"no GGUF export for {config.architecture}")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.rope.rope_type == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factor)
    elif config.rope.rope_type == "llama3":
        plain = inverse_frequencies(RopeConfig(rope_theta=config.rope.rope_theta), config.head_dim)
        stretch = plain / inverse_frequencies(config.rope, config.head_dim)
        writer.add_tensor("rope_freqs.weight", stretch.to(torch.float32).numpy())
    for name, tensor in _tensors(model_dir):
        if config.tie_word_embeddings and name.startswith("lm_head."):
            continue
        _add_tensor(writer, gguf, _gguf_name(name), _permuted(name, tensor, config, arch))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[inner]}.{kind}"


def _permuted(name: str, tensor: torch.Tensor, config: ModelConfig, arch: str) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs for arch "llama": q and k rows are reordered for it."""
    kind = name.split(".")[-2]
    if arch != "llama" or kind not in ("q_proj", "k_proj"):
        return tensor
    heads = config.num_heads if kind == "q_proj" else config.num_kv_heads
    halves = tensor.reshape(heads, 2, config.head_dim // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, gguf: Any, name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim == 1:
        writer.add_tensor(name, tensor.to(torch.float32).numpy())
        return
    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
