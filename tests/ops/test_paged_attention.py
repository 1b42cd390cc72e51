"""paged_attention: against the reference and torch, and the promise of chunk invariance."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.op_helpers import (
    BF16,
    NAN,
    PagedKV,
    assert_bitwise_equal,
    assert_within_rule,
    cumulative,
    random_bf16,
)

from tinyvllm import _C
from tinyvllm.ops import native, reference

# (num_heads, num_kv_heads, head_dim): SmolLM2, Llama, no grouping, group 8, odd numbers of blocks.
HEADS = [(9, 3, 64), (4, 1, 128), (3, 3, 64), (8, 1, 48), (2, 1, 16), (2, 2, 256)]


def attend(
    ops: Any, kv: PagedKV, q: torch.Tensor, q_lens: list[int], seq_lens: list[int], window: int = 0
) -> torch.Tensor:
    out = torch.full_like(q, NAN)
    ops.paged_attention(
        out,
        q,
        kv.k_cache,
        kv.v_cache,
        kv.block_tables,
        cumulative(q_lens),
        torch.tensor(seq_lens, dtype=torch.int32),
        q.shape[-1] ** -0.5,
        window,
    )
    return out


def random_kv(
    lens: list[int], num_kv_heads: int, head_dim: int, block_size: int, seed: int = 0
) -> PagedKV:
    keys = [random_bf16(n, num_kv_heads, head_dim, seed=seed + 2 * s) for s, n in enumerate(lens)]
    values = [
        random_bf16(n, num_kv_heads, head_dim, seed=seed + 2 * s + 1) for s, n in enumerate(lens)
    ]
    return PagedKV.fill(keys, values, block_size, seed=seed)


def in_float32(kv: PagedKV) -> PagedKV:
    return PagedKV(kv.keys, kv.values, kv.k_cache.float(), kv.v_cache.float(), kv.block_tables)


def torch_attention(
    kv: PagedKV, q: torch.Tensor, q_lens: list[int], seq_lens: list[int], window: int
) -> torch.Tensor:
    """torch's own attention in the dtype of q, sequence by sequence, from the unpaged tokens."""
    out = torch.empty_like(q)
    begin = 0
    for s, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        if q_len == 0:
            continue
        position = torch.arange(seq_len - q_len, seq_len).unsqueeze(1)
        key = torch.arange(seq_len).unsqueeze(0)
        mask = key <= position
        if window > 0:
            mask &= key > position - window
        group = q.shape[1] // kv.keys[s].shape[1]
        k, v = (
            x[s][:seq_len].transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0)
            for x in (kv.keys, kv.values)
        )
        rows = q[begin : begin + q_len].transpose(0, 1).unsqueeze(0)
        result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        out[begin : begin + q_len] = result[0].transpose(0, 1)
        begin += q_len
    return out


@dataclass(frozen=True)
class Case:
    """Decodes and chunks; lengths around a block, a tile of 64 keys, a split of 256; nothing."""

    kv: PagedKV
    q: torch.Tensor
    q_lens: list[int]
    seq_lens: list[int]
    exact: torch.Tensor
    own: torch.Tensor


