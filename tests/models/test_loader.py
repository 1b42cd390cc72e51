"""load_model on good checkpoints: dtypes, shards, ties, and what stays mapped (nothing)."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from support.forward import PagedRunner
from support.tiny_models import make_tiny_model, random_weights, save_weights

from tinyvllm.loader import load_config, load_model
from tinyvllm.ops import get_ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinyvllm.models import Transformer
    from tinyvllm.ops import Ops


class PlainOps:
    """Packs nothing: a weight can be looked at as it was loaded."""

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def pack_gated_linear(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str, float], None] | None = None,
    ops: Ops | None = None,
) -> Transformer:
    return load_model(
        path,
        load_config(path),
        ops or PlainOps(),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=64,
        progress=progress,
    )


def all_weights(model: Transformer) -> list[torch.Tensor]:
    weights = model.weights
    tensors = [weights.embed_tokens, weights.norm, weights.lm_head]
    for layer in weights.layers:
        tensors += [
            t for f in dataclasses.fields(layer) if (t := getattr(layer, f.name)) is not None
        ]
    return tensors


def assert_equal_models(first: Transformer, second: Transformer) -> None:
    for a, b in zip(all_weights(first), all_weights(second), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_stored_dtype_becomes_the_wanted_one(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    path = make_tiny_model(tmp_path / "m", dtype=stored)
    model = load(path, wanted)
    source = random_weights(path, stored)
    assert {t.dtype for t in all_weights(model)} == {wanted}
    assert torch.equal(model.weights.embed_tokens, source["model.embed_tokens.weight"].to(wanted))
    assert torch.equal(model.weights.norm, source["model.norm.weight"].to(wanted))


def test_dtypes_may_be_mixed(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", dtype=torch.float32)
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    mixed = {
        name: weight.to(torch.bfloat16).to(dtypes[idx % 3])
        for idx, (name, weight) in enumerate(random_weights(path, torch.float32).items())
    }
    uniform = {name: weight.to(torch.bfloat16) for name, weight in mixed.items()}
    save_weights(path, mixed)
    first = load(path, torch.bfloat16)
    save_weights(path, uniform)
    assert_equal_models(first, load(path, torch.bfloat16))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_shards_equal_one_file(tmp_path: Path, architecture: str) -> None:
    one = load(make_tiny_model(tmp_path / "one", architecture))
    three = load(make_tiny_model(tmp_path / "three", architecture, num_shards=3))
    assert not (tmp_path / "three" / "model.safetensors").exists()
    assert_equal_models(one, three)


def test_tied_head_may_be_in_the_file_when_it_is_equal(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    without = load(path)
    weights = random_weights(path, torch.bfloat16)
    save_weights(path, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    assert_equal_models(without, load(path))


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    without = load(path)
    weights = random_weights(path, torch.bfloat16)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    save_weights(path, weights)
    assert_equal_models(without, load(path))


def test_an_unaligned_header_is_legal(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", dtype=torch.float32)
    expected = load(path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    file.write_bytes(
        (size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :]
    )
    assert_equal_models(expected, load(path))


def test_the_model_outlives_its_file(tmp_path: Path) -> None:
    """A weight that stayed mapped would be zeros, or a SIGBUS, once the file is cut."""
    path = make_tiny_model(tmp_path / "m", dtype=torch.float32)
    model = load(path, ops=get_ops("reference"))
    before = PagedRunner(model, max_len=8).run({0: [5, 6, 7]})[0]
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(PagedRunner(model, max_len=8).run({0: [5, 6, 7]})[0], before)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    load(make_tiny_model(tmp_path / "m"), progress=lambda *args: told.append(args))
    assert [phase for phase, _ in told] == ["loading weights"] * 3
    assert [fraction for _, fraction in told] == [0.0, 0.5, 1.0]


def test_a_file_written_by_safetensors_without_metadata(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    save_file(random_weights(path, torch.bfloat16), path / "model.safetensors")
    load(path)


def test_joined_weights_keep_their_order(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "Qwen2ForCausalLM")
    layer, source = (
        load(path, torch.bfloat16).weights.layers[1],
        random_weights(path, torch.bfloat16),
    )
    prefix = "model.layers.1."
    for joined, kind in ((layer.qkv_proj, "weight"), (layer.qkv_bias, "bias")):
        parts = [source[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert joined is not None and torch.equal(joined, torch.cat(parts))
    gate_up = [source[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up_proj, torch.cat(gate_up))


def test_the_default_model_loads_in_half_a_second(smollm2_dir: Path) -> None:
    (smollm2_dir / "model.safetensors").read_bytes()  # into the page cache
    config = load_config(smollm2_dir)
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()  # of all threads: other processes do not count
        load_model(
            smollm2_dir,
            config,
            get_ops("native"),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_model_len=8192,
        )
        best = min(best, time.process_time() - begin)
    assert best < 0.5
