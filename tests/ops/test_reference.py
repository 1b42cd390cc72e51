"""The reference: against torch's own functions, and bit for bit the same in every company."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from support.op_helpers import (
    FUSED_LINEARS,
    NAN,
    FusedLinear,
    PagedKV,
    assert_bitwise_equal,
    cumulative,
)

from tinyvllm.errors import NotSupportedError
from tinyvllm.ops import get_ops, reference


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), NAN)
    reference.linear(out, x, reference.pack_linear(weight), bias)
    return out


def test_get_ops() -> None:
    assert get_ops("reference") is reference
    assert not reference.supports_graphs
    with pytest.raises(NotSupportedError, match=r"reference.*enforce_eager=True"):
        reference.capture()


@pytest.mark.parametrize("threads", [1, 2])
def test_linear_rows_have_the_same_bits_in_every_batch(threads: int) -> None:
    torch.set_num_threads(threads)
    rng = random.Random(3)
    shapes = [(1, 1), (7, 13), (1, 576), (100, 1), (37, 1025), (960, 576), (576, 1536)]
    shapes += [
        (rng.randint(1, 150), rng.randint(1, 300)) for _ in range(60 if threads == 1 else 10)
    ]
    for n, k in shapes:
        # An odd offset, so that rows and weights are not aligned to anything.
        weight = randn(n * k + 3, seed=n)[3:].view(n, k)
        x = randn(50, k, seed=k)
        bias = randn(n, seed=5)
        whole = linear(x, weight, bias)
        for size in (1, 7, 16, 23):
            parts = [linear(x[t : t + size], weight, bias) for t in range(0, 50, size)]
            assert_bitwise_equal(torch.cat(parts), whole, f"[{n}, {k}] in batches of {size}")
        order = torch.randperm(50, generator=torch.Generator().manual_seed(k))
        assert_bitwise_equal(linear(x[order], weight, bias), whole[order], f"[{n}, {k}] permuted")
        torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 7, 64, 576, 1536, 4096])
def test_row_ops_have_the_same_bits_in_every_batch(width: int) -> None:
    x, weight = randn(70, 2 * width, seed=width), randn(width, seed=1)
    rms = torch.full((70, width), NAN)
    reference.rms_norm(rms, x[:, :width], weight, 1e-5)
    for size in (1, 3, 32):
        for t in range(0, 70, size):
            rows = slice(t, t + size)
            part = torch.full_like(rms[rows], NAN)
            reference.rms_norm(part, x[rows, :width], weight, 1e-5)
            assert_bitwise_equal(part, rms[rows], f"rms_norm of rows {rows}")
    torch.testing.assert_close(rms, F.rms_norm(x[:, :width], (width,), weight, 1e-5))


@pytest.mark.parametrize("op", FUSED_LINEARS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 1025), (96, 64)])
def test_fused_linears_are_torchs_and_have_the_same_bits_in_every_batch(
    op: str, n: int, k: int
) -> None:
    case = FusedLinear.make(op, 50, n, k, with_bias=True).float()
    packed = case.pack(reference)
    whole = case.run(reference, packed)
    torch.testing.assert_close(whole, case.torch_result(), rtol=1e-4, atol=1e-4)
    for size in (1, 7, 16, 23):
        parts = [case.run(reference, packed, slice(t, t + size)) for t in range(0, 50, size)]
        assert_bitwise_equal(torch.cat(parts), whole, f"batches of {size}")


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 1, 128), (2, 2, 16)], ids=str)
def test_attention_is_torchs_and_has_the_same_bits_in_every_chunk(
    heads: tuple[int, int, int], window: int
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    length = 100
    keys, values = (randn(length, num_kv_heads, head_dim, seed=s) for s in (1, 2))
    q = randn(length, num_heads, head_dim, seed=3)

    def attend(begin: int, end: int, seed: int) -> torch.Tensor:
        # With a second sequence in front, which no row of the first may notice.
        lens = [seed % 3, end - begin]
        kv = PagedKV.fill([keys, keys], [values, values], 16, seed=seed, visible=[40, end])
        out = torch.full((sum(lens), num_heads, head_dim), NAN)
        reference.paged_attention(
            out,
            torch.cat([q[: lens[0]], q[begin:end]]),
            kv.k_cache,
            kv.v_cache,
            kv.block_tables,
            cumulative(lens),
            torch.tensor([40, end]),
            head_dim**-0.5,
            window,
        )
        return out[lens[0] :]

    whole = attend(0, length, 0)
    for size in (1, 7, 64):
        for begin in range(0, length, size):
            end = min(begin + size, length)
            assert_bitwise_equal(attend(begin, end, begin + 1), whole[begin:end], f"{begin}:{end}")
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    mask = (distance >= 0) & ((distance < window) if window else (distance >= 0))
    k, v = (
        x.transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0) for x in (keys, values)
    )
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask)
    torch.testing.assert_close(whole, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_rotary_is_half_split() -> None:
    """transformers' formula: x * cos + rotate_half(x) * sin."""
    q, k, v = randn(5, 4, 16, seed=1), randn(5, 2, 16, seed=2), randn(5, 2, 16, seed=3)
    positions = torch.tensor([0, 3, 1, 9, 9], dtype=torch.int32)
    angles = torch.arange(10).unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, 8)
    cos, sin = (
        f(angles).repeat(1, 2)[positions.long()].unsqueeze(1) for f in (torch.cos, torch.sin)
    )
    expected = [x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in (q, k)]
    caches = torch.zeros(2, 3, 4, 2, 16)
    slots = torch.tensor([4, 0, -1, 11, 7], dtype=torch.int32)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    reference.rotary_embedding_store_kv(q, k, v, caches[0], caches[1], cos_sin, positions, slots)
    torch.testing.assert_close([q, k], expected)
    flat = caches.view(2, 12, 2, 16)
    kept = [0, 1, 3, 4]
    assert_bitwise_equal(flat[0, [4, 0, 11, 7]], k[kept])
    assert_bitwise_equal(flat[1, [4, 0, 11, 7]], v[kept])
    assert flat.count_nonzero() == 2 * 4 * 2 * 16


def test_moves() -> None:
    x = randn(6, 10, seed=1)
    ids = torch.tensor([5, 0, 5], dtype=torch.int32)
    for op, args in ((reference.embedding, (ids, x)), (reference.gather_rows, (x, ids))):
        out = torch.full((3, 10), NAN)
        op(out, *args)
        assert_bitwise_equal(out, x[[5, 0, 5]])
