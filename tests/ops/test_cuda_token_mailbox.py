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

NUM_ROWS, MAX_TOKENS = 4, 600


class Mailbox:
    def __init__(self, max_tokens: int = MAX_TOKENS, num_steps: int = 0) -> None:
        self.words = torch.zeros((NUM_ROWS, max_tokens), dtype=torch.int64, pin_memory=True)
        self.num_steps = torch.tensor([num_steps], dtype=torch.int32, device="cuda")

    def publish(self, token_ids: torch.Tensor, after_copies: bool = False) -> None:
        _C.publish_tokens(self.words, self.num_steps, token_ids, after_copies)

    def wait(self, step: int, count: int) -> list[int]:
        stream = torch.cuda.current_stream().cuda_stream
        return _C.wait_for_tokens(self.words, step % 2**32, count, stream)


def ids(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("first", [1, 2**32 - 3], ids=["from 1", "around 2^32"])
def test_steps_in_turn(first: int) -> None:
    """More tokens than threads, one, none, negative ids; the last NUM_ROWS steps can be read."""
    mailbox = Mailbox(num_steps=first - 1 if first == 1 else first - 1 - 2**32)
    sent = [ids(count, seed) for seed, count in enumerate((600, 1, 0, 256, 257, 5, 0, 600))]
    for step, tokens in enumerate(sent):
        mailbox.publish(tokens.cuda(), after_copies=step % 2 == 1)
        for late in range(min(step + 1, NUM_ROWS)):
            want = sent[step - late].tolist()
            for count in (len(want), len(want) // 2):
                assert mailbox.wait(first + step - late, count) == want[:count]


def test_graphs_count_on() -> None:
    """A replay is a step like any other, and waits for what is ahead of it."""
    mailbox = Mailbox()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        tokens = torch.zeros(300, dtype=torch.int32, device="cuda")
        big = torch.zeros(1 << 26, device="cuda")
        mailbox.publish(tokens)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        graph.capture_begin()
        big.add_(1.0)
        tokens.add_(7)
        mailbox.publish(tokens)
        graph.capture_end()
        for step in range(2, 50):
            graph.replay()
            assert mailbox.wait(step, 300) == [7 * (step - 1)] * 300


def test_a_copy_is_there_when_its_words_are() -> None:
    mailbox = Mailbox()
    source = torch.zeros(1 << 20, device="cuda")
    copy = torch.zeros(1 << 20, pin_memory=True)
    for step in range(1, 40):
        source.fill_(step)
        copy.copy_(source, non_blocking=True)
        mailbox.publish(ids(3, seed=step).cuda(), after_copies=True)
        mailbox.wait(step, 3)
        assert copy[-1] == step and copy[0] == step


def test_what_never_comes() -> None:
    mailbox = Mailbox()
    mailbox.publish(ids(3, seed=0).cuda())
    with pytest.raises(RuntimeError, match="step 2 has ended without its tokens"):
        mailbox.wait(2, 3)


def test_too_many_and_elsewhere() -> None:
    mailbox = Mailbox(max_tokens=4)
    with pytest.raises(ValueError, match=r"publish_tokens: words: expected room for 5 tokens"):
        mailbox.publish(ids(5, seed=0).cuda())
    with pytest.raises(ValueError, match=r"wait_for_tokens: words: expected room for 5 tokens"):
        mailbox.wait(1, 5)
    with pytest.raises(ValueError, match="token_ids"):
        mailbox.publish(ids(2, seed=0))
    mailbox.words = mailbox.words[:3]
    with pytest.raises(ValueError, match="a power of two of rows"):
        mailbox.publish(ids(2, seed=0).cuda())
    mailbox.words = torch.zeros((NUM_ROWS, 4), dtype=torch.int64)  # not pinned
    with pytest.raises(RuntimeError, match="token mailbox"):
        mailbox.publish(ids(2, seed=0).cuda())
    torch.cuda.synchronize()  # that error is not the device's
