"""Random tiny checkpoints that both tinyvllm and transformers load, for tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinyvllm.loader import expected_shapes, load_config

if TYPE_CHECKING:
    from pathlib import Path

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# 3 kv heads in groups of 3; heads of 64 and 128; odd vocabularies; every branch of the forward.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-untied": ("LlamaForCausalLM", {"tie_word_embeddings": False, "vocab_size": 503}),
    "llama-odd": (
        "LlamaForCausalLM",
        {
            "hidden_size": 117,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 203,
            "num_hidden_layers": 3,
        },
    ),
    "llama-biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("LlamaForCausalLM", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5}),
    "llama-rope-linear": ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-mha": ("LlamaForCausalLM", {"num_key_value_heads": 4, "head_dim": 32}),
    "mistral": ("MistralForCausalLM", {"head_dim": 128, "num_attention_heads": 2}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 13}),
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": 32}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 0,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),
    "qwen3-untied": ("Qwen3ForCausalLM", {"tie_word_embeddings": False, "rope_theta": 1e6}),
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "Once upon a time there was a small engine that streamed its tokens one by one.",
    "The quick brown fox jumps over the lazy dog; the dog, in turn, counts from 0 to 987654321.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Là-bas, l'été est déjà fini.",
    "def forward(self, buffers, batch, kv_cache):\n    return self.ops.linear(buffers, batch)\n",
    "日本語の文章と、絵文字 🎉👩‍👩‍👧 と、e\u0301 の結合文字。한국어 문장. Ещё русский текст.",
]


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """config.json of a tiny model; `overrides` replace or add keys."""
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_act": "silu",
        "vocab_size": 311,
        "hidden_size": 128,
        "intermediate_size": 224,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        **overrides,
    }


def make_tiny_model(
    path: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_shards: int = 1,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Writes a complete model directory with random weights to `path` and returns it.

    Weights are scaled so that logits spread over several units: greedy choices are clear.
    """
    path.mkdir(parents=True, exist_ok=True)
    values = tiny_config(architecture, dtype=str(dtype).removeprefix("torch."), **config_overrides)
    write_json(path / "config.json", values)
    write_json(
        path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": values["eos_token_id"]}
    )
    write_tokenizer(path, values["vocab_size"])
    save_weights(path, random_weights(path, dtype, seed), num_shards)
    return path


def random_weights(path: Path, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, by HF name, for the config.json in `path`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(load_config(path)).items():
        weight = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weight = 1.0 + 0.1 * weight
        elif name.endswith("bias"):
            weight = 0.3 * weight
        else:
            gain = 3.0 if "embed" in name or "lm_head" in name else 1.0
            weight = weight * gain / shape[-1] ** 0.5
        tensors[name] = weight.to(dtype)
    return tensors


def save_weights(path: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """Writes one model.safetensors, or `num_shards` shards and their index."""
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard::num_shards]
        save_file({n: tensors[n] for n in mine}, path / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file_name)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(path / "model.safetensors.index.json", index)


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level BPE of exactly `vocab_size` tokens (at least 259) with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    contents = json.loads(tokenizer.to_str())
    vocab = contents["model"]["vocab"]
    for idx in range(len(vocab), vocab_size):  # no merge makes these, but the model may
        vocab[f"<filler{idx}>"] = idx
    write_json(path / "tokenizer.json", contents)
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
