"""The linears on a GPU: against torch, in odd sizes, and the promise of equal bits."""

from __future__ import annotations

import itertools

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
from tinyvllm.ops import native, reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

DEVICE = "cuda"
# Around the 8 tokens of an mma, the 16 of a launch, and several launches.
TOKENS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 33]
# (N, K): less than a tile, odd ones, shares of a warp that are empty or odd, rings that turn over,
# one block's K, the K of clusters of 2, 4 and 7 blocks, and one that a cluster takes in two passes.
SHAPES = [
    (1, 1),
    (15, 3),
    (17, 33),
    (33, 577),
    (960, 576),
    (3000, 577),
    (3072, 2048),
    (264, 4096),
    (2048, 8192),
    (50, 14336),
    (640, 20000),
]


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return random_bf16(*shape, seed=seed, scale=scale).to(DEVICE)


def linear(
    x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.full((x.shape[0], n), NAN, dtype=dtype, device=DEVICE)
    native.linear(out, x, packed, bias)
    return out


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
def test_linear_is_within_the_tolerance(n: int, k: int, with_bias: bool) -> None:
    weight = random(n, k, seed=1, scale=k**-0.5)
    bias = random(n, seed=2) if with_bias else None
    packed = native.pack_linear(weight)
    for t in TOKENS:
        x = random(t, k, seed=3 + t)
        exact = torch.empty(t, n, device=DEVICE)
        bias32 = None if bias is None else bias.float()
        reference.linear(exact, x.float(), weight.float(), bias32)
        actual = linear(x, packed, n, bias, BF16)
        assert_within_rule(actual, exact, F.linear(x, weight, bias), f"T={t}")


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_float32_output_errs_by_summation_only(n: int, k: int) -> None:
    x, weight, bias = (random(*s, seed=i) for i, s in enumerate([(9, k), (n, k), (n,)]))
    exact = F.linear(x.double(), weight.double(), bias.double())
    # |fl(sum) - sum| <= (number of additions) * 2^-24 * sum of |terms|, for any order; twice that
    # for a matrix unit that cuts where others round.
    terms = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    error = (linear(x, native.pack_linear(weight), n, bias, F32).double() - exact).abs()
    assert (error <= 2 * (k + 2) * 2.0**-24 * terms).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_a_row_has_the_same_bits_in_every_batch(n: int, k: int, dtype: torch.dtype) -> None:
    bias, x = random(n, seed=2), random(80, k, seed=3)
    packed = native.pack_linear(random(n, k, seed=1))
    # Up to 16 tokens are one kernel's, more another's.
    for whole_size, sizes in ((16, (1, 2, 3, 7, 8, 9)), (80, (20, 40))):
        rows = x[:whole_size]
        whole = linear(rows, packed, n, bias, dtype)
        for size in sizes:
            parts = [linear(part, packed, n, bias, dtype) for part in rows.split(size)]
            assert_bitwise_equal(torch.cat(parts), whole, f"batches of {size}")


@pytest.mark.parametrize("op", FUSED_LINEARS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
def test_fused_linears_are_within_the_tolerance(op: str, n: int, k: int, with_bias: bool) -> None:
    for t in TOKENS:
        case = FusedLinear.make(op, t, n, k, with_bias=with_bias, device=DEVICE)
        exact = case.float().run(reference, case.weight)
        actual = case.run(native, case.pack(native))
        assert_within_rule(actual, exact, case.torch_result(), f"T={t}")


@pytest.mark.parametrize("op", FUSED_LINEARS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_fused_row_has_the_same_bits_in_every_batch(op: str, n: int, k: int) -> None:
    case = FusedLinear.make(op, 40, n, k, with_bias=True, device=DEVICE)
    packed = case.pack(native)
    for begin in (0, 16):
        whole = case.run(native, packed, slice(begin, begin + 16))
        for size in (1, 2, 3, 7, 8, 9):
            parts = [
                case.run(native, packed, slice(t, min(t + size, begin + 16)))
                for t in range(begin, begin + 16, size)
            ]
            assert_bitwise_equal(torch.cat(parts), whole, f"batches of {size}")


@pytest.mark.parametrize("offset", [0, 3, 8], ids=lambda offset: f"offset_{offset}")
def test_strided_rows_and_neighbours_are_left_alone(offset: int) -> None:
    """With an offset of 3 no row of x begins at a multiple of 16 bytes."""
    packed = native.pack_linear(random(40, 264, seed=1))
    wide_x = torch.full((7, 304), NAN, dtype=BF16, device=DEVICE)
    wide_x[:, offset : offset + 264] = random(7, 264, seed=2)
    wide_out = torch.full((7, 60), 7.0, dtype=BF16, device=DEVICE)
    native.linear(wide_out[:, 3:43], wide_x[:, offset : offset + 264], packed, None)
    alone = linear(wide_x[:, offset : offset + 264].clone(), packed, 40, None, BF16)
    assert_bitwise_equal(wide_out[:, 3:43], alone)
    assert (wide_out[:, :3] == 7).all()
    assert (wide_out[:, 43:] == 7).all()


def test_padding_of_k_is_not_multiplied_by_what_lies_behind_x() -> None:
    packed = native.pack_linear(random(20, 5, seed=1))
    x = torch.full((3, 64), NAN, dtype=BF16, device=DEVICE)
    x[:, :5] = random(3, 5, seed=2)
    assert not linear(x[:, :5], packed, 20, None, BF16).isnan().any()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 3), (17, 33), (48, 64), (33, 577), (100, 31)])
