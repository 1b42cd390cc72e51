"""SlotLogits: what requests ask of their logits, kept on the device for each slot.

    raw logits ──adjust_logits──► adjusted ──sample──► token ids ──count_tokens──► the slot's counts

The state of a slot is written when a sequence gets its first logits there (again after a
preemption), its mask when that changes, and its counts by the device. Nothing is allocated before a
request asks for any of it, and the counts, [num_slots, vocab_size], not before one has penalties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from tinyvllm.ops import Ops
    from tinyvllm.sequence import Sequence

_MIN_BIASES = 16  # columns


class SlotLogits:
    """Used by the engine thread, in the order of the device's stream."""

    def __init__(
        self, ops: Ops, num_slots: int, num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        """`num_rows`: rows of logits of a step at most."""
        self._ops = ops
        self._device = device
        self._num_slots, self._vocab_size = num_slots, vocab_size
        num_words = -(-vocab_size // 32)
        self._adjusted = self._zeros(num_rows, vocab_size, dtype=torch.float32)
        self._penalties = self._zeros(num_slots, 3, dtype=torch.float32)
        # Rows without penalties are never looked up: one row stands for all.
        self._counts = self._zeros(1, vocab_size).expand(num_slots, vocab_size)
        self._has_counts = False
        self._prompt_mask = self._zeros(num_slots, num_words)
        self._bias_ids = self._zeros(num_slots, _MIN_BIASES)
        self._bias_values = self._zeros(num_slots, _MIN_BIASES, dtype=torch.float32)
        self._allowed_mask = self._zeros(num_slots, num_words)
        # Whose state a slot has, and which mask: an id and its preemptions, a version and a kind.
        self._owners: list[tuple[int, int] | None] = [None] * num_slots
        self._masks: list[tuple[int, bool] | None] = [None] * num_slots

    def adjust(
        self, logits: torch.Tensor, rows: Seq[tuple[int, Sequence]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what to draw from, slot_idx for `count`) for logits [R, V] whose `rows` belong to
        sequences that adjust theirs; the others' are copied."""
        slots = [-1] * len(logits)
        for row, seq in rows:
            self._sync(seq)
            slots[row] = seq.slot
        slot_idx = torch.tensor(slots, dtype=torch.int32, device=self._device)
        adjusted = self._adjusted[: len(logits)]
        self._ops.adjust_logits(
            adjusted,
            logits,
            slot_idx,
            self._penalties,
            self._counts,
            self._prompt_mask,
            self._bias_ids,
            self._bias_values,
            self._allowed_mask,
        )
        return adjusted, slot_idx

    def count(self, token_ids: torch.Tensor, slot_idx: torch.Tensor) -> None:
        """After the draw."""
        if self._has_counts:
            self._ops.count_tokens(self._counts, token_ids, slot_idx)

    def _sync(self, seq: Sequence) -> None:
        slot, owner = seq.slot, (seq.seq_id, seq.num_preemptions)
        if self._owners[slot] != owner:
            self._owners[slot] = owner
            self._masks[slot] = None
            self._write(slot, seq)
        may_stop = seq.num_scheduled_tokens >= seq.min_len
        allowed = seq.allowed
        mask = (allowed.version, may_stop)
        if self._masks[slot] != mask:
            self._masks[slot] = mask
            self._allowed_mask[slot].copy_(torch.from_numpy(allowed.row(may_stop)))

    def _write(self, slot: int, seq: Sequence) -> None:
        """All but the mask. Every token of the sequence is known when it gets its first logits."""
        params = seq.params
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalties[slot].copy_(torch.tensor(penalties, dtype=torch.float32))
        if params.has_penalties and not self._has_counts:
            self._counts = self._zeros(self._num_slots, self._vocab_size)
            self._has_counts = True
        if self._has_counts:
            output = np.asarray(seq.output_token_ids, np.int64)
            counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
            self._counts[slot].copy_(torch.from_numpy(counts))
        if params.has_penalties:
            bits = np.zeros(self._prompt_mask.shape[1] * 32, np.uint8)
            bits[seq.token_ids[: seq.num_prompt_tokens]] = 1
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self._prompt_mask[slot].copy_(torch.from_numpy(words))
        biases = params.logit_bias or {}
        if len(biases) > self._bias_ids.shape[1]:
            self._widen(1 << (len(biases) - 1).bit_length())
        self._bias_ids[slot].fill_(-1)
        if biases:
            ids = torch.tensor(list(biases), dtype=torch.int32)
            self._bias_ids[slot, : len(biases)].copy_(ids)
            self._bias_values[slot, : len(biases)].copy_(torch.tensor(list(biases.values())))

    def _widen(self, num_biases: int) -> None:
        for name in ("_bias_ids", "_bias_values"):
            old = getattr(self, name)
            new = self._zeros(self._num_slots, num_biases, dtype=old.dtype)
            if name == "_bias_ids":
                new.fill_(-1)
            new[:, : old.shape[1]] = old
            setattr(self, name, new)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)
