"""adjust_logits, count_tokens, top_logprobs: the reference against what transformers and vLLM
document, the kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.op_helpers import assert_bitwise_equal
from support.slot_state import (
    expected_logits,
    neutral_state,
    pack_bits,
    random_state,
    slots_for,
)
from transformers import RepetitionPenaltyLogitsProcessor

from tinyvllm.ops import native, reference

INF = float("inf")
NAN = float("nan")
VOCAB_SIZES = [1, 15, 31, 32, 33, 1000, 4099]
BOTH = pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 4


# ---- adjust_logits: what it means --------------------------------------------------------------


def adjust_one(ops: Any, row: list[float], **state: Any) -> list[float]:
    """A row of slot 1 of 2; what is not named is neutral."""
    neutral = neutral_state(2, len(row))
    for name, value in state.items():
        tensor = torch.tensor(value, dtype=getattr(neutral, name).dtype)
        getattr(neutral, name)[1, : len(tensor)] = tensor
    logits = torch.tensor([row])
    out = torch.full_like(logits, NAN)
    ops.adjust_logits(out, logits, torch.tensor([1], dtype=torch.int32), *neutral.tensors)
    assert logits.tolist() == [row]  # raw, for log-probabilities
    return out[0].tolist()


@BOTH
def test_repetition_is_that_of_transformers(ops: Any) -> None:
    """Over prompt and output alike: divided where positive, multiplied where not."""
    vocab_size = 300
    logits = random_logits(1, vocab_size)
    prompt, output = [5, 17, 17, 250], [3, 5, 299, 3]
    state = neutral_state(1, vocab_size)
    state.penalties[0, 0] = 1.3
    in_prompt = torch.zeros(1, vocab_size, dtype=torch.bool)
    in_prompt[0, prompt] = True
    state.prompt_mask.copy_(pack_bits(in_prompt))
    for token_id in output:
        state.output_counts[0, token_id] += 1
    out = torch.empty_like(logits)
    ops.adjust_logits(out, logits, torch.zeros(1, dtype=torch.int32), *state.tensors)
    processor = RepetitionPenaltyLogitsProcessor(penalty=1.3)
    expected = processor(torch.tensor([prompt + output]), logits.clone())
    assert_bitwise_equal(out, expected)


@BOTH
def test_frequency_and_presence_are_of_the_output_alone(ops: Any) -> None:
    """vLLM: logits -= frequency_penalty * count; logits -= presence_penalty * (count > 0)."""
    adjusted = adjust_one(
        ops,
        [1.0, 1.0, -1.0, 1.0],
        penalties=[1.0, 0.5, 0.25],
        output_counts=[0, 1, 3, 0],
        prompt_mask=[0b1001],
    )
    assert adjusted == [1.0, 0.25, -2.75, 1.0]


@BOTH
def test_bias_comes_before_the_penalties_and_the_mask_stays(ops: Any) -> None:
    """vLLM's sampler: masks, then the logit bias, then repetition, frequency, presence."""
    adjusted = adjust_one(
        ops,
        [1.0, 1.0, 1.0, -3.0, 2.0],
        penalties=[2.0, 1.0, 0.5],
        output_counts=[1, 0, 2, 0, 0],
        prompt_mask=[0b01010],
        bias_ids=[3, 1, 2],
        bias_values=[9.0, 1.0, 100.0],
        allowed_mask=[0b11011],
    )
    assert adjusted == [
        1.0 / 2 - 1 - 0.5,
        (1.0 + 1.0) / 2,
        -INF,  # no bias gets past the mask
        (-3.0 + 9.0) / 2,  # positive with its bias: divided
        2.0,
    ]


@BOTH
def test_the_neutral_slot_and_no_slot_change_no_bit(ops: Any) -> None:
    logits = torch.tensor([[0.0, -0.0, NAN, INF, -INF, 1e-45, 3e38]] * 2)
    out = torch.zeros_like(logits)
    state = neutral_state(1, 7)
    state.output_counts.fill_(2)
    ops.adjust_logits(out, logits, torch.tensor([0, -1], dtype=torch.int32), *state.tensors)
    assert_bitwise_equal(out, logits)