@pytest.mark.parametrize("offset", [0, 1])
def test_packing_moves_every_weight_to_its_place(n: int, k: int, offset: int) -> None:
    wide = random(n, k + 8, seed=n + k)
    weight = wide[:, offset : offset + k]
    strips, tiles = -(-n // 16), -(-k // 32)
    padded = torch.zeros(strips * 16, tiles * 32, dtype=BF16, device=DEVICE)
    padded[:n, :k] = weight
    octets = padded.view(strips, 16, tiles, 4, 8).transpose(1, 2)
    rows = torch.arange(16, device=DEVICE)[:, None]
    places = torch.arange(4, device=DEVICE)[None, :] ^ (rows // 2 % 4)
    expected = octets[:, :, rows, places].reshape(strips, tiles, 16, 32)
    packed = torch.full((strips, tiles, 16, 32), NAN, dtype=BF16, device=DEVICE)
    _C.pack_linear(packed, weight)
    assert_bitwise_equal(packed, expected)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 3), (17, 33), (203, 117), (1536, 576)])
def test_a_gated_strip_is_eight_rows_of_gate_and_their_rows_of_up(n: int, k: int) -> None:
    weight = random(2 * n, k, seed=n + k)
    strips = -(-n // 8)
    rows = torch.zeros(strips, 2, 8, k, dtype=BF16, device=DEVICE)
    for part, half in enumerate(weight.chunk(2)):
        padded = torch.zeros(strips * 8, k, dtype=BF16, device=DEVICE)
        padded[:n] = half
        rows[:, part] = padded.view(strips, 8, k)
    expected = native.pack_linear(rows.view(strips * 16, k))
    assert_bitwise_equal(native.pack_gated_linear(weight), expected)


def test_infinities_and_nan_stay_in_their_row() -> None:
    packed = native.pack_linear(random(33, 40, seed=1))
    x = random(12, 40, seed=2)
    clean = linear(x, packed, 33, None, BF16)
    x[4, 7], x[10, 0] = NAN, float("inf")
    dirty = linear(x, packed, 33, None, BF16)
    assert dirty[4].isnan().all()
    assert not dirty[10].isfinite().any()
    others = [t for t in range(12) if t not in (4, 10)]
    assert_bitwise_equal(dirty[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_chain_in_a_graph_gives_the_bits_of_single_launches(tokens: int) -> None:
    """Each kernel begins while the one before it still runs, and must wait for its output."""
    widths = [2048, 3072, 2048, 8192, 2048] * 4
    scale = 2048**-0.5
    packed = [
        native.pack_linear(random(n, k, seed=i, scale=scale))
        for i, (k, n) in enumerate(itertools.pairwise(widths))
    ]
    values = [random(tokens, widths[0], seed=99)]
    values += [torch.empty(tokens, n, dtype=BF16, device=DEVICE) for n in widths[1:]]

    def chain(*, synchronize: bool) -> None:
        for out, x, weight in zip(values[1:], values, packed, strict=False):
            native.linear(out, x, weight, None)
            if synchronize:
                torch.cuda.synchronize()

    chain(synchronize=True)
    expected = values[-1].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(synchronize=False)
    for _ in range(20):
        for value in values[1:]:
            value.fill_(NAN)
        graph.replay()
        assert_bitwise_equal(values[-1], expected)


def test_a_packed_weight_of_another_shape_is_refused() -> None:
    x, out = random(1, 64, seed=1), torch.empty(1, 16, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match=r"linear: packed: expected shape \[1, 2, 16, 32\]"):
        native.linear(out, x, torch.empty(1, 32, 16, 2, dtype=BF16, device=DEVICE))


# Heads that a kernel rotates itself, then those and inputs for which rotary_embedding runs behind.
@pytest.mark.parametrize(
    ("k", "heads"),
    [
        (2048, (64, 32, 8)),
        (576, (64, 9, 3)),
        (128, (64, 4, 2)),
        (1536, (128, 12, 2)),
        (577, (64, 3, 3)),
        (4096, (128, 4, 2)),
        (96, (48, 3, 1)),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
def test_qkv_is_rotated_and_stored_to_the_bit(
    k: int, heads: tuple[int, int, int], with_bias: bool
) -> None:
    for t in TOKENS:
        case = QkvCase.make(t, k, heads, with_bias=with_bias, device=DEVICE)
        if t > 3:
            case.positions[3] = 99  # beyond the table: q as the linear made it, nothing stored
        packed = native.pack_linear(case.weight)
        results = zip(
            case.run(native, packed, fused=True), case.run(native, packed, fused=False), strict=True
        )
        for name, (fused, apart) in zip(("q", "k_cache", "v_cache"), results, strict=True):
            assert_bitwise_equal(fused, apart, f"{name}, T={t}")
