"""paged_attention on a GPU: torch's own error is the measure, and a row's bits are its own."""

from __future__ import annotations

import random

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
)

from tinyvllm import _C
from tinyvllm.ops import native

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

# (num_heads, num_kv_heads): groups of 3, 4, 1, 8, 4 with many kv heads, 16, and more than 16.
HEADS = [(9, 3), (4, 1), (3, 3), (8, 1), (32, 8), (16, 1), (20, 1)]


def random_rows(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def random_kv(lens: list[int], num_kv_heads: int, head_dim: int, block_size: int) -> PagedKV:
    keys = [random_rows(n, num_kv_heads, head_dim, seed=2 * s) for s, n in enumerate(lens)]
    values = [random_rows(n, num_kv_heads, head_dim, seed=2 * s + 1) for s, n in enumerate(lens)]
    return PagedKV.fill(keys, values, block_size)


def attend(
    kv: PagedKV, q: torch.Tensor, q_lens: list[int], seq_lens: list[int], window: int = 0
) -> torch.Tensor:
    """Runs on the GPU, into an output that is a slice of wider rows; returns it on the CPU."""
    tokens, heads, head_dim = q.shape
    wide = torch.full((tokens, (heads + 1) * head_dim), 7.0, dtype=BF16, device="cuda")
    out = wide[:, : heads * head_dim].view(tokens, heads, head_dim)
    out.fill_(NAN)
    native.paged_attention(
        out,
        q.cuda(),
        kv.k_cache.cuda(),
        kv.v_cache.cuda(),
        kv.block_tables.cuda(),
        cumulative(q_lens).cuda(),
        torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        head_dim**-0.5,
        window,
    )
    assert (wide[:, heads * head_dim :] == 7).all()
    return out.cpu()


def torch_attention(
    kv: PagedKV,
    q: torch.Tensor,
    q_lens: list[int],
    seq_lens: list[int],
    window: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """torch's attention from the unpaged tokens, on the GPU."""
    out = torch.zeros(q.shape, dtype=dtype)
    begin = 0
    for s, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        rows = slice(begin, begin + q_len)
        begin += q_len
        if q_len == 0 or seq_len == 0:
            continue
        position = torch.arange(seq_len - q_len, seq_len).unsqueeze(1)
        key = torch.arange(seq_len).unsqueeze(0)
        mask = key <= position
        if window > 0:
            mask &= key > position - window
        group = q.shape[1] // kv.keys[s].shape[1]
        k, v = (
            x[s][:seq_len].cuda().to(dtype).transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0)
            for x in (kv.keys, kv.values)
        )
        query = q[rows].cuda().to(dtype).transpose(0, 1).unsqueeze(0)
        result = F.scaled_dot_product_attention(query, k, v, attn_mask=mask.cuda())
        out[rows] = result[0].transpose(0, 1).cpu()
    return out


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (32, 1), (16, 40), (32, 300)])
def test_mixed_batch_is_within_the_tolerance(
    heads: tuple[int, int], head_dim: int, block_size: int, window: int
) -> None:
    """Decodes and chunks; lengths around a block, a tile of 64, a split of 128; nothing at all."""
    b = block_size
    seq_lens = [1, b - 1, b, b + 1, 0, 63, 64, 65, 127, 128, 129, 300, b + 1, 700, 1025, 513, 0]
    q_lens = [1, 1, b, 1, 0, 63, 1, 7, 1, 40, 1, 2, b + 1, 300, 1, 513, 1]
    kv = random_kv(seq_lens, heads[1], head_dim, block_size)
    if window:  # what no query sees any more is not read either
        for s, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
            kv.block_tables[s, : max(0, seq_len - q_len - window + 1) // b] = 2**30
    q = random_rows(sum(q_lens), heads[0], head_dim, seed=99)
    actual = attend(kv, q, q_lens, seq_lens, window)
    exact = torch_attention(kv, q, q_lens, seq_lens, window, torch.float64)
    own = torch_attention(kv, q, q_lens, seq_lens, window, BF16)
    assert_within_rule(actual, exact, own, "attention")
    assert actual[-1].eq(0).all()  # a query of an empty sequence


@pytest.mark.parametrize(
    ("heads", "head_dim", "window"),
    [((4, 1), 64, 0), ((9, 3), 64, 100), ((3, 3), 128, 0), ((16, 1), 128, 300), ((32, 8), 64, 0)],
    ids=str,
)
def test_whole_prompt_chunks_and_single_tokens_give_the_same_bits(
    heads: tuple[int, int], head_dim: int, window: int
) -> None:
    length = 1500  # a dozen splits, the last one partial
    kv = random_kv([length], heads[1], head_dim, 16)
    q = random_rows(length, heads[0], head_dim, seed=99)
    whole = attend(kv, q, [length], [length], window)
    # Every position as a decode of its own, all in one call.
    all_at_once = PagedKV(
        kv.keys, kv.values, kv.k_cache, kv.v_cache, kv.block_tables.expand(length, -1).contiguous()
    )
    decoded = attend(all_at_once, q, [1] * length, list(range(1, length + 1)), window)
    assert_bitwise_equal(decoded, whole, "decode")
    rng = random.Random(5)
    for sizes in ([64] * 24, [rng.randint(1, 300) for _ in range(length)]):
        begin = 0
        for size in sizes:
            end = min(begin + size, length)
            if begin == end:
                break
            # Later tokens are not in the cache yet, and the blocks lie elsewhere.
            block_size = 32 if size % 2 else 16
            seen = PagedKV.fill(kv.keys, kv.values, block_size, seed=begin, visible=[end])
            part = attend(seen, q[begin:end], [end - begin], [end], window)
            assert_bitwise_equal(part, whole[begin:end], f"chunk {begin}:{end}")
            begin = end
    for i in (0, 1, 63, 64, 127, 128, 700, length - 1):
        seen = PagedKV.fill(kv.keys, kv.values, 16, seed=i, visible=[i + 1])
        alone = attend(seen, q[i : i + 1], [1], [i + 1], window)
        assert_bitwise_equal(alone, whole[i : i + 1], f"token {i}")


def test_long_context_crosses_into_coarse_splits() -> None:
    length = 17_000
    kv = random_kv([length], 1, 64, 32)
    q = random_rows(40, 4, 64, seed=9)
    chunk = attend(kv, q, [40], [length])
    assert_within_rule(
        chunk,
        torch_attention(kv, q, [40], [length], 0, torch.float64),
        torch_attention(kv, q, [40], [length], 0, BF16),
    )
    assert_bitwise_equal(attend(kv, q[-1:], [1], [length]), chunk[-1:])


def test_too_many_parts_for_the_workspace_change_no_bit() -> None:
    """Then ranges of work end with sequences. All sequences share the blocks of one."""
    seqs, length, heads = 500, 2500, 32
    kv = random_kv([length], 8, 64, 16)
    q = random_rows(seqs, heads, 64, seed=9)
    many = PagedKV(
        kv.keys, kv.values, kv.k_cache, kv.v_cache, kv.block_tables.expand(seqs, -1).contiguous()
    )
    lens = [length - s for s in range(seqs)]
    together = attend(many, q, [1] * seqs, lens)
    for s in (0, 1, 250, seqs - 1):
        alone = attend(kv, q[s : s + 1], [1], [lens[s]])
        assert_bitwise_equal(alone, together[s : s + 1], f"sequence {s}")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (64, 200)])