# ---- adjust_logits: the kernels ------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("num_bias", [0, 1, 70])
@pytest.mark.usefixtures("isa", "num_threads")
def test_adjusted_logits_have_the_bits_of_the_reference(vocab_size: int, num_bias: int) -> None:
    """Slots permuted, rows that begin anywhere, infinities and NaN among the logits."""
    rows, num_slots = 9, 14
    wide = random_logits(rows, vocab_size + 5)
    wide[:, ::11] = -INF
    wide[:, 5::13] = INF
    logits = wide[:, 2 : 2 + vocab_size]
    state = random_state(num_slots, vocab_size, num_bias)
    slots = slots_for(rows, num_slots)
    outs = torch.full((rows, vocab_size + 3), 5.0)
    native.adjust_logits(outs[:, 1 : 1 + vocab_size], logits, slots, *state.tensors)
    expected = expected_logits(logits, slots, state)
    assert_bitwise_equal(outs[:, 1 : 1 + vocab_size], expected)
    assert (outs[:, 0] == 5.0).all() and (outs[:, 1 + vocab_size :] == 5.0).all()
    assert vocab_size < 1000 or not torch.equal(expected[slots >= 0], logits[slots >= 0])


@pytest.mark.parametrize("token_id", [0, 31, 32, 63, 95, 199])
@pytest.mark.usefixtures("isa")
def test_one_token_of_many_is_found(token_id: int) -> None:
    """Words of 32 tokens without any that was seen are passed over: no seen one may be."""
    vocab_size = 200
    logits = random_logits(2, vocab_size)
    state = neutral_state(2, vocab_size)
    state.penalties.copy_(torch.tensor([1.7, 0.5, 0.25]))
    state.output_counts[0, token_id] = 1
    in_prompt = torch.zeros(2, vocab_size, dtype=torch.bool)
    in_prompt[1, token_id] = True
    state.prompt_mask.copy_(pack_bits(in_prompt))
    slots = torch.tensor([1, 0], dtype=torch.int32)
    out = torch.zeros_like(logits)
    native.adjust_logits(out, logits, slots, *state.tensors)
    assert_bitwise_equal(out, expected_logits(logits, slots, state))
    assert (out != logits).nonzero().tolist() == [[0, token_id], [1, token_id]]


@pytest.mark.usefixtures("isa")
def test_nan_stays_nan_where_it_is_allowed() -> None:
    vocab_size = 100
    logits = torch.full((3, vocab_size), NAN)
    state = random_state(3, vocab_size, 4)
    out = torch.zeros_like(logits)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    native.adjust_logits(out, logits, slots, *state.tensors)
    expected = expected_logits(logits, slots, state)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out == -INF, expected == -INF)


def test_a_row_does_not_depend_on_its_company_and_a_graph_reads_what_is_there_then() -> None:
    rows, vocab_size = 6, 777
    logits = random_logits(rows, vocab_size)
    state = random_state(rows, vocab_size, 5)
    slots = torch.tensor([4, 2, -1, 0, 5, 1], dtype=torch.int32)
    out = torch.zeros_like(logits)
    with native.capture() as graph:
        native.adjust_logits(out, logits, slots, *state.tensors)
    graph.replay()
    for r in range(rows):
        alone = torch.zeros(1, vocab_size)
        native.adjust_logits(alone, logits[r : r + 1], slots[r : r + 1], *state.tensors)
        assert_bitwise_equal(alone, out[r : r + 1])
    slots.copy_(slots.flip(0))
    state.penalties[4] = torch.tensor([1.9, 0.3, -0.7])
    graph.replay()
    assert_bitwise_equal(out, expected_logits(logits, slots, state))


