"""Comparing ops: the derived tolerance, bit equality, a paged KV cache that punishes misreading.

Tolerance: against the reference in float32, an op may err at most twice as much as torch's own op
in the same dtype, or as much as rounding the exact result once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinyvllm.ops import Ops

BF16 = torch.bfloat16
F32 = torch.float32
NAN = float("nan")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """The same dtype, shape and bits (so -0 is not 0); names the first coordinate that differs."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = _BITS[actual.element_size()]
    differ = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if differ.any():
        at = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what} differs in {int(differ.sum())} of {differ.numel()} values, first at {at}: "
            f"{actual[at].item()!r} != {expected[at].item()!r}"
        )


def assert_within_rule(
    actual: torch.Tensor, exact: torch.Tensor, torch_result: torch.Tensor, what: str = ""
) -> None:
    """`actual` (bf16) against `exact` (float32), with the error that torch makes as the measure."""
    assert not actual.isnan().any(), f"{what}: NaN in the output"
    if exact.numel() == 0:
        return
    exact = exact.double()
    error = (actual.double() - exact).abs()
    torch_error = (torch_result.double() - exact).abs().max().item()
    one_rounding = 2.0**-8 * exact.abs().max().item()
    allowed = max(2 * torch_error, one_rounding)
    worst = error.max().item()
    assert worst <= allowed, (
        f"{what}: error {worst:.3g} at {(error == worst).nonzero()[0].tolist()}, "
        f"allowed {allowed:.3g} (torch's own error: {torch_error:.3g})"
    )