def test_company_changes_no_bit_of_a_decode(head_dim: int, block_size: int, window: int) -> None:
    """Ranges of work begin and end within sequences, some of which are empty."""
    rng = random.Random(7)
    lens = [rng.choice([0, 1, 64, rng.randint(1, 1100), rng.randint(1, 1100)]) for _ in range(150)]
    kv = random_kv(lens, 8, head_dim, block_size)
    q = random_rows(len(lens), 32, head_dim, seed=9)
    ones = [1] * len(lens)
    together = attend(kv, q, ones, lens, window)
    exact = torch_attention(kv, q, ones, lens, window, torch.float64)
    assert_within_rule(together, exact, torch_attention(kv, q, ones, lens, window, BF16))
    for s in range(0, len(lens), 7):
        tables = kv.block_tables[s : s + 1]
        own = PagedKV(kv.keys, kv.values, kv.k_cache, kv.v_cache, tables)
        alone = attend(own, q[s : s + 1], [1], lens[s : s + 1], window)
        assert_bitwise_equal(alone, together[s : s + 1], f"sequence {s} of {lens[s]}")


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (16, 1)], ids=str)
def test_number_of_sequences_changes_no_bit(heads: tuple[int, int]) -> None:
    """Up to 16 sequences go another way than more; tables much wider than the lengths."""
    lens = [100, 64, 1, 513, 300, 2000, 65, 16, 0, 17, 256, 1025, 700, 128, 63, 512, 33, 900]
    kv = random_kv(lens, heads[1], 64, 16)
    wide = F.pad(kv.block_tables, (0, 300), value=-7)
    q = random_rows(len(lens), heads[0], 64, seed=9)

    def attend_first(seqs: int, begin: int = 0) -> torch.Tensor:
        these = slice(begin, begin + seqs)
        own = PagedKV(kv.keys, kv.values, kv.k_cache, kv.v_cache, wide[these])
        return attend(own, q[these], [1] * seqs, lens[these])

    together = attend_first(len(lens))
    ones = [1] * len(lens)
    exact = torch_attention(kv, q, ones, lens, 0, torch.float64)
    assert_within_rule(together, exact, torch_attention(kv, q, ones, lens, 0, BF16))
    for seqs in (2, 8, 16, 17):
        assert_bitwise_equal(attend_first(seqs), together[:seqs], f"{seqs} sequences")
    for s in range(len(lens)):
        assert_bitwise_equal(attend_first(1, s), together[s : s + 1], f"{lens[s]} keys alone")


