"""The CUDA twins: data moves and rotation equal the CPU kernels, the rest is right to rounding."""

from __future__ import annotations

import pytest
import torch

from tinyvllm import _C
from tinyvllm.ops import native

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

BF16, I32 = torch.bfloat16, torch.int32
# (tokens, row length): vectors of 8, odd lengths, more than one block's worth, none.
SIZES = [(1, 576), (7, 2048), (3, 8), (5, 9), (2, 20000), (300, 33), (0, 64)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(BF16)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_rounded(out: torch.Tensor, exact: torch.Tensor) -> None:
    """`out` is within twice the error that one rounding of the fp32 result to bf16 makes."""
    assert out.shape == exact.shape
    limit = 2 * (exact.to(BF16).float() - exact).abs().max() if exact.numel() else 0.0
    assert ((out.float() - exact).abs() <= limit).all()


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def test_advance_decode() -> None:
    num_seqs, block_size = 300, 16
    tables = torch.randperm(num_seqs * 4, dtype=I32).reshape(num_seqs, 4)
    positions = torch.randint(-1, 4 * block_size - 1, (num_seqs,), dtype=I32)
    drawn = torch.randint(0, 1000, (num_seqs,), dtype=I32)
    results = []
    for device in ("cuda", "cpu"):
        state = [positions.to(device) + i for i in range(5)]
        state[1] -= 1
        native.advance_decode(*state, drawn.to(device), tables.to(device), block_size)
        results.append([tensor.cpu() for tensor in state])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("tokens", "size"), SIZES)
def test_row_copies(tokens: int, size: int) -> None:
    weight = random(50, size)
    ids = torch.randint(0, 50, (tokens,), dtype=I32)
    for op in (
        lambda out, ids, weight: native.embedding(out, ids, weight),
        lambda out, ids, weight: native.gather_rows(out, weight, ids),
    ):
        out = torch.full((tokens, size), torch.nan, dtype=BF16, device="cuda")
        op(out, ids.cuda(), weight.cuda())
        assert torch.equal(out.cpu(), weight[ids.long()])


def test_an_index_out_of_range_gives_a_row_of_nan() -> None:
    weight = random(50, 64).cuda()
    ids = torch.tensor([-1, 3, 50, 2**31 - 1], dtype=I32, device="cuda")
    for op in (native.embedding, lambda out, ids, weight: native.gather_rows(out, weight, ids)):
        out = torch.zeros(4, 64, dtype=BF16, device="cuda")
        op(out, ids, weight)
        assert out[[0, 2, 3]].isnan().all()
        assert torch.equal(out[1], weight[3])


@pytest.mark.parametrize(("tokens", "size"), SIZES)
@pytest.mark.parametrize("offset", [0, 1])
def test_rms_norm(tokens: int, size: int, offset: int) -> None:
    """With an offset the rows begin where no 16-byte vector may."""
    wide, weight = random(tokens, size + 16).cuda(), random(size).cuda()
    x = wide[:, offset : offset + size]
    out = torch.full((tokens, size), torch.nan, dtype=BF16, device="cuda")
    native.rms_norm(out, x, weight, 1e-5)
    assert_rounded(out, rms(x, weight, 1e-5))


@pytest.mark.parametrize("head_dim", [64, 80, 7])
def test_rms_norm_of_heads_in_place(head_dim: int) -> None:
    qkv, weight = random(5, 6 * head_dim).cuda(), random(head_dim).cuda()
    q = qkv[:, : 4 * head_dim].unflatten(1, (4, head_dim))
    expected, rest = rms(q, weight, 1e-6), qkv[:, 4 * head_dim :].clone()
    native.rms_norm(q, q, weight, 1e-6)
    assert_rounded(q, expected)
    assert torch.equal(qkv[:, 4 * head_dim :], rest)


def test_a_row_does_not_depend_on_the_batch() -> None:
    x, weight = random(64, 2048).cuda(), random(2048).cuda()
    whole, one = torch.empty_like(x), torch.empty_like(x[:1])
    native.rms_norm(whole, x, weight, 1e-5)
    native.rms_norm(one, x[9:10], weight, 1e-5)
    assert torch.equal(whole[9:10], one)


@pytest.mark.parametrize("head_dim", [64, 128, 80, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (1, 1)])
def test_rotary_embedding_store_kv(head_dim: int, heads: int, kv_heads: int) -> None:
    tokens, blocks, block_size, limit = 33, 5, 16, 100
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    angles = torch.rand(limit, head_dim // 2) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, limit, (tokens,), dtype=I32)
    slots = torch.randperm(blocks * block_size)[:tokens].to(I32)
    slots[4] = -1
    qkv = random(tokens, sum(sizes))
    cache = torch.full((2, blocks, block_size, kv_heads, head_dim), torch.nan, dtype=BF16)
    results = []
    for device in ("cpu", "cuda"):
        rows, caches = qkv.to(device, copy=True), cache.to(device, copy=True)
        q, k, v = (part.unflatten(1, (-1, head_dim)) for part in rows.split(sizes, dim=1))
        native.rotary_embedding_store_kv(
            q,
            k,
            v,
            caches[0],
            caches[1],
            cos_sin.to(device),
            positions.to(device),
            slots.to(device),
        )
        results.append((rows.cpu(), caches.cpu()))
    (rows, caches), (cuda_rows, cuda_caches) = results
    assert torch.equal(rows, cuda_rows)
    assert torch.equal(caches.view(torch.int16), cuda_caches.view(torch.int16))  # NaN included


def test_the_current_stream_is_used_and_a_cuda_graph_captures() -> None:
    x, weight = random(4, 512).cuda(), random(512).cuda()
    out = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.rms_norm(out, x, weight, 1e-5)
    torch.cuda.synchronize()
    assert out.eq(0).all()  # captured, not run: so it went to the capturing stream
    graph.replay()
    assert_rounded(out, rms(x, weight, 1e-5))


def test_a_cpu_graph_records_no_cuda_ops() -> None:
    out, x = torch.zeros(1, 16, dtype=BF16, device="cuda"), random(1, 16).cuda()
    with (
        pytest.raises(ValueError, match="a CPU graph cannot record CUDA tensors"),
        native.capture(),
    ):
        native.rms_norm(out, x, x[0], 1e-5)


def test_tensors_on_two_devices_are_refused() -> None:
    out, x = torch.zeros(1, 16, dtype=BF16), random(1, 16).cuda()
    with pytest.raises(
        ValueError, match="rms_norm: x: expected a tensor on cpu like out, got cuda:0"
    ):
        native.rms_norm(out, x, out[0], 1e-5)
