"""Tokens that a GPU stores into the host's memory."""

from __future__ import annotations

import pytest
import torch

from tinyvllm import _C

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

MAX_ROWS, NUM_STAGES = 600, 3


@pytest.fixture
def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def ids(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=generator)


def test_steps_in_turn(stream: int) -> None:
    """More rows than threads, one, none, negative ids; the last NUM_STAGES steps can be read."""
    mailbox = _C.TokenMailbox(0, MAX_ROWS, NUM_STAGES)
    sent = [ids(count, seed) for seed, count in enumerate((600, 1, 0, 256, 257, 5, 0, 600))]
    for step, tokens in enumerate(sent, start=1):
        mailbox.publish(tokens.cuda())
        for late in range(min(step, NUM_STAGES)):
            want = sent[step - 1 - late].tolist()
            assert mailbox.wait(step - late, len(want), stream) == want
            assert mailbox.wait(step - late, len(want) // 2, stream) == want[: len(want) // 2]


def test_graphs_count_on() -> None:
    """A replay is a step like any other, and waits for what is ahead of it."""
    mailbox = _C.TokenMailbox(0, MAX_ROWS, NUM_STAGES)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tokens = torch.zeros(300, dtype=torch.int32, device="cuda")
        big = torch.zeros(1 << 26, device="cuda")
        mailbox.publish(tokens)
        graph = torch.cuda.CUDAGraph()
        side.synchronize()
        graph.capture_begin()
        big.add_(1.0)
        tokens.add_(7)
        mailbox.publish(tokens)
        graph.capture_end()
        for step in range(2, 50):
            graph.replay()
            assert mailbox.wait(step, 300, side.cuda_stream) == [7 * (step - 1)] * 300


def test_what_never_comes(stream: int) -> None:
    mailbox = _C.TokenMailbox(0, MAX_ROWS, NUM_STAGES)
    mailbox.publish(ids(3, seed=0).cuda())
    with pytest.raises(RuntimeError, match="step 2 has ended without its tokens"):
        mailbox.wait(2, 3, stream)


def test_too_many_and_elsewhere(stream: int) -> None:
    mailbox = _C.TokenMailbox(0, 4, NUM_STAGES)
    with pytest.raises(ValueError, match="token_ids: expected at most 4 tokens, got 5"):
        mailbox.publish(ids(5, seed=0).cuda())
    with pytest.raises(ValueError, match="count: expected at most 4 tokens, got 5"):
        mailbox.wait(1, 5, stream)
    with pytest.raises(ValueError, match="token_ids: expected a tensor on cuda:0, got cpu"):
        mailbox.publish(ids(2, seed=0))
    with pytest.raises(ValueError, match="expected 1 or more"):
        _C.TokenMailbox(0, 0, NUM_STAGES)
