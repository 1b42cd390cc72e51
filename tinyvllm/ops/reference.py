"""The specification of every op, in plain torch: any float dtype, float32 inside, rounded once.

Slow and plain on purpose, with one promise beyond correctness: a token's result has the same bits
whatever other tokens are in the call (whole prompt == chunks == token by token). torch does not
give that for free: a matrix product changes its summation order with the number of rows, and a
vectorized function may treat the elements of a last, partial vector otherwise. So `linear`
multiplies fixed blocks of 16 tokens, silu goes row by row, and attention takes one query at a
time, in shapes that depend on its position alone. tests/ops/test_reference.py checks it.

Shapes are documented in csrc/ops.h. Unlike the kernels, it allocates and records no graphs. Its
many small torch calls gain little from threads, and lose a time slice to each whenever the
processor is busy with something else: torch.set_num_threads(1) is then many times faster.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

import torch

from tinyvllm.errors import NotSupportedError

if TYPE_CHECKING:
    from torch import Tensor

name = "reference"
supports_graphs = False


# A matrix product of this many columns is the unit of `linear`. As columns (weight @ x.T), every
# position of a block gets the same summation order; as rows (x @ weight.T) small products do not.
_LINEAR_TOKENS = 16

# Below this a temperature means argmax, as in vLLM; compared in float32, as the kernels do.
_GREEDY_BELOW = torch.tensor(1e-5).item()


def advance_decode(
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    step_idx: Tensor,
    slot_mapping: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> None:
    """Starts a decode step: the drawn tokens are its input, every length grows by one."""
    input_ids.copy_(token_ids)
    for counter in (positions, seq_lens, step_idx):
        counter.add_(1)
    block_idx = (positions // block_size).long()
    block_ids = block_tables.gather(1, block_idx[:, None])[:, 0]
    slot_mapping.copy_(block_ids * block_size + positions % block_size)


def take_drawn(input_ids: Tensor, token_ids: Tensor, source_rows: Tensor) -> None:
    """input_ids[t] = token_ids[source_rows[t]] where that is not negative."""
    wanted = source_rows >= 0
    input_ids[wanted] = token_ids[source_rows[wanted].long()]


def embedding(out: Tensor, input_ids: Tensor, weight: Tensor) -> None:
    """out[t] = weight[input_ids[t]]."""
    out.copy_(weight[input_ids.long()])


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last dimension; out may alias x."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    out.copy_(x32 * scale * weight.float())


def rotary_embedding_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotates q and k in place (half-split layout), then writes k and v to their cache slots."""
    cos, sin = cos_sin[positions.long()].float().unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2]
    for x in (q, k):
        a, b = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    k_cache.view(-1, *k_cache.shape[2:])[slots] = k[stored]
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v[stored]


def paged_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    sliding_window: int,
) -> None:
    """Causal attention of the last query tokens of each sequence over its KV entries."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    block_size = k_cache.shape[1]
    bounds = cu_seqlens_q.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        if bounds[s + 1] == bounds[s]:
            continue
        blocks = block_tables[s, : -(-seq_len // block_size)].long()
        # [num_kv_heads, seq_len, head_dim]; slots past seq_len are dropped before they are read.
        k, v = (
            cache[blocks].flatten(0, 1)[:seq_len].float().transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        for t in range(bounds[s], bounds[s + 1]):
            end = seq_len - bounds[s + 1] + t + 1
            begin = max(0, end - sliding_window) if sliding_window > 0 else 0
            row = q[t].float().view(num_kv_heads, -1, head_dim)  # [num_kv_heads, group, head_dim]
            scores = torch.bmm(row, k[:, begin:end].transpose(1, 2)) * softmax_scale
            result = torch.bmm(torch.softmax(scores, dim=-1), v[:, begin:end])
            out[t].copy_(result.view(-1, head_dim))


def pack_linear(weight: Tensor) -> Tensor:
    """weight [N, K], in float32."""
    return weight.float()


def pack_gated_linear(weight: Tensor) -> Tensor:
    """weight [2I, K], gate above up, in float32."""
    return weight.float()


def linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ weight.T (+ bias); `packed` is the weight, [N, K] in any float dtype."""
    weight = packed.float()
    block = torch.zeros(_LINEAR_TOKENS, x.shape[1], device=x.device)
    for begin in range(0, x.shape[0], _LINEAR_TOKENS):
        tokens = x[begin : begin + _LINEAR_TOKENS]
        block[: len(tokens)] = tokens
        result = torch.mm(weight, block.T)[:, : len(tokens)].T
        if bias is not None:
            result = result + bias.float()
        out[begin : begin + len(tokens)].copy_(result)


def linear_add(
    residual: Tensor,
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None = None,
) -> None:
    """residual += x @ weight.T (+ bias)."""
    added = torch.empty(residual.shape, device=x.device)
    linear(added, x, packed, bias)
    residual.copy_(residual.float() + added)


def norm_linear(
    out: Tensor,
    normed: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    eps: float,
) -> None:
    """out = linear(rms_norm(x)); `normed` [T, H] is scratch, and keeps its dtype's precision."""
    rms_norm(normed, x, norm_weight, eps)
    linear(out, normed, packed, bias)


def norm_linear_rope_store_kv(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    normed: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float,
) -> None:
    """norm_linear into qkv [T, (num_heads + 2 num_kv_heads) D], then q in it rotated, and k and v
    rotated and stored; what their part of qkv then holds is not defined."""
    norm_linear(qkv, normed, x, norm_weight, packed, bias, eps)
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    q, k, v = heads.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
    rotary_embedding_store_kv(q, k, v, k_cache, v_cache, cos_sin, positions, slot_mapping)