@pytest.mark.parametrize("slot", [2, -2, 2**31 - 1])
def test_a_slot_that_does_not_exist_is_named(slot: int) -> None:
    state = neutral_state(2, 10)
    with pytest.raises(IndexError, match=rf"adjust_logits: slot_idx\[1\].*-1 <=.*< 2, got {slot}"):
        native.adjust_logits(
            torch.empty(2, 10),
            torch.zeros(2, 10),
            torch.tensor([0, slot], dtype=torch.int32),
            *state.tensors,
        )


def test_shapes_are_checked_in_the_op_s_words() -> None:
    state = neutral_state(2, 33)
    slots = torch.zeros(1, dtype=torch.int32)
    logits = torch.zeros(1, 33)
    out = torch.empty(1, 33)
    tensors = dict(zip(vars(state), state.tensors, strict=True))
    for name, wrong, message in [
        ("prompt_mask", torch.zeros(2, 1, dtype=torch.int32), r"shape \[S, ceil\(V/32\)\]"),
        ("allowed_mask", torch.zeros(3, 2, dtype=torch.int32), r"shape \[S, ceil\(V/32\)\]"),
        ("penalties", torch.zeros(2, 2), r"shape \[S, 3\]"),
        ("output_counts", torch.zeros(2, 33), "dtype int32, got float32"),
        ("bias_values", torch.zeros(2, 4), r"shape \[S, B\]"),
    ]:
        with pytest.raises(ValueError, match=f"adjust_logits: {name}: expected {message}"):
            native.adjust_logits(out, logits, slots, *{**tensors, name: wrong}.values())


@BOTH
def test_no_rows(ops: Any) -> None:
    none = torch.empty(0, dtype=torch.int32)
    state = neutral_state(2, 10)
    ops.adjust_logits(torch.empty(0, 10), torch.empty(0, 10), none, *state.tensors)
    ops.count_tokens(state.output_counts, none, none)
    assert not state.output_counts.any()
    values, ids = torch.empty(0, 5), torch.empty(0, 5, dtype=torch.int32)
    ops.top_logprobs(values, ids, torch.empty(0), torch.empty(0, 10), none, none)


# ---- count_tokens --------------------------------------------------------------------------------


