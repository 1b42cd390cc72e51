"""EngineConfig: every field, good and bad; messages name field and value."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tinyvllm.config import EngineConfig, ModelConfig, RopeConfig
from tinyvllm.errors import ConfigError, InvalidParameterError

NAN = math.nan
NOT_COUNTS = (0, -1, 1.5, 2.0, NAN, math.inf, True, False, "5", [5])

GOOD = {
    "device": ("auto", "cpu", "cuda", "cuda:0", "cuda:15"),
    "dtype": ("auto", "bfloat16"),
    "ops": ("native", "reference"),
    "max_num_seqs": (None, 1, 64, 256),
    "max_num_batched_tokens": (None, 64, 4096),
    "max_model_len": (None, 2, 131072),
    "block_size": (16, 32),
    "num_blocks": (None, 1, 100000),
    "expected_seq_len": (1, 4096),
    "enable_prefix_caching": (True, False),
    "enforce_eager": (True, False),
    "async_scheduling": (True, False),
    "scheduling": ("continuous", "static"),
    "max_buffered_tokens": (1, 10),
    "max_queued_requests": (1, 65536),
    "num_threads": (None, 1, 64),
}
BAD = {
    "device": (
        "",
        "gpu",
        "CPU",
        "cpu:0",
        "cpu:",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:²",
        "cuda:0\n",
    ),
    "dtype": ("float16", "bf16", "", None, 16, True, NAN),
    "ops": ("torch", "", None, True, NAN),
    "max_num_seqs": NOT_COUNTS,
    "max_num_batched_tokens": NOT_COUNTS,
    "max_model_len": (*NOT_COUNTS, 1),
    "block_size": (0, 8, 17, 64, -16, 16.0, True, NAN, "16", None, [16]),
    "num_blocks": NOT_COUNTS,
    "expected_seq_len": (*NOT_COUNTS, None),
    "enable_prefix_caching": (0, 1, None, "yes", NAN),
    "enforce_eager": (0, 1, None, "no", NAN),
    "async_scheduling": (0, 1, None, "no", NAN),
    "scheduling": ("dynamic", "", None, True, NAN),
    "max_buffered_tokens": (*NOT_COUNTS, None),
    "max_queued_requests": (*NOT_COUNTS, None),
    "num_threads": NOT_COUNTS,
}
BAD["device"] += (None, 0, True, NAN, b"cpu")


def pairs(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_every_field_is_tested():
    fields = {f.name for f in dataclasses.fields(EngineConfig)}
    assert set(GOOD) == set(BAD) == fields


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_good_values_are_kept(name, value):
    assert getattr(EngineConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), pairs(BAD), ids=repr)
def test_bad_values_are_named(name, value):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: value})
    assert isinstance(error.value, InvalidParameterError)
    assert error.value.param == name
    assert str(error.value).startswith(f"{name} must be ")
    assert str(error.value).endswith(f"got {value!r}")


def test_the_budget_covers_the_slots():
    assert EngineConfig(max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"
    ) as error:
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=7)
    assert error.value.param == "max_num_batched_tokens"


def test_float32_is_for_the_reference_ops():
    assert EngineConfig(dtype="float32", ops="reference").dtype == "float32"
    with pytest.raises(ConfigError, match='dtype="float32" needs ops="reference"') as error:
        EngineConfig(dtype="float32")
    assert error.value.param == "dtype"


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().device = "cpu"


def test_resolve_puts_overrides_over_the_config():
    assert EngineConfig.resolve(None, {}) == EngineConfig()
    config = EngineConfig(device="cpu", num_blocks=5)
    assert EngineConfig.resolve(config, {}) == config
    resolved = EngineConfig.resolve(config, {"num_blocks": 6, "enforce_eager": True})
    assert resolved == EngineConfig(device="cpu", num_blocks=6, enforce_eager=True)
    assert config.num_blocks == 5


@pytest.mark.parametrize("config", [None, EngineConfig()])
def test_resolve_names_the_unknown(config):
    with pytest.raises(ConfigError, match=r"no field 'max_seqs'.*max_num_seqs") as error:
        EngineConfig.resolve(config, {"max_seqs": 4})
    assert error.value.param == "max_seqs"
    with pytest.raises(ConfigError, match=r"did you mean 'max_model_len'\? fields: "):
        EngineConfig.resolve(config, {"max_model_length": 4})


@pytest.mark.parametrize("config", [{"device": "cpu"}, "cpu", 0, EngineConfig])
def test_resolve_wants_an_engine_config(config):
    with pytest.raises(ConfigError, match="config must be an EngineConfig; got") as error:
        EngineConfig.resolve(config, {})
    assert error.value.param == "config"


def test_resolve_checks_what_it_combines():
    config = EngineConfig(max_num_batched_tokens=256)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineConfig.resolve(config, {"max_num_seqs": 300})


def test_model_config_has_the_defaults_of_plain_llama():
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
    )
    assert config.rope == RopeConfig(rope_theta=10000.0, rope_type="default")
    assert not (config.tie_word_embeddings or config.attention_bias or config.qk_norm)
    assert config.sampling_defaults == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 11
