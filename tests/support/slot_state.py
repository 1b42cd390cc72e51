"""Random per-slot state for the ops on logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tinyvllm.ops import reference


@dataclass(frozen=True)
class SlotState:
    """What `adjust_logits` reads, in its order from `penalties` on."""

    penalties: torch.Tensor
    output_counts: torch.Tensor
    prompt_mask: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    allowed_mask: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(vars(self).values())

    def to(self, device: str) -> SlotState:
        return SlotState(*(t.to(device) for t in self.tensors))


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """[S, V] bool -> [S, ceil(V / 32)] i32; bits after the last token are set."""
    num_slots, vocab_size = bits.shape
    padded = torch.ones(num_slots, -(-vocab_size // 32) * 32, dtype=torch.int64)
    padded[:, :vocab_size] = bits
    words = (padded.view(num_slots, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def neutral_state(num_slots: int, vocab_size: int, num_bias: int = 3) -> SlotState:
    """State that changes nothing."""
    return SlotState(
        penalties=torch.tensor([[1.0, 0.0, 0.0]] * num_slots),
        output_counts=torch.zeros(num_slots, vocab_size, dtype=torch.int32),
        prompt_mask=pack_bits(torch.zeros(num_slots, vocab_size, dtype=torch.bool)),
        bias_ids=torch.full((num_slots, num_bias), -1, dtype=torch.int32),
        bias_values=torch.full((num_slots, num_bias), float("nan")),
        allowed_mask=pack_bits(torch.ones(num_slots, vocab_size, dtype=torch.bool)),
    )


def random_state(num_slots: int, vocab_size: int, num_bias: int, seed: int = 0) -> SlotState:
    """Every kind of state; slot 0 has a mask alone, slot 1 nothing, slot 2 a bias alone."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    penalties = torch.stack(
        [0.5 + rand(num_slots) * 1.5, rand(num_slots) * 4 - 2, rand(num_slots) * 4 - 2], dim=1
    )
    penalties[:3] = torch.tensor([1.0, 0.0, 0.0])
    used = min(num_bias, vocab_size)
    bias_ids = torch.full((num_slots, num_bias), -1, dtype=torch.int32)
    for ids in bias_ids:
        ids[:used] = torch.randperm(vocab_size, generator=generator)[:used].int()
        ids[rand(num_bias) < 0.3] = -1  # holes anywhere
    bias_ids[:2] = -1
    allowed = rand(num_slots, vocab_size) < 0.7
    allowed[1:3] = True
    counts = torch.randint(1, 4, (num_slots, vocab_size), generator=generator).int()
    return SlotState(
        penalties=penalties,
        output_counts=counts * (rand(num_slots, vocab_size) < 0.2),
        prompt_mask=pack_bits(rand(num_slots, vocab_size) < 0.3),
        bias_ids=bias_ids,
        bias_values=rand(num_slots, num_bias) * 200 - 100,
        allowed_mask=pack_bits(allowed),
    )


def expected_logits(logits: torch.Tensor, slot_idx: torch.Tensor, state: SlotState) -> torch.Tensor:
    """By the reference, on the CPU."""
    out = torch.full_like(logits, 7.0, device="cpu")
    reference.adjust_logits(out, logits.cpu(), slot_idx.cpu(), *state.tensors)
    return out


def slots_for(num_rows: int, num_slots: int) -> torch.Tensor:
    """A permutation of slots over the rows; every third row has none."""
    generator = torch.Generator().manual_seed(num_rows)
    slots = torch.randperm(num_slots, generator=generator)[:num_rows].int()
    slots[::3] = -1
    return slots
