"""Comparing ops: the derived tolerance, bit equality, a paged KV cache that punishes misreading.

Tolerance: against the reference in float32, an op may err at most twice as much as torch's own op
in the same dtype, or as much as rounding the exact result once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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