@functools.cache
def mixed_case(heads: tuple[int, int, int], block_size: int, window: int) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    b = block_size
    seq_lens = [1, b - 1, b, b + 1, 0, 63, 64, 65, 255, 256, 257, 300, b + 1]
    q_lens = [1, 1, b, 1, 0, 63, 1, 7, 1, 40, 1, 2, b + 1]
    kv = random_kv(seq_lens, num_kv_heads, head_dim, block_size)
    q = random_bf16(sum(q_lens), num_heads, head_dim, seed=99)
    exact = attend(reference, in_float32(kv), q.float(), q_lens, seq_lens, window)
    own = torch_attention(kv, q, q_lens, seq_lens, window)
    return Case(kv, q, q_lens, seq_lens, exact, own)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 5])
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.usefixtures("isa")
def test_mixed_batch_is_within_the_tolerance(
    heads: tuple[int, int, int], block_size: int, window: int
) -> None:
    case = mixed_case(heads, block_size, window)
    actual = attend(native, case.kv, case.q, case.q_lens, case.seq_lens, window)
    assert_within_rule(actual, case.exact, case.own, "attention")


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 1, 128), (8, 1, 48)], ids=str)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.usefixtures("isa")
def test_whole_prompt_chunks_and_single_tokens_give_the_same_bits(
    heads: tuple[int, int, int], window: int
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    length = 330  # two splits, the second one partial
    kv = random_kv([length], num_kv_heads, head_dim, 16)
    q = random_bf16(length, num_heads, head_dim, seed=99)
    whole = attend(native, kv, q, [length], [length], window)
    rng = random.Random(5)
    for sizes in ([1] * length, [64] * 6, [33] * 10, [rng.randint(1, 90) for _ in range(330)]):
        begin = 0
        for size in sizes:
            end = min(begin + size, length)
            if begin == end:
                break
            # Later tokens are not in the cache yet, and the blocks lie elsewhere.
            seen = PagedKV.fill(kv.keys, kv.values, 16, seed=begin, visible=[end])
            part = attend(native, seen, q[begin:end], [end - begin], [end], window)
            assert_bitwise_equal(part, whole[begin:end], f"chunk {begin}:{end}")
            begin = end
        assert begin == length


@pytest.mark.usefixtures("isa")
def test_company_block_size_and_strides_change_no_bit() -> None:
    seq_lens, q_lens = [700, 1, 130, 65, 300, 17], [1, 1, 130, 3, 100, 1]
    kv = random_kv(seq_lens, 3, 64, 16)
    q = random_bf16(sum(q_lens), 9, 64, seed=99)
    together = attend(native, kv, q, q_lens, seq_lens)
    for block_size in (5, 32):
        other = PagedKV.fill(kv.keys, kv.values, block_size, seed=block_size)
        assert_bitwise_equal(attend(native, other, q, q_lens, seq_lens), together)
    qkv = random_bf16(sum(q_lens), 15 * 64, seed=1)
    view = qkv[:, : 9 * 64].view(-1, 9, 64)
    view.copy_(q)
    assert_bitwise_equal(attend(native, kv, view, q_lens, seq_lens), together)
    begin = 0
    for s, q_len in enumerate(q_lens):
        alone = PagedKV.fill(kv.keys[s : s + 1], kv.values[s : s + 1], 16, seed=s)
        rows = slice(begin, begin + q_len)
        result = attend(native, alone, q[rows], [q_len], [seq_lens[s]])
        assert_bitwise_equal(result, together[rows], f"sequence {s}")
        begin += q_len


def test_threads_change_no_bit(num_threads: int) -> None:
    # Few items (splits computed apart when there are threads) and many.
    for seq_lens, q_lens in (([2000], [1]), ([1500], [20]), ([600] * 9, [1] * 9)):
        kv = random_kv(seq_lens, 1, 64, 16)
        q = random_bf16(sum(q_lens), 3, 64, seed=9)
        before = attend(native, kv, q, q_lens, seq_lens)
        _C.set_num_threads(1)
        assert_bitwise_equal(before, attend(native, kv, q, q_lens, seq_lens), str(seq_lens))
        _C.set_num_threads(num_threads)


@pytest.mark.usefixtures("isa")
def test_keys_before_the_window_are_not_read() -> None:
    length, window = 400, 70
    kv = random_kv([length], 1, 64, 16)
    q = random_bf16(1, 2, 64, seed=9)
    expected = attend(native, kv, q, [1], [length], window)
    kv.block_tables[0, : (length - window) // 16] = 2**30
    assert_bitwise_equal(attend(native, kv, q, [1], [length], window), expected)


@pytest.mark.usefixtures("isa")
def test_large_scores_do_not_overflow_and_find_their_key() -> None:
    # One key stands out by hundreds: softmax is a choice, and the output is its value.
    kv = random_kv([500], 1, 64, 16)
    q = random_bf16(1, 1, 64, seed=3)
    kv.keys[0][321] = q[0] * 200
    kv = PagedKV.fill(kv.keys, kv.values, 16)
    assert_bitwise_equal(attend(native, kv, q, [1], [500])[0], kv.values[0][321])


@pytest.mark.usefixtures("isa")
def test_equal_keys_average_the_values() -> None:
    keys, values = torch.ones(300, 1, 64, dtype=BF16), torch.ones(300, 1, 64, dtype=BF16)
    kv = PagedKV.fill([keys], [values * 3], 16)
    out = attend(native, kv, random_bf16(1, 4, 64, seed=1), [1], [300])
    assert_bitwise_equal(out, torch.full_like(out, 3.0))


@pytest.mark.usefixtures("isa")
def test_nothing_to_do_is_legal() -> None:
    kv = random_kv([5], 3, 64, 16)
    empty = torch.empty(0, 9, 64, dtype=BF16)
    assert attend(native, kv, empty, [0], [0]).shape == (0, 9, 64)
    assert attend(native, kv, empty, [0], [5]).shape == (0, 9, 64)


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
def test_a_query_that_sees_nothing_becomes_zeros(ops: Any) -> None:
    """A padding row of a captured batch: one query, no keys; its neighbours do not notice."""
    kv = random_kv([40, 0, 7], 3, 64, 16)
    q = random_bf16(3, 9, 64, seed=1)
    out = attend(ops, kv, q, [1, 1, 1], [40, 0, 7])
    assert (out[1] == 0).all()
    others = PagedKV.fill([kv.keys[0], kv.keys[2]], [kv.values[0], kv.values[2]], 16)
    assert_bitwise_equal(out[[0, 2]], attend(ops, others, q[[0, 2]], [1, 1], [40, 7]))


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_other_head_dims_are_refused(head_dim: int) -> None:
    kv = random_kv([5], 1, head_dim, 16)
    with pytest.raises(ValueError, match=rf"head_dim.*multiple of 16.*{head_dim}"):
        attend(native, kv, random_bf16(1, 1, head_dim, seed=1), [1], [5])