def norm_gated_linear(
    out: Tensor,
    normed: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    eps: float,
) -> None:
    """out = silu(gate) * up, where gate and up are the halves of linear(rms_norm(x))."""
    gate_up = torch.empty(len(x), len(packed), device=x.device)
    norm_linear(gate_up, normed, x, norm_weight, packed, bias, eps)
    for row, result in zip(gate_up, out, strict=True):
        gate, up = row.chunk(2)
        result.copy_(torch.nn.functional.silu(gate) * up)


def gather_rows(out: Tensor, x: Tensor, row_idx: Tensor) -> None:
    """out[r] = x[row_idx[r]]."""
    out.copy_(x[row_idx.long()])


def sample(
    token_ids: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    step_idx: Tensor,
) -> None:
    """Draws token_ids[r] from logits[r]; csrc/cpu/sample.cpp states the definition."""
    rows = zip(
        logits,
        temperature.tolist(),
        top_k.tolist(),
        top_p.tolist(),
        min_p.tolist(),
        seeds.tolist(),
        step_idx.tolist(),
        strict=True,
    )
    for r, row in enumerate(rows):
        token_ids[r] = _sample_row(*row)


def adjust_logits(
    out: Tensor,
    logits: Tensor,
    slot_idx: Tensor,
    penalties: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    allowed_mask: Tensor,
) -> None:
    """out = logits with logit bias, penalties and mask of the row's slot; -1 copies the row."""
    vocab_size = logits.shape[1]
    out.copy_(logits)
    for x, slot in zip(out, slot_idx.tolist(), strict=True):
        if slot < 0:
            continue
        biased = bias_ids[slot] >= 0
        x[bias_ids[slot][biased].long()] += bias_values[slot][biased]
        repetition, frequency, presence = penalties[slot]
        counts = output_counts[slot]
        in_output = counts > 0
        seen = in_output | unpack_bits(prompt_mask[slot], vocab_size)
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x.copy_(torch.where(seen, repeated, x))
        x.copy_(torch.where(in_output, x - frequency * counts - presence, x))
        x.masked_fill_(~unpack_bits(allowed_mask[slot], vocab_size), -math.inf)


def count_tokens(output_counts: Tensor, token_ids: Tensor, slot_idx: Tensor) -> None:
    """output_counts[slot_idx[r]][token_ids[r]] += 1 for rows with a slot."""
    for slot, token_id in zip(slot_idx.tolist(), token_ids.tolist(), strict=True):
        if slot >= 0:
            output_counts[slot, token_id] += 1


def top_logprobs(
    values: Tensor,
    ids: Tensor,
    drawn: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    num_logprobs: Tensor,
) -> None:
    """log-softmax of each row's token and of its num_logprobs most likely; -1 skips the row."""
    wanted = num_logprobs.tolist()
    for r, (x, token_id) in enumerate(zip(logits.double(), token_ids.tolist(), strict=True)):
        if wanted[r] < 0:
            continue
        is_number = ~x.isnan()
        largest = x[is_number].max() if is_number.any() else x.new_tensor(-math.inf)
        log_sum = (x[is_number] - largest).exp().sum().log()  # NaN without a finite maximum
        logprobs = (x - largest) - (log_sum if largest.isfinite() else math.nan)
        order = torch.where(is_number, x, -math.inf).sort(descending=True, stable=True).indices
        listed = order[is_number[order]][: min(wanted[r], ids.shape[1])]
        values[r, : len(listed)] = logprobs[listed]
        ids[r, : len(listed)] = listed.int()
        values[r, len(listed) :] = -math.inf
        ids[r, len(listed) :] = -1
        drawn[r] = logprobs[token_id]


def new_stream() -> NoReturn:
    """This op set launches nothing."""
    raise NotSupportedError('ops: "reference" has no graphs to launch', param="ops")


def capture() -> NoReturn:
    """This op set records nothing."""
    raise NotSupportedError(
        'ops: "reference" cannot record graphs; use ops="native" or enforce_eager=True',
        param="ops",
    )


def _sample_row(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    step_idx: int,
) -> int:
    logits = torch.where(logits.isnan(), -math.inf, logits.double())
    largest = logits.max().item()
    if not (temperature >= _GREEDY_BELOW and math.isfinite(largest) and top_p > 0):
        return int(logits.argmax())
    weights = torch.exp((logits - largest) / temperature)
    order = torch.sort(logits, descending=True, stable=True).indices
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        sums = weights[order].cumsum(0)
        before = sums - weights[order]
        order = order[: max(1, int((before < top_p * sums[-1]).sum()))]
    order = order[weights[order] >= min_p]
    if len(order) == 0:
        return int(logits.argmax())
    kept = order.sort().values
    sums = weights[kept].cumsum(0)
    target = uniform(seed, step_idx) * sums[-1]
    return int(kept[min(int((sums <= target).sum()), len(kept) - 1)])


def unpack_bits(words: Tensor, num_bits: int) -> Tensor:
    """Bit i % 32 of words[i / 32] as element i: [num_bits] bool."""
    shifts = torch.arange(32, dtype=words.dtype, device=words.device)
    return ((words[:, None] >> shifts) & 1).flatten()[:num_bits].bool()


def uniform(seed: int, step_idx: int) -> float:
    """A number in [0, 1) with 53 random bits: a function of the seed and the token's index."""
    x0, x1, _, _ = philox4x32_10((seed, seed >> 32), (step_idx, 0, 0, 0))
    return (x0 << 21 | x1 >> 11) / (1 << 53)


def philox4x32_10(
    key: tuple[int, int], counter: tuple[int, int, int, int]
) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011); all words are taken modulo 2^32."""
    mask = 0xFFFFFFFF
    k0, k1 = (word & mask for word in key)
    c0, c1, c2, c3 = (word & mask for word in counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
