"""The linears of more than 16 tokens on a GPU: every tile of gemm.cu, and one set of bits."""

from __future__ import annotations

import pytest
import torch
from support.op_helpers import (
    BF16,
    F32,
    FUSED_LINEARS,
    NAN,
    FusedLinear,
    assert_bitwise_equal,
    assert_within_rule,
    random_bf16,
)

from tinyvllm import _C
from tinyvllm.ops import native, reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

DEVICE = "cuda"
# (N, K): K in two halves and in one piece, halves of unlike length, odd sizes, and rows of x that
# the tensor copies cannot take.
SHAPES = [(2048, 2048), (3072, 2048), (8192, 1024), (100, 8192), (520, 1160), (333, 1000), (96, 61)]
# Around the tiles' 64, 128, 192 and twice 128 tokens, and enough for several of the largest.
TOKENS = [17, 31, 64, 65, 100, 128, 150, 192, 200, 257, 320, 520, 1030]


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return random_bf16(*shape, seed=seed, scale=scale).to(DEVICE)


def linear(x: torch.Tensor, packed: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((x.shape[0], n), NAN, dtype=dtype, device=DEVICE)
    native.linear(out, x, packed, None)
    return out


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_a_row_has_the_same_bits_for_every_number_of_tokens(
    n: int, k: int, dtype: torch.dtype
) -> None:
    x, packed = random(max(TOKENS), k, seed=1), native.pack_linear(random(n, k, seed=2))
    whole = linear(x, packed, n, dtype)
    assert not whole.isnan().any()
    for t in TOKENS:
        assert_bitwise_equal(linear(x[:t], packed, n, dtype), whole[:t], f"T={t}, the first rows")
        assert_bitwise_equal(linear(x[-t:], packed, n, dtype), whole[-t:], f"T={t}, the last rows")


@pytest.mark.parametrize("op", FUSED_LINEARS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("t", [17, 130, 190, 600])
def test_fused_linears_are_within_the_tolerance(op: str, n: int, k: int, t: int) -> None:
    case = FusedLinear.make(op, t, n, k, with_bias=True, device=DEVICE)
    exact = case.float().run(reference, case.weight)
    actual = case.run(native, case.pack(native))
    assert_within_rule(actual, exact, case.torch_result(), f"T={t}")


@pytest.mark.parametrize("op", FUSED_LINEARS)
# (2048, 4096): K in two halves, summed by one block. (8192, 1024): K in one piece.
@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (8192, 1024)])
def test_thousands_of_tokens(op: str, n: int, k: int) -> None:
    """More tiles than multiprocessors: blocks go from one to the next."""
    case = FusedLinear.make(op, 8192, n, k, with_bias=True, device=DEVICE)
    packed = case.pack(native)
    whole = case.run(native, packed)
    exact = case.float().run(reference, case.weight)
    assert_within_rule(whole, exact, case.torch_result(), "T=8192")
    for size in (17, 64, 128, 192, 256, 1024, 2048, 4000):
        for rows in (slice(size), slice(3000, 3000 + size), slice(-size, None)):
            part = case.run(native, packed, rows)
            assert_bitwise_equal(part, whole[rows], f"T={size}, {rows}")


@pytest.mark.parametrize("offset", [0, 3, 8], ids=lambda offset: f"offset_{offset}")
@pytest.mark.parametrize("t", [17, 130, 1030])
def test_strided_rows_give_the_same_bits_and_neighbours_are_left_alone(t: int, offset: int) -> None:
    """With an offset of 3 no row of x begins at a multiple of 16 bytes: the other kernel runs."""
    packed = native.pack_linear(random(200, 1032, seed=1))
    wide_x = torch.full((t, 1048), NAN, dtype=BF16, device=DEVICE)
    wide_x[:, offset : offset + 1032] = random(t, 1032, seed=2)
    wide_out = torch.full((t, 216), 7.0, dtype=BF16, device=DEVICE)
    native.linear(wide_out[:, 8:208], wide_x[:, offset : offset + 1032], packed, None)
    alone = linear(wide_x[:, offset : offset + 1032].clone(), packed, 200, BF16)
    assert_bitwise_equal(wide_out[:, 8:208], alone)
    assert (wide_out[:, :8] == 7).all()
    assert (wide_out[:, 208:] == 7).all()


@pytest.mark.parametrize("k", [5, 1001])
def test_padding_of_k_is_not_multiplied_by_what_lies_behind_x(k: int) -> None:
    packed = native.pack_linear(random(20, k, seed=1))
    x = torch.full((70, 1024), NAN, dtype=BF16, device=DEVICE)
    x[:, :k] = random(70, k, seed=2)
    assert_bitwise_equal(
        linear(x[:, :k], packed, 20, F32), linear(x[:, :k].clone(), packed, 20, F32)
    )


def test_infinities_and_nan_stay_in_their_row() -> None:
    packed = native.pack_linear(random(80, 2048, seed=1))
    x = random(70, 2048, seed=2)
    clean = linear(x, packed, 80, BF16)
    x[4, 7], x[66, 0] = NAN, float("inf")
    dirty = linear(x, packed, 80, BF16)
    assert dirty[4].isnan().all()
    assert not dirty[66].isfinite().any()
    others = [t for t in range(70) if t not in (4, 66)]
    assert_bitwise_equal(dirty[others], clean[others])
