"""The linears and their packing: against torch, in odd sizes, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.op_helpers import (
    BF16,
    F32,
    FUSED_LINEARS,
    NAN,
    FusedLinear,
    QkvCase,
    assert_bitwise_equal,
    assert_within_rule,
    random_bf16,
)

from tinyvllm import _C
from tinyvllm.ops import Ops, native, reference

# Numbers of tokens at which tiles begin, end and are left over.
TOKENS = [0, 1, 2, 5, 6, 7, 8, 9, 16, 17, 64, 200]
# (N, K): less than a block, an odd number of blocks, an odd K, K below one line, a real one.
SHAPES = [(1, 1), (15, 3), (16, 2), (17, 33), (48, 64), (33, 577), (100, 31), (960, 576)]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), NAN, dtype=dtype)
    native.linear(out, x, native.pack_linear(weight), bias)
    return out


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.usefixtures("isa")
def test_linear_is_within_the_tolerance(n: int, k: int, with_bias: bool) -> None:
    weight = random_bf16(n, k, seed=1, scale=k**-0.5)
    bias = random_bf16(n, seed=2) if with_bias else None
    for t in TOKENS:
        x = random_bf16(t, k, seed=3 + t)
        exact = torch.empty(t, n)
        bias32 = None if bias is None else bias.float()
        reference.linear(exact, x.float(), weight.float(), bias32)
        actual = linear(x, weight, bias, BF16)
        assert_within_rule(actual, exact, F.linear(x, weight, bias), f"T={t}")


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.usefixtures("isa")
def test_float32_output_errs_by_summation_only(n: int, k: int) -> None:
    x, weight, bias = (random_bf16(*s, seed=i) for i, s in enumerate([(9, k), (n, k), (n,)]))
    exact = F.linear(x.double(), weight.double(), bias.double())
    # |fl(sum) - sum| <= (number of additions) * 2^-24 * sum of |terms|, for any order.
    terms = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    error = (linear(x, weight, bias, F32).double() - exact).abs()
    assert (error <= (k + 2) * 2.0**-24 * terms).all()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 577), (100, 31), (960, 576)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.usefixtures("isa")
def test_a_row_has_the_same_bits_in_every_batch(n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias, x = random_bf16(n, k, seed=1), random_bf16(n, seed=2), random_bf16(300, k, seed=3)
    whole = linear(x, weight, bias, dtype)
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 129):
        parts = [linear(x[t : t + size], weight, bias, dtype) for t in range(0, 300, size)]
        assert_bitwise_equal(torch.cat(parts), whole, f"batches of {size}")


@pytest.mark.parametrize("op", FUSED_LINEARS)
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (203, 117)])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.usefixtures("isa")
def test_fused_linears_are_within_the_tolerance(op: str, n: int, k: int, with_bias: bool) -> None:
    for t in TOKENS:
        case = FusedLinear.make(op, t, n, k, with_bias=with_bias)
        exact = case.float().run(reference, case.weight)
        actual = case.run(native, case.pack(native))
        assert_within_rule(actual, exact, case.torch_result(), f"T={t}")


@pytest.mark.parametrize("op", FUSED_LINEARS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 577), (100, 31), (960, 576)])
@pytest.mark.usefixtures("isa")
def test_a_fused_row_has_the_same_bits_in_every_batch(op: str, n: int, k: int) -> None:
    case = FusedLinear.make(op, 150, n, k, with_bias=True)
    packed = case.pack(native)
    whole = case.run(native, packed)
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 13, 64):
        parts = [case.run(native, packed, slice(t, t + size)) for t in range(0, 150, size)]
        assert_bitwise_equal(torch.cat(parts), whole, f"batches of {size}")


@pytest.mark.usefixtures("isa")
def test_a_gate_far_into_both_tails() -> None:
    case = FusedLinear.make("norm_gated_linear", 9, 40, 64, with_bias=True)
    assert case.bias is not None
    case.bias[:40:3] = -200.0
    case.bias[1:40:3] = 200.0
    case.bias[2] = -1e30
    exact = case.float().run(reference, case.weight)
    assert_within_rule(case.run(native, case.pack(native)), exact, case.torch_result())


@pytest.mark.parametrize("ops", [native, reference])
@pytest.mark.parametrize("heads", [(64, 4, 2), (10, 3, 1)])
def test_qkv_is_rotated_and_stored_to_the_bit(ops: Ops, heads: tuple[int, int, int]) -> None:
    for t in (0, 1, 3, 17):
        case = QkvCase.make(t, 577, heads, with_bias=True)
        packed = ops.pack_linear(case.weight)
        fused, apart = (case.run(ops, packed, fused=fused) for fused in (True, False))
        for name, one, other in zip(("q", "k_cache", "v_cache"), fused, apart, strict=True):
            assert_bitwise_equal(one, other, f"{name}, T={t}")


def test_threads_change_no_bit(num_threads: int) -> None:
    weight, x = random_bf16(1000, 200, seed=1), random_bf16(150, 200, seed=2)
    before = linear(x, weight, None, F32)
    _C.set_num_threads(1)
    alone = linear(x, weight, None, F32)
    _C.set_num_threads(num_threads)
    assert_bitwise_equal(before, alone)


@pytest.mark.usefixtures("isa")
def test_strided_rows_and_neighbours_are_left_alone() -> None:
    weight = random_bf16(40, 65, seed=1)
    wide_x = torch.full((7, 90), NAN, dtype=BF16)
    wide_x[:, 5:70] = random_bf16(7, 65, seed=2)
    wide_out = torch.full((7, 60), 7.0, dtype=BF16)
    native.linear(wide_out[:, 3:43], wide_x[:, 5:70], native.pack_linear(weight), None)
    assert_bitwise_equal(wide_out[:, 3:43], linear(wide_x[:, 5:70].clone(), weight, None, BF16))
    assert (wide_out[:, :3] == 7).all()
    assert (wide_out[:, 43:] == 7).all()


@pytest.mark.usefixtures("isa")
def test_padding_of_an_odd_k_is_not_multiplied_by_what_lies_behind_x() -> None:
    weight = random_bf16(20, 5, seed=1)
    x = torch.full((3, 6), NAN, dtype=BF16)
    x[:, :5] = random_bf16(3, 5, seed=2)
    assert not linear(x[:, :5], weight, None, BF16).isnan().any()


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (31, 32), (47, 100)])
@pytest.mark.usefixtures("isa")
def test_packing_moves_every_weight_to_its_place(n: int, k: int) -> None:
    weight = random_bf16(n, k, seed=n + k)
    blocks, pairs = -(-n // 16), -(-k // 2)
    padded = torch.zeros(blocks * 16, pairs * 2, dtype=BF16)
    padded[:n, :k] = weight
    expected = padded.view(blocks, 16, pairs, 2).transpose(1, 2)
    packed = torch.full((blocks, pairs, 16, 2), NAN, dtype=BF16)
    _C.pack_linear(packed, weight)
    assert_bitwise_equal(packed, expected)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.usefixtures("isa")
def test_a_gated_block_is_eight_rows_of_gate_and_their_rows_of_up(n: int, k: int) -> None:
    weight = random_bf16(2 * n, k, seed=n + k)
    blocks = -(-n // 8)
    rows = torch.zeros(blocks, 2, 8, k, dtype=BF16)
    for part, half in enumerate(weight.chunk(2)):
        padded = torch.zeros(blocks * 8, k, dtype=BF16)
        padded[:n] = half
        rows[:, part] = padded.view(blocks, 8, k)
    expected = native.pack_linear(rows.view(blocks * 16, k))
    assert_bitwise_equal(native.pack_gated_linear(weight), expected)


@pytest.mark.usefixtures("isa")
def test_infinities_and_nan_stay_in_their_row() -> None:
    weight = random_bf16(33, 40, seed=1)
    x = random_bf16(9, 40, seed=2)
    clean = linear(x, weight, None, BF16)
    x[4, 7], x[6, 0] = NAN, float("inf")
    dirty = linear(x, weight, None, BF16)
    assert dirty[4].isnan().all()
    assert not dirty[6].isfinite().any()
    others = [t for t in range(9) if t not in (4, 6)]
    assert_bitwise_equal(dirty[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.usefixtures("isa")
def test_no_inputs_give_the_bias(tokens: int) -> None:
    bias = random_bf16(40, seed=1)
    for packed_bias, expected in ((bias, bias), (None, torch.zeros_like(bias))):
        out = torch.full((tokens, 40), NAN, dtype=BF16)
        x, packed = torch.empty(tokens, 0, dtype=BF16), torch.empty(3, 0, 16, 2, dtype=BF16)
        native.linear(out, x, packed, packed_bias)
        assert_bitwise_equal(out, expected.expand(tokens, 40))
