"""A GPU that is too small, or a model that it has no kernels for: a named error that says what was
asked for and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.tiny_models import make_tiny_model

from tinyvllm import EngineConfig
from tinyvllm.errors import ConfigError, NotSupportedError
from tinyvllm.loader import load_config
from tinyvllm.model_runner import ModelRunner
from tinyvllm.models import BufferPlan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def runner(tiny_model_dir: Path) -> ModelRunner:
    """What is known before anything but the weights is allocated."""
    made = ModelRunner.__new__(ModelRunner)
    made.model_config = load_config(tiny_model_dir)
    made.device, made.dtype = torch.device("cuda", 0), torch.bfloat16
    made.max_num_seqs, made.max_num_batched_tokens, made.max_model_len = 64, 256, 512
    return made


def leave(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (num_bytes, 8 << 30))


def test_activations(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BufferPlan.make(runner.model_config, 256, 64, torch.bfloat16)
    leave(plan.num_bytes + runner._gpu_reserve() - 1, monkeypatch)
    with pytest.raises(ConfigError, match="max_num_batched_tokens 256 and max_num_seqs 64") as info:
        runner._allocate_buffers()
    assert info.value.param == "max_num_batched_tokens" and "beside the weights" in str(info.value)


@pytest.mark.parametrize("num_blocks", [None, 1000])
def test_pool(num_blocks: int | None, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(runner._gpu_reserve() + 1000, monkeypatch)
    with pytest.raises(ConfigError, match=r"bytes a block|a block takes") as info:
        runner._size_pool(EngineConfig(num_blocks=num_blocks))
    assert info.value.param == "num_blocks"


def test_what_cannot_be_counted_before(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(3 << 29, monkeypatch)
    said = r"cuda:0 has no memory left .*1.50 of 8.00 GiB are free.*lower num_blocks"
    with pytest.raises(ConfigError, match=said) as info, runner._named_out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    assert isinstance(info.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(RuntimeError, match="illegal"), runner._named_out_of_memory():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_heads_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before any weight is read, not by an op in the middle of the start."""
    model_dir = make_tiny_model(tmp_path / "m", head_dim=96)
    for path in model_dir.glob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr(
        "tinyvllm.model_runner._resolve_device", lambda device: torch.device("cuda", 0)
    )
    with pytest.raises(NotSupportedError, match=r"head_dim 96 .* know 64 and 128; use ") as info:
        ModelRunner(model_dir, EngineConfig())
    assert info.value.param == "device" and str(model_dir) in str(info.value)
