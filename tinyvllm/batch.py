"""Schedule -> the arrays of one step: the only bridge between the host and the device column.

Two kinds of memory, both allocated once:

  per slot   sampling parameters and block table of the sequence that holds the slot; written when
             it is admitted and when it gets a block
  per row    what ops read in this step: row r is the r-th scheduled sequence

While the same sequences decode step after step, `ops.advance_decode` takes the rows from one step
to the next on the device, the sampled ids included; the host only adds a table entry where a
sequence enters a new block. Any other schedule gathers its rows from the slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinyvllm.models import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from tinyvllm.sequence import Schedule, ScheduledSequence, Sequence

    Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Arguments of `ops.sample` for R rows of logits, in its order."""

    token_ids: torch.Tensor  # [R] i32, the output
    temperature: torch.Tensor  # [R] f32
    top_k: torch.Tensor  # [R] i32
    top_p: torch.Tensor  # [R] f32
    min_p: torch.Tensor  # [R] f32
    seeds: torch.Tensor  # [R] i64
    step_idx: torch.Tensor  # [R] i32


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input: views of persistent memory, valid until the next `build`."""

    forward: ForwardBatch
    sampling: SamplingBatch
    num_tokens: int
    num_seqs: int
    num_logits: int
    is_pure_decode: bool
    """One token and one row of logits per sequence: shapes follow from num_seqs alone, and the
    rows stand one step back, for `ops.advance_decode`."""
    drawn: Int32
    """The memory of `sampling.token_ids`, for the host to read after the step."""
    special: Seq[tuple[int, Sequence]]
    """(row of logits, sequence) where min_tokens or logprobs asks for more than a draw."""


class BatchBuilder:
    """Builds each step's `Batch`. One per engine, used by the engine thread only."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        assert block_size & (block_size - 1) == 0
        self._block_size = block_size
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1
        num_slots, num_tokens = max_num_seqs, max_num_batched_tokens
        max_blocks = -(-max_model_len // block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self._forward = ForwardBatch(
            input_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            slot_mapping=zeros(num_tokens),
            cu_seqlens_q=zeros(num_slots + 1),
            seq_lens=zeros(num_slots),
            block_tables=zeros(num_slots, max_blocks),
            logits_indices=zeros(num_slots),
        )
        self._sampling = SamplingBatch(
            token_ids=zeros(num_slots),
            temperature=zeros(num_slots, dtype=torch.float32),
            top_k=zeros(num_slots),
            top_p=zeros(num_slots, dtype=torch.float32),
            min_p=zeros(num_slots, dtype=torch.float32),
            seeds=zeros(num_slots, dtype=torch.int64),
            step_idx=zeros(num_slots),
        )
        # The same memory as numpy, whose small operations cost a fifth of torch's.
        self._input_ids: Int32 = self._forward.input_ids.numpy()
        self._positions: Int32 = self._forward.positions.numpy()
        self._slot_mapping: Int32 = self._forward.slot_mapping.numpy()
        self._cu_seqlens_q: Int32 = self._forward.cu_seqlens_q.numpy()
        self._seq_lens: Int32 = self._forward.seq_lens.numpy()
        self._block_tables: Int32 = self._forward.block_tables.numpy()
        self._logits_indices: Int32 = self._forward.logits_indices.numpy()
        self._sampled: Int32 = self._sampling.token_ids.numpy()
        self._step_idx: Int32 = self._sampling.step_idx.numpy()
        per_row = ("temperature", "top_k", "top_p", "min_p", "seeds")
        self._row_params = [getattr(self._sampling, name).numpy() for name in per_row]
        self._slot_params = [np.zeros_like(rows) for rows in self._row_params]
        self._slot_tables: Int32 = np.zeros((num_slots, max_blocks), np.int32)
        self._slot_num_blocks = [0] * num_slots
        self._slot_owner: list[Sequence | None] = [None] * num_slots

        self._decode_views: dict[int, tuple[ForwardBatch, SamplingBatch]] = {}
        self._decoding: list[ScheduledSequence] | None = None  # the last step's, if pure decode
        self._decode_batch: Batch | None = None
        self._special: list[tuple[int, Sequence]] = []
        self._arange = np.arange(max(num_tokens, num_slots + 1), dtype=np.int32)

    def continues(self, schedule: Schedule) -> bool:
        """The step can be built while the last one still runs: its rows are the same, and only
        table entries are added, which the last one does not read."""
        return schedule.is_pure_decode and schedule.sequences == self._decoding

    def build(self, schedule: Schedule) -> Batch:
        """The arrays of one step. Overwrites those of the last one, which must have ended unless
        the schedule `continues` it."""
        for seq in schedule.preempted:
            self._forget(seq)
        entries = schedule.sequences
        if not schedule.is_pure_decode:
            self._decoding = None
            return self._build_mixed(entries)
        # The scheduler keeps a sequence's entry for as long as it decodes. Equal lists hold the
        # same entries, so each has got exactly one token since the last step: the device's.
        if entries == self._decoding and self._decode_batch is not None:
            self._add_new_blocks(entries)
            return self._decode_batch
        self._decoding = entries
        self._decode_batch = self._build_decode([entry.seq for entry in entries])
        return self._decode_batch

    # --- Pure decode ----------------------------------------------------------------------------

    def _add_new_blocks(self, entries: list[ScheduledSequence]) -> None:
        mask = self._mask
        for row, entry in enumerate(entries):
            seq = entry.seq
            position = seq.num_scheduled_tokens - 1
            if position & mask == 0:
                block_idx = position >> self._shift
                block_id = seq.block_table[block_idx]
                self._block_tables[row, block_idx] = block_id
                self._slot_tables[seq.slot, block_idx] = block_id
                self._slot_num_blocks[seq.slot] = block_idx + 1

    def _build_decode(self, sequences: list[Sequence]) -> Batch:
        num_seqs = len(sequences)
        slots = [self._sync_slot(seq) for seq in sequences]
        starts = [seq.num_scheduled_tokens - 1 for seq in sequences]
        self._sampled[:num_seqs] = [seq.token_ids[-1] for seq in sequences]
        self._seq_lens[:num_seqs] = starts
        self._positions[:num_seqs] = self._seq_lens[:num_seqs] - 1
        self._cu_seqlens_q[: num_seqs + 1] = self._arange[: num_seqs + 1]
        self._logits_indices[:num_seqs] = self._arange[:num_seqs]
        self._gather_tables(slots, sequences)
        self._gather_sampling(slots, sequences)
        self._step_idx[:num_seqs] -= 1
        views = self._decode_views.get(num_seqs)
        if views is None:
            views = self._decode_views[num_seqs] = self._narrow(num_seqs, num_seqs, num_seqs)
        drawn = self._sampled[:num_seqs]
        return Batch(*views, num_seqs, num_seqs, num_seqs, True, drawn, self._special)

    # --- Any other schedule ---------------------------------------------------------------------

    def _build_mixed(self, entries: list[ScheduledSequence]) -> Batch:
        """Decodes and prompt chunks in one step; the sequences' tokens lie one after another."""
        sequences = [entry.seq for entry in entries]
        slots = [self._sync_slot(seq) for seq in sequences]
        starts = [entry.seq.num_scheduled_tokens - entry.num_tokens for entry in entries]
        num_seqs, token_idx = len(entries), 0
        self._gather_tables(slots, sequences)
        for row, (entry, start) in enumerate(zip(entries, starts, strict=True)):
            count = entry.num_tokens
            tokens = slice(token_idx, token_idx + count)
            positions = self._positions[tokens]
            np.add(self._arange[:count], start, out=positions)
            self._input_ids[tokens] = entry.seq.token_ids[start : start + count]
            block_ids = self._block_tables[row, positions >> self._shift]
            self._slot_mapping[tokens] = (block_ids << self._shift) + (positions & self._mask)
            self._seq_lens[row] = start + count
            token_idx += count
            self._cu_seqlens_q[row + 1] = token_idx
        self._cu_seqlens_q[0] = 0
        sampled = [row for row, entry in enumerate(entries) if entry.samples]
        num_logits = len(sampled)
        self._logits_indices[:num_logits] = self._cu_seqlens_q[1:][sampled] - 1
        self._gather_sampling([slots[row] for row in sampled], [sequences[row] for row in sampled])
        forward, sampling = self._narrow(token_idx, num_seqs, num_logits)
        drawn = self._sampled[:num_logits]
        return Batch(
            forward, sampling, token_idx, num_seqs, num_logits, False, drawn, self._special
        )

    def _narrow(
        self, num_tokens: int, num_seqs: int, num_logits: int
    ) -> tuple[ForwardBatch, SamplingBatch]:
        whole, draw = self._forward, self._sampling
        forward = ForwardBatch(
            input_ids=whole.input_ids[:num_tokens],
            positions=whole.positions[:num_tokens],
            slot_mapping=whole.slot_mapping[:num_tokens],
            cu_seqlens_q=whole.cu_seqlens_q[: num_seqs + 1],
            seq_lens=whole.seq_lens[:num_seqs],
            block_tables=whole.block_tables[:num_seqs],
            logits_indices=whole.logits_indices[:num_logits],
        )
        sampling = SamplingBatch(
            token_ids=draw.token_ids[:num_logits],
            temperature=draw.temperature[:num_logits],
            top_k=draw.top_k[:num_logits],
            top_p=draw.top_p[:num_logits],
            min_p=draw.min_p[:num_logits],
            seeds=draw.seeds[:num_logits],
            step_idx=draw.step_idx[:num_logits],
        )
        return forward, sampling

    # --- Slots ----------------------------------------------------------------------------------

    def _sync_slot(self, seq: Sequence) -> int:
        """Bring the sequence's slot up to date: its parameters once, its new blocks always."""
        slot = seq.slot
        if self._slot_owner[slot] is not seq:
            self._slot_owner[slot] = seq
            self._slot_num_blocks[slot] = 0
            params = seq.params
            values: tuple[Any, ...] = (
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                seq.seed,
            )
            for array, value in zip(self._slot_params, values, strict=True):
                array[slot] = value
        known, num_blocks = self._slot_num_blocks[slot], len(seq.block_table)
        if known < num_blocks:
            self._slot_tables[slot, known:num_blocks] = seq.block_table[known:]
            self._slot_num_blocks[slot] = num_blocks
        return slot

    def _forget(self, seq: Sequence) -> None:
        """A preempted sequence comes back with other blocks, perhaps in the same slot."""
        for slot, owner in enumerate(self._slot_owner):
            if owner is seq:
                self._slot_owner[slot] = None

    def _gather_tables(self, slots: list[int], sequences: list[Sequence]) -> None:
        width = max(len(seq.block_table) for seq in sequences)
        self._block_tables[: len(slots), :width] = self._slot_tables[slots, :width]

    def _gather_sampling(self, slots: list[int], sequences: list[Sequence]) -> None:
        num_logits = len(slots)
        for rows, per_slot in zip(self._row_params, self._slot_params, strict=True):
            rows[:num_logits] = per_slot[slots]
        self._step_idx[:num_logits] = [
            seq.num_scheduled_tokens - seq.num_prompt_tokens for seq in sequences
        ]
        self._special = [
            (row, seq)
            for row, seq in enumerate(sequences)
            if seq.params.min_tokens or seq.params.logprobs is not None
        ]