def random_bf16(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(BF16)


FUSED_LINEARS = ["linear_add", "norm_linear", "norm_gated_linear"]
_EPS = 1e-5


@dataclass(frozen=True)
class FusedLinear:
    """One of the fused linears with its inputs, [t, k] to [t, n]; made to be cut into batches."""

    op: str
    x: torch.Tensor  # [t, k]
    weight: torch.Tensor  # [n, k], [2 n, k] if gated
    bias: torch.Tensor | None
    norm_weight: torch.Tensor  # [k]
    residual: torch.Tensor  # [t, n]

    @staticmethod
    def make(
        op: str, t: int, n: int, k: int, *, with_bias: bool, device: str = "cpu"
    ) -> FusedLinear:
        rows = 2 * n if op == "norm_gated_linear" else n
        bias = random_bf16(rows, seed=2).to(device) if with_bias else None
        return FusedLinear(
            op,
            random_bf16(t, k, seed=3 + t, scale=3.0).to(device),
            random_bf16(rows, k, seed=1, scale=k**-0.5).to(device),
            bias,
            random_bf16(k, seed=4).to(device),
            random_bf16(t, n, seed=5 + t).to(device),
        )

    def pack(self, ops: Ops) -> torch.Tensor:
        gated = self.op == "norm_gated_linear"
        return ops.pack_gated_linear(self.weight) if gated else ops.pack_linear(self.weight)

    def run(self, ops: Ops, packed: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """The result for some of the tokens; outputs and scratch are NaN before."""
        x, residual = self.x[rows], self.residual[rows].clone()
        if self.op == "linear_add":
            ops.linear_add(residual, x, packed, self.bias)
            return residual
        out, normed = torch.full_like(residual, NAN), torch.full_like(x, NAN)
        getattr(ops, self.op)(out, normed, x, self.norm_weight, packed, self.bias, _EPS)
        return out

    def float(self) -> FusedLinear:
        """The same inputs in float32."""
        bias = None if self.bias is None else self.bias.float()
        inputs = (self.x, self.weight, self.norm_weight, self.residual)
        x, weight, norm_weight, residual = (tensor.float() for tensor in inputs)
        return FusedLinear(self.op, x, weight, bias, norm_weight, residual)

    def torch_result(self) -> torch.Tensor:
        """What torch's own ops give, one after the other in the inputs' dtype."""
        if self.op == "linear_add":
            return self.residual + F.linear(self.x, self.weight, self.bias)
        normed = F.rms_norm(self.x, self.norm_weight.shape, self.norm_weight, _EPS)
        result = F.linear(normed, self.weight, self.bias)
        if self.op == "norm_linear":
            return result
        gate, up = result.chunk(2, dim=1)
        return F.silu(gate) * up


@dataclass(frozen=True)
class QkvCase:
    """A qkv_proj with its norm, and what rotates and stores its heads."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    x: torch.Tensor  # [t, k]
    norm_weight: torch.Tensor  # [k]
    weight: torch.Tensor  # [(num_heads + 2 num_kv_heads) head_dim, k]
    bias: torch.Tensor | None
    cos_sin: torch.Tensor  # [max_model_len, head_dim]
    positions: torch.Tensor  # [t]
    slot_mapping: torch.Tensor  # [t]; -1 for one of them

    @staticmethod
    def make(
        t: int, k: int, heads: tuple[int, int, int], *, with_bias: bool, device: str = "cpu"
    ) -> QkvCase:
        """heads: (head_dim, num_heads, num_kv_heads)."""
        head_dim, num_heads, num_kv_heads = heads
        rows = (num_heads + 2 * num_kv_heads) * head_dim
        generator = torch.Generator().manual_seed(t)
        slots = torch.randperm(_QKV_SLOTS, generator=generator)[:t].to(torch.int32)
        slots[t // 2 : t // 2 + 1] = -1
        angles = torch.rand(99, head_dim // 2, generator=generator) * 6
        return QkvCase(
            *heads,
            random_bf16(t, k, seed=3 + t, scale=3.0).to(device),
            random_bf16(k, seed=4).to(device),
            random_bf16(rows, k, seed=1, scale=k**-0.5).to(device),
            random_bf16(rows, seed=2).to(device) if with_bias else None,
            torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
            torch.randint(99, (t,), generator=generator).to(torch.int32).to(device),
            slots.to(device),
        )

    def run(self, ops: Ops, packed: torch.Tensor, *, fused: bool) -> list[torch.Tensor]:
        """q, and the caches: by one op or by the two that it stands for. NaN before."""
        cache_shape = _QKV_SLOTS // 16, 16, self.num_kv_heads, self.head_dim
        x = self.x
        caches = [x.new_full(cache_shape, NAN) for _ in range(2)]
        qkv, normed = x.new_full((len(x), len(self.weight)), NAN), torch.full_like(x, NAN)
        heads = qkv.view(len(x), len(self.weight) // self.head_dim, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        linear = normed, x, self.norm_weight, packed, self.bias
        rope = self.cos_sin, self.positions, self.slot_mapping
        if fused:
            ops.norm_linear_rope_store_kv(qkv, *caches, *linear, *rope, _EPS)
        else:
            ops.norm_linear(qkv, *linear, _EPS)
            ops.rotary_embedding_store_kv(q, k, v, *caches, *rope)
        return [q.contiguous(), *caches]


_QKV_SLOTS = 64


@dataclass
class PagedKV:
    """Sequences in a paged cache: permuted blocks, NaN in unread slots, absurd unread ids.

    `keys[s]` and `values[s]` are the same tokens in order, [len, num_kv_heads, head_dim].
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor

    @staticmethod
    def fill(
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        block_size: int,
        *,
        seed: int = 0,
        visible: Sequence[int] | None = None,
    ) -> PagedKV:
        """Only the first `visible[s]` tokens are written: what comes later is still NaN."""
        lens = list(visible) if visible is not None else [len(k) for k in keys]
        shape = keys[0].shape[1:]
        blocks = [-(-n // block_size) for n in lens]
        num_blocks = sum(blocks) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        k_cache = torch.full((num_blocks, block_size, *shape), NAN, dtype=keys[0].dtype)
        v_cache = torch.full_like(k_cache, NAN)
        tables = torch.empty(len(keys), max([*blocks, 1]) + 2, dtype=torch.int32)
        tables[:, 0::2], tables[:, 1::2] = 2**30, -7
        for s, n in enumerate(lens):
            own, order = order[: blocks[s]], order[blocks[s] :]
            tables[s, : blocks[s]] = own
            slots = own.repeat_interleave(block_size)[:n] * block_size
            slots = slots + torch.arange(n) % block_size
            k_cache.view(-1, *shape)[slots] = keys[s][:n]
            v_cache.view(-1, *shape)[slots] = values[s][:n]
        return PagedKV(keys, values, k_cache, v_cache, tables)


def cumulative(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()]).int()