def test_a_captured_graph_follows_the_lengths() -> None:
    """Lengths and numbers of queries are read at replay, whatever they were at capture."""
    kv = random_kv([900] * 5, 2, 64, 16)
    q = random_rows(5, 8, 64, seed=9)
    k_cache, v_cache, tables, rows = (
        x.cuda() for x in (kv.k_cache, kv.v_cache, kv.block_tables, q)
    )
    out = torch.zeros_like(rows)
    bounds = cumulative([1] * 5).cuda()
    lens = torch.full((5,), 900, dtype=torch.int32, device="cuda")

    def run() -> None:
        native.paged_attention(out, rows, k_cache, v_cache, tables, bounds, lens, 0.125, 0)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seq_lens, q_lens in [
        ([1, 20, 900, 257, 0], [1, 1, 1, 1, 1]),
        ([640, 3, 17, 5, 0], [2, 3, 0, 0, 0]),
        ([899, 1, 2, 3, 4], [1, 1, 1, 0, 0]),
    ]:
        lens.copy_(torch.tensor(seq_lens))
        bounds.copy_(cumulative(q_lens))
        out.fill_(7.0)
        graph.replay()
        tokens = sum(q_lens)
        expected = torch_attention(kv, q[:tokens], q_lens, seq_lens, 0, torch.float64)
        own = torch_attention(kv, q[:tokens], q_lens, seq_lens, 0, BF16)
        assert_within_rule(out[:tokens].cpu(), expected, own, str(seq_lens))
        assert out[tokens:].eq(7).all()


def test_nothing_to_do_is_legal() -> None:
    kv = random_kv([5], 3, 64, 16)
    empty = torch.empty(0, 9, 64, dtype=BF16)
    assert attend(kv, empty, [0], [0]).shape == (0, 9, 64)
    assert attend(kv, empty, [0], [5]).shape == (0, 9, 64)
    no_sequences = PagedKV([], [], kv.k_cache, kv.v_cache, kv.block_tables[:0])
    assert attend(no_sequences, empty, [], []).shape == (0, 9, 64)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "message"),
    [(80, 16, "expected head_dim 64 or 128, got 80"), (64, 24, "block_size a power of two")],
)
def test_what_is_not_supported_is_refused(head_dim: int, block_size: int, message: str) -> None:
    kv = random_kv([5], 1, head_dim, block_size)
    with pytest.raises(ValueError, match=message):
        attend(kv, random_rows(1, 1, head_dim, seed=1), [1], [5])
