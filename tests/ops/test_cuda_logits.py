"""The ops on logits on a GPU: the bits (adjust_logits), ids and values of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from support.op_helpers import assert_bitwise_equal
from support.slot_state import expected_logits, neutral_state, random_state, slots_for

from tinyvllm import _C
from tinyvllm.ops import native, reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

INF = float("inf")
NAN = float("nan")


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * 4


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 1000, 4096, 4099, 128_256])
@pytest.mark.parametrize("num_bias", [0, 1, 300])
def test_adjusted_logits_have_the_bits_of_the_reference(vocab_size: int, num_bias: int) -> None:
    """Slots permuted, rows aligned and not, infinities among the logits."""
    rows, num_slots = 9, 14
    wide = random_logits(rows, vocab_size + 8)
    wide[:, ::11] = -INF
    wide[:, 5::13] = INF
    state = random_state(num_slots, vocab_size, num_bias)
    slots = slots_for(rows, num_slots)
    on_gpu = [t.cuda() for t in state.tensors]
    for begin in (0, 3):
        logits = wide.cuda()[:, begin : begin + vocab_size]
        out = torch.full((rows, vocab_size + 8), 5.0, device="cuda")
        native.adjust_logits(out[:, begin : begin + vocab_size], logits, slots.cuda(), *on_gpu)
        expected = torch.full_like(out, 5.0, device="cpu")
        expected[:, begin : begin + vocab_size] = expected_logits(logits, slots, state)
        assert_bitwise_equal(out.cpu(), expected)


def test_nan_stays_nan_and_a_slot_that_does_not_exist_copies() -> None:
    logits = torch.full((3, 100), NAN)
    logits[2] = 1.5
    state = random_state(3, 100, 4)
    out = torch.zeros(3, 100, device="cuda")
    slots = torch.tensor([2, 0, 3], dtype=torch.int32)
    native.adjust_logits(out, logits.cuda(), slots.cuda(), *(t.cuda() for t in state.tensors))
    expected = expected_logits(logits, torch.tensor([2, 0, -1]), state)
    assert torch.equal(out.cpu().isnan(), expected.isnan())
    assert torch.equal(out.cpu().nan_to_num(9.0), expected.nan_to_num(9.0))


def test_tokens_are_counted() -> None:
    counts = torch.zeros(300, 50, dtype=torch.int32, device="cuda")
    slots = torch.randperm(300).int().cuda()
    ids = (torch.arange(300) % 50).int().cuda()
    slots[::7] = -1
    for _ in range(3):
        native.count_tokens(counts, ids, slots)
    expected = torch.zeros(300, 50, dtype=torch.int32)
    for _ in range(3):
        reference.count_tokens(expected, ids.cpu(), slots.cpu())
    assert torch.equal(counts.cpu(), expected)
    wrong = torch.tensor([0, 300, 2], dtype=torch.int32, device="cuda")
    native.count_tokens(counts, torch.tensor([-1, 0, 50], dtype=torch.int32).cuda(), wrong)
    assert torch.equal(counts.cpu(), expected)


@pytest.mark.parametrize("vocab_size", [1, 15, 33, 1000, 4099, 49_152, 128_256])
@pytest.mark.parametrize("kind", ["random", "ties", "flat", "masked", "one_group"])
@pytest.mark.parametrize("columns", [0, 1, 20])
def test_logprobs_are_those_of_the_reference(vocab_size: int, kind: str, columns: int) -> None:
    rows = 6
    wide = random_logits(rows, vocab_size + 4, seed=vocab_size)
    if kind == "ties":
        wide = wide.round()
    if kind == "flat":
        wide.fill_(0.5)
    if kind == "masked":
        wide[:, 1::2] = -INF
        wide[:, 2::5] = NAN
    if kind == "one_group":  # all that comes first is one thread group's: the list overflows
        for i in range(0, vocab_size, 4096):
            wide[:, i : i + 32] += 50.0
    wanted = [columns, 0, -1, 1, columns // 2, 20]
    token_ids = [(r * 37) % vocab_size for r in range(rows)]
    for begin in (0, 1):
        logits = wide[:, begin : begin + vocab_size]
        results = []
        for ops, device in ((native, "cuda"), (reference, "cpu")):
            values = torch.full((rows, columns), 77.0, device=device)
            ids = torch.full((rows, columns), 77, dtype=torch.int32, device=device)
            drawn = torch.full((rows,), 77.0, device=device)
            ops.top_logprobs(
                values,
                ids,
                drawn,
                wide.to(device)[:, begin : begin + vocab_size],
                torch.tensor(token_ids, dtype=torch.int32, device=device),
                torch.tensor(wanted, dtype=torch.int32, device=device),
            )
            results.append((values.cpu(), ids.cpu(), drawn.cpu()))
        actual, expected = results
        assert torch.equal(actual[1], expected[1])
        # fp32 against fp64: rounding of x - largest and of the result; ex2.approx errs by 2^-22
        # (more where its argument was rounded, which the small weight makes up for).
        largest = logits.masked_fill(logits.isnan(), -INF).amax(-1)
        spread = (largest - logits.masked_fill(logits.isinf() | logits.isnan(), 0).amin(-1)).max()
        allowed = 2.0**-22 * (abs(float(spread)) + math.log(vocab_size) + 2)
        for a, e in ((actual[0], expected[0]), (actual[2], expected[2])):
            assert torch.allclose(a, e, rtol=0, atol=allowed, equal_nan=True)


def test_rows_without_a_finite_maximum() -> None:
    logits = torch.tensor(
        [[NAN] * 5, [INF, 0.0, 1.0, INF, -INF], [-INF] * 5, [NAN, 1.0, -INF, 1.0, NAN]],
        device="cuda",
    )
    values = torch.zeros(4, 5, device="cuda")
    ids = torch.zeros(4, 5, dtype=torch.int32, device="cuda")
    drawn = torch.zeros(4, device="cuda")
    one = torch.tensor([1, 1, 1, 5], dtype=torch.int32, device="cuda")
    native.top_logprobs(values, ids, drawn, logits, one, torch.full_like(one, 4))
    assert ids.tolist() == [[-1] * 5, [0, 3, 2, 1, -1], [0, 1, 2, 3, -1], [1, 3, 2, -1, -1]]
    assert values[1:3, :4].isnan().all()
    assert drawn.isnan().all()  # the last row's token does not exist


def test_a_captured_step_reads_what_is_there_when_it_runs() -> None:
    """adjust, sample, count, logprobs in one CUDA graph: greedy with a frequency penalty never
    draws a token again before all others, whose logits are within its reach."""
    vocab_size, steps = 40, 35
    logits = torch.linspace(0, 1, vocab_size, device="cuda").view(1, -1)
    state = neutral_state(2, vocab_size).to("cuda")
    state.penalties[1, 1] = 2.0
    out = torch.empty_like(logits)
    token = torch.zeros(1, dtype=torch.int32, device="cuda")
    slot = torch.ones_like(token)
    floats = [torch.tensor([x], device="cuda") for x in (0.0, 1.0, 0.0)]
    zero = torch.zeros_like(token)
    values, ids = torch.empty(1, 3, device="cuda"), torch.empty(1, 3, device="cuda").int()
    drawn = torch.empty(1, device="cuda")

    def step() -> None:
        native.adjust_logits(out, logits, slot, *state.tensors)
        native.sample(token, out, floats[0], zero, floats[1], floats[2], zero.long(), zero)
        native.count_tokens(state.output_counts, token, slot)
        native.top_logprobs(values, ids, drawn, logits, token, slot * 3)

    step()
    state.output_counts.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    exact = torch.log_softmax(logits.double(), -1)[0].cpu()
    for i in range(steps):
        graph.replay()
        assert token.item() == vocab_size - 1 - i
        assert drawn.item() == pytest.approx(exact[token.item()].item(), abs=1e-6)
        assert ids.tolist() == [[vocab_size - 1, vocab_size - 2, vocab_size - 3]]
