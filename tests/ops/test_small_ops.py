"""Small ops against the reference, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.op_helpers import BF16, NAN, assert_bitwise_equal, assert_within_rule, random_bf16

from tinyvllm.ops import native, reference

TOKENS = [0, 1, 2, 5, 16, 17, 64]
WIDTHS = [1, 15, 16, 17, 64, 576, 1000]


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("num_seqs", [0, 1, 5, 200])
def test_advance_decode(num_seqs: int, block_size: int) -> None:
    tables = torch.randperm(num_seqs * 6, dtype=torch.int32).reshape(num_seqs, 6)
    positions = torch.randint(-1, 6 * block_size - 1, (num_seqs,), dtype=torch.int32)
    drawn = torch.randint(0, 1000, (num_seqs,), dtype=torch.int32)
    states = []
    for ops in (native, reference):
        # A view of a wider table: rows are strided.
        wide = torch.full((num_seqs, 9), 2**30, dtype=torch.int32)
        wide[:, :6] = tables
        state = [torch.full_like(drawn, -9) for _ in range(5)]
        ids, pos, lens, step, slots = state
        pos.copy_(positions)
        lens.copy_(positions + 1)
        step.copy_(positions + 3)
        ops.advance_decode(ids, pos, lens, step, slots, drawn, wide[:, :6], block_size)
        states.append(state)
    ids, pos, lens, step, slots = states[0]
    assert torch.equal(ids, drawn) and torch.equal(pos, positions + 1)
    assert torch.equal(lens, positions + 2) and torch.equal(step, positions + 4)
    for s in range(num_seqs):
        position = int(pos[s])
        block = int(tables[s, position // block_size])
        assert slots[s] == block * block_size + position % block_size
    assert all(map(torch.equal, *states))


def test_advance_decode_refuses_a_position_outside_of_the_table() -> None:
    rows = [int32([0]) for _ in range(5)]
    rows[1] = int32([31])
    with pytest.raises(
        IndexError, match=r"advance_decode: positions\[0\]: expected -1 <= index < 31"
    ):
        native.advance_decode(*rows, int32([1]), int32([[4, 5]]), 16)


@pytest.mark.parametrize("hidden_size", WIDTHS)
@pytest.mark.usefixtures("isa")
def test_embedding_and_gather_rows_move_bits(hidden_size: int) -> None:
    weight = random_bf16(11, hidden_size, seed=1)
    weight[3] = NAN
    ids = int32([10, 0, 3, 3, 7])
    for op in (native.embedding, native.gather_rows):
        out = torch.full((5, hidden_size), 7.0, dtype=BF16)
        if op is native.embedding:
            op(out, ids, weight)
        else:
            op(out, weight, ids)
        assert_bitwise_equal(out, weight[ids.long()])


@pytest.mark.parametrize("hidden_size", WIDTHS)
@pytest.mark.usefixtures("isa")
def test_rms_norm(hidden_size: int) -> None:
    weight = random_bf16(hidden_size, seed=1)
    for t in TOKENS:
        x = random_bf16(t, hidden_size, seed=t + 2, scale=3.0)
        exact = torch.empty(t, hidden_size)
        reference.rms_norm(exact, x.float(), weight.float(), 1e-5)
        out = torch.full_like(x, NAN)
        native.rms_norm(out, x, weight, 1e-5)
        own = F.rms_norm(x, (hidden_size,), weight, 1e-5)
        assert_within_rule(out, exact, own, f"T={t}")
        for row in range(t):
            alone = torch.full((1, hidden_size), NAN, dtype=BF16)
            native.rms_norm(alone, x[row : row + 1], weight, 1e-5)
            assert_bitwise_equal(alone[0], out[row], f"row {row}")


@pytest.mark.usefixtures("isa")
def test_rms_norm_of_heads_in_place() -> None:
    """Qwen3's q and k norms: heads of a view of qkv, output into the same memory."""
    qkv = random_bf16(9, 15 * 64, seed=1)
    q = qkv[:, : 9 * 64].view(9, 9, 64)
    weight = random_bf16(64, seed=2)
    expected = torch.full((81, 64), NAN, dtype=BF16)
    native.rms_norm(expected, q.reshape(81, 64), weight, 1e-6)
    rest = qkv[:, 9 * 64 :].clone()
    native.rms_norm(q, q, weight, 1e-6)
    assert_bitwise_equal(q.reshape(81, 64), expected)
    assert_bitwise_equal(qkv[:, 9 * 64 :], rest)


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 1, 128), (2, 2, 16), (3, 1, 48)], ids=str)
@pytest.mark.usefixtures("isa")
def test_rotary_embedding_store_kv(heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = heads
    for t in TOKENS:
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        qkv = random_bf16(t, sum(sizes), seed=t)
        angles = torch.arange(300).unsqueeze(1) * 10000 ** -torch.linspace(0, 1, head_dim // 2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        positions = torch.arange(t, dtype=torch.int32) * 37 % 300
        slots = torch.randperm(96, generator=torch.Generator().manual_seed(t))[:t].int()
        slots[1::4] = -1

        def run(
            ops: object,
            dtype: torch.dtype,
            *,
            qkv: torch.Tensor = qkv,
            sizes: list[int] = sizes,
            rest: tuple[torch.Tensor, ...] = (cos_sin, positions, slots),
        ) -> list[torch.Tensor]:
            mine = qkv.to(dtype, copy=True)
            q, k, v = (x.unflatten(1, (-1, head_dim)) for x in mine.split(sizes, dim=1))
            caches = [torch.full((6, 16, num_kv_heads, head_dim), 7.0, dtype=dtype)] * 1
            caches.append(torch.full_like(caches[0], 7.0))
            ops.rotary_embedding_store_kv(q, k, v, *caches, *rest)  # type: ignore[attr-defined]
            return [q, k, v, *caches]

        exact, own, actual = (
            run(reference, torch.float32),
            run(reference, BF16),
            run(native, BF16),
        )
        for i, what in enumerate(["q", "k", "v"]):
            assert_within_rule(actual[i], exact[i], own[i], f"{what}, T={t}")
        assert_bitwise_equal(actual[2].flatten(1), qkv[:, sizes[0] + sizes[1] :])
        # The caches hold exactly what q, k, v hold now; slots that nobody named are untouched.
        for rows, cache in ((actual[1], actual[3]), (actual[2], actual[4])):
            expected = torch.full_like(cache, 7.0)
            stored = slots >= 0
            expected.view(96, num_kv_heads, head_dim)[slots[stored].long()] = rows[stored]
            assert_bitwise_equal(cache, expected)
        for row in range(t):
            alone = run(
                native,
                BF16,
                qkv=qkv[row : row + 1],
                rest=(cos_sin, positions[row : row + 1], slots[row : row + 1]),
            )
            assert_bitwise_equal(alone[0][0], actual[0][row], f"q of row {row}")
