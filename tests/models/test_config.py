"""load_config: every spelling that published models use, and a named error for the rest."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.tiny_models import tiny_config, write_json

from tinyvllm.config import ModelConfig, RopeConfig
from tinyvllm.errors import ModelConfigError
from tinyvllm.loader import load_config

if TYPE_CHECKING:
    from pathlib import Path

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ABSENT = object()


def load(
    path: Path,
    architecture: str = "LlamaForCausalLM",
    generation: dict[str, Any] | None = None,
    **overrides: Any,
) -> ModelConfig:
    values = tiny_config(architecture, **overrides)
    write_json(path / "config.json", {k: v for k, v in values.items() if v is not ABSENT})
    if generation is not None:
        write_json(path / "generation_config.json", generation)
    return load_config(path)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, RopeConfig(rope_theta=10000.0)),
        ({"rope_theta": ABSENT}, RopeConfig(rope_theta=10000.0)),
        ({"rope_theta": 500000}, RopeConfig(rope_theta=500000.0)),
        ({"rope_scaling": None, "rope_theta": 1e6}, RopeConfig(rope_theta=1e6)),
        (
            {"rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            RopeConfig(rope_theta=5e5),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(rope_type="linear", factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 3e4}},
            RopeConfig(rope_theta=3e4, rope_type="linear", factor=2.5),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
            RopeConfig(rope_theta=5e5, rope_type="llama3", **LLAMA3),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(rope_theta=5e5, rope_type="llama3", **LLAMA3),
        ),
    ],
)
def test_rope_in_either_place_and_spelling(
    tmp_path: Path, overrides: dict[str, Any], expected: RopeConfig
) -> None:
    assert load(tmp_path, **overrides).rope == expected


@pytest.mark.parametrize(
    ("generation", "config_eos", "expected"),
    [
        (None, 2, (2,)),
        (None, [2, 0], (2, 0)),
        (None, None, ()),
        (None, ABSENT, ()),
        ({}, 2, (2,)),
        ({"eos_token_id": None}, 2, (2,)),
        ({"eos_token_id": 7}, 2, (7,)),
        ({"eos_token_id": [7, 8, 9]}, 2, (7, 8, 9)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, Any] | None, config_eos: Any, expected: tuple[int, ...]
) -> None:
    assert load(tmp_path, generation=generation, eos_token_id=config_eos).eos_token_ids == expected


def test_sampling_defaults(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "min_p": None}
    defaults = load(tmp_path, generation=generation).sampling_defaults
    assert defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert isinstance(defaults["top_k"], int)


def test_heads_are_derived_where_absent(tmp_path: Path) -> None:
    config = load(tmp_path, head_dim=ABSENT, num_key_value_heads=ABSENT)
    assert (config.head_dim, config.num_kv_heads) == (32, 4)
    config = load(tmp_path, head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads) == (32, 4)
    assert load(tmp_path, "Qwen3ForCausalLM", head_dim=ABSENT).head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "overrides", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 64}, None),
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": ABSENT}, 4096),
        ("Qwen2ForCausalLM", {"sliding_window": 64}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, None),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
            64,
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 2,
            },
            None,
        ),
    ],
)
def test_sliding_window(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], expected: int | None
) -> None:
    assert load(tmp_path, architecture, **overrides).sliding_window == expected


def test_biases_and_norms_follow_the_architecture(tmp_path: Path) -> None:
    def flags(architecture: str, **overrides: Any) -> tuple[bool, bool, bool, bool]:
        c = load(tmp_path, architecture, **overrides)
        return c.attention_bias, c.attention_out_bias, c.mlp_bias, c.qk_norm

    assert flags("LlamaForCausalLM") == (False, False, False, False)
    biased = flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert biased == (True, True, True, False)
    assert flags("MistralForCausalLM") == (False, False, False, False)
    assert flags("Qwen2ForCausalLM") == (True, False, False, False)
    assert flags("Qwen3ForCausalLM") == (False, False, False, True)


def test_model_type_serves_where_architectures_is_absent(tmp_path: Path) -> None:
    assert load(tmp_path, "Qwen2ForCausalLM", architectures=ABSENT).attention_bias


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("architecture-unknown", "architectures", {"architectures": ["GPT2LMHeadModel"]}),
    ("architecture-empty", "architectures", {"architectures": []}),
    ("architecture-not-text", "architectures", {"architectures": [{}]}),
    ("architecture-absent", "architectures", {"architectures": None, "model_type": "bert"}),
    ("quantized", "quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
    ("activation", "hidden_act", {"hidden_act": "gelu"}),
    ("vocab-absent", "vocab_size", {"vocab_size": None}),
    ("vocab-text", "vocab_size", {"vocab_size": "49152"}),
    ("vocab-zero", "vocab_size", {"vocab_size": 0}),
    ("vocab-huge", "vocab_size", {"vocab_size": 10**12}),
    ("hidden-float", "hidden_size", {"hidden_size": 128.0}),
    ("hidden-true", "hidden_size", {"hidden_size": True}),
    ("layers-absent", "num_hidden_layers", {"num_hidden_layers": None}),
    ("layers-bomb", "num_hidden_layers", {"num_hidden_layers": 10**9}),
    ("layers-negative", "num_hidden_layers", {"num_hidden_layers": -2}),
    ("heads-absent", "num_attention_heads", {"num_attention_heads": None}),
    ("kv-heads-odd", "num_key_value_heads", {"num_key_value_heads": 3}),
    ("head-dim-odd", "head_dim", {"head_dim": 63}),
    ("head-dim-needed", "head_dim", {"head_dim": None, "hidden_size": 130}),
    ("context-absent", "max_position_embeddings", {"max_position_embeddings": None}),
    ("eps-zero", "rms_norm_eps", {"rms_norm_eps": 0}),
    ("eps-text", "rms_norm_eps", {"rms_norm_eps": "1e-5"}),
    ("theta-negative", "rope_theta", {"rope_theta": -1.0}),
    ("theta-huge", "rope_theta", {"rope_theta": 10**400}),
    ("tie-number", "tie_word_embeddings", {"tie_word_embeddings": 1}),
    ("eos-text", "eos_token_id", {"eos_token_id": "</s>"}),
    ("eos-negative", "eos_token_id", {"eos_token_id": [-1]}),
    ("rope-yarn", "rope_scaling.rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}),
    ("rope-dynamic", "rope_scaling.type", {"rope_scaling": {"type": "dynamic", "factor": 4}}),
    ("rope-list", "rope_scaling", {"rope_scaling": [1]}),
    ("rope-no-factor", "rope_parameters.factor", {"rope_parameters": {"rope_type": "linear"}}),
    (
        "rope-llama3-incomplete",
        "rope_scaling.low_freq_factor",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
    ),
    (
        "rope-llama3-equal",
        "rope_scaling.low_freq_factor",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
    ),
    ("rope-partial", "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    (
        "window-mixed",
        "max_window_layers",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    (
        "window-mixed-types",
        "layer_types",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    (
        "window-text",
        "sliding_window",
        {"architectures": ["MistralForCausalLM"], "sliding_window": "all"},
    ),
]


@pytest.mark.parametrize(
    ("key", "overrides"),
    [pytest.param(key, overrides, id=name) for name, key, overrides in REFUSED],
)
def test_refused_values_name_file_key_and_value(
    tmp_path: Path, key: str, overrides: dict[str, Any]
) -> None:
    begin = time.perf_counter()
    with pytest.raises(ModelConfigError) as caught:
        load(tmp_path, **overrides)
    assert time.perf_counter() - begin < 1
    assert str(tmp_path / "config.json") in str(caught.value)
    assert f" {key} " in str(caught.value)
    assert len(str(caught.value)) < 600
    assert caught.value.path == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("key", "generation"),
    [
        ("eos_token_id", {"eos_token_id": 1.5}),
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 0}),
        ("top_k", {"top_k": 2.5}),
        ("repetition_penalty", {"repetition_penalty": "1.1"}),
    ],
)
def test_generation_config_is_checked_too(
    tmp_path: Path, key: str, generation: dict[str, Any]
) -> None:
    with pytest.raises(ModelConfigError, match=rf"generation_config.json: {key} must be"):
        load(tmp_path, generation=generation)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"vocab_size": NaN}',
        b'{"vocab_size": 1, "vocab_size": 2}',
        b'{"vocab_size": ' + b"9" * 100_000 + b"}",
        b" " * (11 << 20),
    ],
    ids=lambda content: repr(content[:20]),
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_json(tmp_path: Path, name: str, content: bytes) -> None:
    write_json(tmp_path / "config.json", tiny_config())
    (tmp_path / name).write_bytes(content)
    begin = time.perf_counter()
    with pytest.raises(ModelConfigError, match=name):
        load_config(tmp_path)
    assert time.perf_counter() - begin < 1


def test_config_that_is_not_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelConfigError, match="not a regular file"):
        load_config(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(ModelConfigError, match="cannot be read"):
        load_config(tmp_path)
    with pytest.raises(ModelConfigError):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelConfigError, match="cannot be read"):
        load_config(tmp_path / ("x" * 5000))


def test_a_published_llama_3_2_config(tmp_path: Path) -> None:
    """Llama 3.2 1B Instruct's own values."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_config(tmp_path)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.rope.rope_type == "llama3" and config.rope.factor == 32.0
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 64)