@BOTH
def test_drawn_tokens_are_counted_in_their_slots(ops: Any) -> None:
    counts = torch.arange(3 * 8, dtype=torch.int32).view(3, 8)
    expected = counts.clone()
    expected[2, 7] += 1
    expected[0, 3] += 1
    ids, slots = [7, 5, 3], [2, -1, 0]
    ops.count_tokens(
        counts, torch.tensor(ids, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    )
    assert torch.equal(counts, expected)


@pytest.mark.parametrize(("token_id", "slot", "name"), [(8, 0, "token_ids"), (-1, 0, "token_ids")])
def test_a_token_that_does_not_exist_is_named(token_id: int, slot: int, name: str) -> None:
    counts = torch.zeros(3, 8, dtype=torch.int32)
    with pytest.raises(IndexError, match=rf"count_tokens: {name}\[0\]"):
        native.count_tokens(
            counts,
            torch.tensor([token_id], dtype=torch.int32),
            torch.tensor([slot], dtype=torch.int32),
        )
    assert not counts.any()


# ---- top_logprobs --------------------------------------------------------------------------------


def top_logprobs(
    ops: Any, logits: torch.Tensor, token_ids: list[int], wanted: list[int], columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, ids, drawn); 77 where nothing was written."""
    rows = len(token_ids)
    values = torch.full((rows, columns), 77.0)
    ids = torch.full((rows, columns), 77, dtype=torch.int32)
    drawn = torch.full((rows,), 77.0)
    ops.top_logprobs(
        values,
        ids,
        drawn,
        logits,
        torch.tensor(token_ids, dtype=torch.int32),
        torch.tensor(wanted, dtype=torch.int32),
    )
    return values, ids, drawn


@BOTH
def test_logprobs_are_torch_s(ops: Any) -> None:
    logits = random_logits(7, 1000)
    token_ids = [0, 999, 3, 500, 77, 8, 1]
    values, ids, drawn = top_logprobs(ops, logits, token_ids, [20] * 7, 20)
    exact = torch.log_softmax(logits.double(), -1)
    # Twice the error of torch's own op: at these magnitudes a few units in the last place.
    allowed = 2 * (torch.log_softmax(logits, -1).double() - exact).abs().max().item()
    top = exact.topk(20)
    assert torch.equal(ids.long(), top.indices)
    assert (values.double() - top.values).abs().max() <= allowed
    expected = exact[torch.arange(7), token_ids]
    assert (drawn.double() - expected).abs().max() <= allowed


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("columns", [0, 1, 7, 20])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked", "sorted"])
@pytest.mark.usefixtures("isa", "num_threads")
def test_logprobs_are_those_of_the_reference(vocab_size: int, columns: int, kind: str) -> None:
    rows = 8
    wide = random_logits(rows, vocab_size + 3, seed=vocab_size)
    if kind == "ties":
        wide = wide.round()
    if kind == "flat":
        wide.fill_(0.5)
    if kind == "masked":
        wide[:, 1::2] = -INF
        wide[:, 2::5] = NAN
    if kind == "sorted":
        wide = wide.sort().values
    logits = wide[:, 1 : 1 + vocab_size]
    token_ids = [(r * 37) % vocab_size for r in range(rows)]
    wanted = [columns, 0, -1, 1, columns // 2, 20, columns, -1]
    actual = top_logprobs(native, logits, token_ids, wanted, columns)
    expected = top_logprobs(reference, logits, token_ids, wanted, columns)
    assert torch.equal(actual[1], expected[1])
    # fp32 against fp64: rounding of x - largest and of the result, and 2e-7 of the sum.
    largest = logits.masked_fill(logits.isnan(), -INF).amax(-1)
    spread = (largest - logits.masked_fill(logits.isinf() | logits.isnan(), 0).amin(-1)).max()
    allowed = 2.0**-23 * (abs(float(spread)) + math.log(vocab_size) + 2)
    for a, e in ((actual[0], expected[0]), (actual[2], expected[2])):
        assert torch.allclose(a, e, rtol=0, atol=allowed, equal_nan=True)
    untouched = [r for r in range(rows) if wanted[r] < 0]
    assert (actual[0][untouched] == 77).all() and (actual[2][untouched] == 77).all()


@BOTH
def test_what_cannot_be_listed(ops: Any) -> None:
    logits = torch.tensor(
        [
            [NAN, 1.0, -INF, 1.0, NAN],
            [NAN, NAN, NAN, NAN, NAN],
            [INF, 0.0, 1.0, INF, -INF],
            [-INF, -INF, -INF, -INF, -INF],
        ]
    )
    values, ids, drawn = top_logprobs(ops, logits, [1, 1, 1, 1], [4] * 4, 5)
    assert ids.tolist() == [
        [1, 3, 2, -1, -1],
        [-1, -1, -1, -1, -1],
        [0, 3, 2, 1, -1],
        [0, 1, 2, 3, -1],
    ]
    half = math.log(0.5)
    assert values[0].tolist() == pytest.approx([half, half, -INF, -INF, -INF])
    assert values[2, :4].isnan().all() and values[3, :4].isnan().all()
    assert (values[:, 4] == -INF).all()
    assert drawn[0].item() == pytest.approx(half)
    assert drawn[1:].isnan().all()


def test_more_columns_than_a_request_may_have_are_refused() -> None:
    with pytest.raises(ValueError, match="top_logprobs: values: expected at most 20 columns"):
        top_logprobs(native, torch.zeros(1, 30), [0], [1], 21)
    with pytest.raises(IndexError, match=r"top_logprobs: token_ids\[0\].*got 30"):
        top_logprobs(native, torch.zeros(1, 30), [30], [1], 5)
