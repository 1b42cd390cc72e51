"""The plan of the activations: what lives at the same time lies apart."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.tiny_models import tiny_config, write_json

from tinyvllm.loader import load_config
from tinyvllm.models import BufferPlan, ForwardBuffers

if TYPE_CHECKING:
    from pathlib import Path

    from tinyvllm.config import ModelConfig


def config_of(tmp_path: Path, **overrides: Any) -> ModelConfig:
    write_json(tmp_path / "config.json", tiny_config(**overrides))
    return load_config(tmp_path)


@pytest.mark.parametrize(("num_tokens", "num_logits"), [(1, 1), (7, 3), (256, 64), (8192, 256)])
@pytest.mark.parametrize("overrides", [{}, {"vocab_size": 128256}, {"intermediate_size": 16}])
def test_buffers_that_live_together_lie_apart(
    tmp_path: Path, num_tokens: int, num_logits: int, overrides: dict[str, int]
) -> None:
    plan = BufferPlan.make(config_of(tmp_path, **overrides), num_tokens, num_logits, torch.bfloat16)
    for a, b in combinations(plan.buffers, 2):
        together = a.first <= b.last and b.first <= a.last
        apart = a.offset + a.num_bytes <= b.offset or b.offset + b.num_bytes <= a.offset
        assert apart or not together, (a, b)
    assert all(buffer.offset % 256 == 0 for buffer in plan.buffers)
    assert plan.num_bytes == max(buffer.offset + buffer.num_bytes for buffer in plan.buffers)
    assert plan.num_bytes < sum(buffer.num_bytes for buffer in plan.buffers) + 256 * 8


def test_sharing_saves_memory(tmp_path: Path) -> None:
    plan = BufferPlan.make(config_of(tmp_path), 256, 64, torch.bfloat16)
    assert plan.num_bytes < 0.8 * sum(buffer.num_bytes for buffer in plan.buffers)


def test_buffers_are_the_plan(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    plan = {b.name: b for b in BufferPlan.make(config, 32, 4, torch.bfloat16).buffers}
    buffers = ForwardBuffers.allocate(config, 32, 4, torch.bfloat16, "cpu")
    start = buffers.residual.untyped_storage().data_ptr()
    for name in ("residual", "normed", "qkv", "act", "last_residual", "last_normed", "logits"):
        tensor = getattr(buffers, name)
        assert tensor.data_ptr() - start == plan[name].offset
        assert tuple(tensor.shape) == plan[name].shape and tensor.dtype == plan[name].dtype
    assert buffers.q.shape == (32, 4, 64) and buffers.k.shape == buffers.v.shape == (32, 2, 64)
    assert buffers.narrow(5, 2).logits.data_ptr() == buffers.logits.data_ptr()
