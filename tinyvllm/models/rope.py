"""The rotary table, computed step for step as transformers does, so that it is equal to the bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tinyvllm.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair: [head_dim / 2] f32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq: torch.Tensor = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slow pairs are stretched by `factor`, fast ones kept, those between interpolated."""
    context = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    stretched = torch.where(wavelen > context / low, inv_freq / rope.factor, inv_freq)
    smooth = (context / wavelen - low) / (high - low)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = ~(wavelen < context / high) * ~(wavelen > context / low)
    return torch.where(is_between, between, stretched)


def rope_cos_sin(rope: RopeConfig, head_dim: int, max_model_len: int) -> torch.Tensor:
    """[max_model_len, head_dim] f32 on the CPU: cosines in the first half, sines in the second."""
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)  # [max_model_len, head_dim/2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
