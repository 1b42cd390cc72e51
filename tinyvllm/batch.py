"""Schedule -> the arrays of one step: the only bridge between the host and the device column.

Two kinds of memory, both allocated once:

  per slot   sampling parameters and block table of the sequence that holds the slot; written when
             it is admitted and when it gets a block
  per row    what ops read in this step: row r is the r-th scheduled sequence

While the same sequences decode step after step, `ops.advance_decode` takes the rows from one step
to the next on the device, the sampled ids included; the host only adds a table entry where a
sequence enters a new block. Any other schedule gathers its rows from the slots.

On a CPU ops read the rows where they are written, so such a gather waits for the step before. For a
GPU they are written to pinned memory, in turns, and copied; a token that the step before draws has
the row there as its source (`ops.take_drawn`). Sizes are padded to buckets, one graph each.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinyvllm.models import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from numpy.typing import NDArray

    from tinyvllm.sequence import Schedule, ScheduledSequence, Sequence

    Int32 = NDArray[np.int32]

# Pinned memory of a step is written again when its copy is over for sure: two steps are in flight
# at most.
NUM_STAGES = 3

_LADDER = (1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), 384, 512, 768, 1024, 1536)
_SMALL = 16
"""Sequences and rows of logits of a small step: a linear of so many costs little more than of 1."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Shape of one step, and the key of its graph."""

    num_tokens: int
    num_seqs: int
    num_logits: int


class Buckets:
    """The sizes that steps are padded to."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        largest = max_num_batched_tokens
        ladder = {n for n in (*_LADDER, *(k << 11 for k in range(1, largest >> 11))) if n < largest}
        ladder |= {n + n // 2 for n in ladder if n >= 2048 and n + n // 2 < largest}
        self._ladder = sorted(ladder | {largest, max_num_seqs})

    def decode(self, num_seqs: int) -> int:
        return self._ladder[bisect_left(self._ladder, num_seqs)]

    def mixed(self, num_tokens: int, num_seqs: int) -> BatchSize:
        small = num_seqs <= _SMALL < self._max_num_seqs
        rows = _SMALL if small else self._max_num_seqs
        return BatchSize(self._ladder[bisect_left(self._ladder, num_tokens)], rows, rows)

    def every_decode(self) -> list[int]:
        return [n for n in self._ladder if n <= self._max_num_seqs]

    def every_mixed(self) -> list[BatchSize]:
        sizes = {self.mixed(n, 1) for n in self._ladder}
        return sorted(
            sizes | {self.mixed(n, self._max_num_seqs) for n in self._ladder if n > _SMALL},
            key=lambda size: (size.num_tokens, size.num_seqs),
        )


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

    def narrow(self, num_logits: int) -> SamplingBatch:
        """Views of the first rows."""
        return SamplingBatch(
            token_ids=self.token_ids[:num_logits],
            temperature=self.temperature[:num_logits],
            top_k=self.top_k[:num_logits],
            top_p=self.top_p[:num_logits],
            min_p=self.min_p[:num_logits],
            seeds=self.seeds[:num_logits],
            step_idx=self.step_idx[:num_logits],
        )


@dataclass(frozen=True, slots=True)
class StepRows:
    """The arrays of one step: on a device, or on the host as the original of such."""

    packed: torch.Tensor  # i32, the memory of all but block_tables and token_ids
    forward: ForwardBatch
    sampling: SamplingBatch
    source_rows: torch.Tensor  # [T] i32: row of the last step's token_ids; -1: input_ids has it

    @classmethod
    def allocate(
        cls,
        num_tokens: int,
        num_slots: int,
        max_blocks: int,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> StepRows:
        sizes = [2 * num_slots, *[num_slots] * 7, num_slots + 1, *[num_tokens] * 4]
        packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device, pin_memory=pin_memory)
        seeds, temperature, top_k, top_p, min_p, step_idx, *rest = torch.split(packed, sizes)
        seq_lens, logits_indices, cu_seqlens_q, input_ids, positions, slot_mapping, source = rest
        zeros = torch.zeros(num_slots, dtype=torch.int32, device=device)
        return cls(
            packed,
            ForwardBatch(
                input_ids=input_ids,
                positions=positions,
                slot_mapping=slot_mapping,
                cu_seqlens_q=cu_seqlens_q,
                seq_lens=seq_lens,
                block_tables=torch.zeros(
                    (num_slots, max_blocks),
                    dtype=torch.int32,
                    device=device,
                    pin_memory=pin_memory,
                ),
                logits_indices=logits_indices,
            ),
            SamplingBatch(
                token_ids=zeros,
                temperature=temperature.view(torch.float32),
                top_k=top_k,
                top_p=top_p.view(torch.float32),
                min_p=min_p.view(torch.float32),
                seeds=seeds.view(torch.int64),
                step_idx=step_idx,
            ),
            source,
        )

    def narrow(self, size: BatchSize) -> StepRows:
        """Views of the first rows; nothing is allocated."""
        whole = self.forward
        num_tokens, num_seqs, num_logits = size.num_tokens, size.num_seqs, size.num_logits
        return StepRows(
            self.packed,
            ForwardBatch(
                input_ids=whole.input_ids[:num_tokens],
                positions=whole.positions[:num_tokens],
                slot_mapping=whole.slot_mapping[:num_tokens],
                cu_seqlens_q=whole.cu_seqlens_q[: num_seqs + 1],
                seq_lens=whole.seq_lens[:num_seqs],
                block_tables=whole.block_tables[:num_seqs],
                logits_indices=whole.logits_indices[:num_logits],
            ),
            self.sampling.narrow(num_logits),
            self.source_rows[:num_tokens],
        )


class _HostArrays:
    """StepRows on the host, and the same memory as numpy, whose small operations cost a fifth of
    torch's."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        forward, draw = rows.forward, rows.sampling
        self.input_ids: Int32 = forward.input_ids.numpy()
        self.positions: Int32 = forward.positions.numpy()
        self.slot_mapping: Int32 = forward.slot_mapping.numpy()
        self.cu_seqlens_q: Int32 = forward.cu_seqlens_q.numpy()
        self.seq_lens: Int32 = forward.seq_lens.numpy()
        self.block_tables: Int32 = forward.block_tables.numpy()
        self.logits_indices: Int32 = forward.logits_indices.numpy()
        self.source_rows: Int32 = rows.source_rows.numpy()
        self.token_ids: Int32 = draw.token_ids.numpy()
        self.step_idx: Int32 = draw.step_idx.numpy()
        per_row = ("temperature", "top_k", "top_p", "min_p", "seeds")
        self.params = [getattr(draw, name).numpy() for name in per_row]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of a prompt in a step, each with the next one known."""

    seq: Sequence
    row: int
    """Of its first token among the step's tokens."""
    start: int
    """Position of that token in the sequence."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input: views of persistent memory, valid until the next `build` (for a GPU: until
    as many as there are stages)."""

    rows: StepRows
    """On a CPU cut to the size, for ops; for a GPU whole, to be copied."""
    size: BatchSize
    """Padded for a GPU."""
    num_seqs: int
    num_logits: int
    is_pure_decode: bool
    """One token and one row of logits per sequence: shapes follow from num_seqs alone, and the
    rows stand one step back, for `ops.advance_decode`."""
    special: Seq[tuple[int, Sequence]]
    """(row of logits, sequence) where the request asks for more than a draw from its logits."""
    table_width: int
    """For a GPU: the block tables are the first num_seqs * table_width elements of the memory of
    `rows.forward.block_tables`, side by side; 0: the device has them."""
    new_entries: Seq[tuple[int, int]]
    """For a GPU: (row * max_blocks + block_idx, block_id) that the device's tables lack."""
    prompt_chunks: Seq[PromptChunk] = ()
    """Those whose prompt_logprobs are wanted."""


class BatchBuilder:
    """Builds each step's `Batch`. One per engine, used by the engine thread only."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        buckets: Buckets | None = None,
    ) -> None:
        """`buckets`: those of a GPU."""
        assert block_size & (block_size - 1) == 0
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1
        self._buckets = buckets
        num_slots, num_tokens = max_num_seqs, max_num_batched_tokens
        self._max_blocks = max_blocks = -(-max_model_len // block_size)
        self._stages = [
            _HostArrays(
                StepRows.allocate(
                    num_tokens,
                    num_slots,
                    max_blocks,
                    pin_memory=buckets is not None and torch.cuda.is_available(),
                )
            )
            for _ in range(1 if buckets is None else NUM_STAGES)
        ]
        self._stage = 0
        self._arrays = self._stages[0]
        self._slot_params = [np.zeros_like(rows) for rows in self._arrays.params]
        self._slot_tables: Int32 = np.zeros((num_slots, max_blocks), np.int32)
        self._slot_num_blocks = [0] * num_slots
        self._slot_owner: list[Sequence | None] = [None] * num_slots

        self._decode_rows: dict[int, StepRows] = {}
        self._decoding: list[ScheduledSequence] | None = None  # the last step's, if pure decode
        self._decode_batch: Batch | None = None
        self._drew: list[Sequence] = []  # whose tokens the last step draws, row by row
        self._special: list[tuple[int, Sequence]] = []
        self._arange = np.arange(max(num_tokens, num_slots + 1), dtype=np.int32)

    def runs_ahead(self, schedule: Schedule) -> bool:
        """The step can be built while the last one still runs. On a CPU that reads the same arrays:
        then only table entries may be added, which it does not look at."""
        return self._buckets is not None or (
            schedule.is_pure_decode and schedule.sequences == self._decoding
        )

    def build(self, schedule: Schedule) -> Batch:
        """The arrays of one step. Overwrites those of the last one, which must have ended unless
        the schedule `runs_ahead`."""
        for seq in schedule.preempted:
            self._forget(seq)
        entries = schedule.sequences
        if not schedule.is_pure_decode:
            self._decoding = None
            return self._build_mixed(entries)
        # The scheduler keeps a sequence's entry for as long as it decodes. Equal lists hold the
        # same entries, so each has got exactly one token since the last step: the device's.
        if entries == self._decoding and self._decode_batch is not None:
            new_entries = self._add_new_blocks(entries)
            if self._buckets is None or not new_entries:
                return self._decode_batch
            return replace(self._decode_batch, new_entries=new_entries)
        self._decoding = entries
        sequences = [entry.seq for entry in entries]
        if self._buckets is None:
            self._decode_batch = self._build_decode(sequences)
            return self._decode_batch
        first = self._build_mixed(entries)
        self._decode_batch = self._decode_of(sequences, self._buckets.decode(len(sequences)))
        return first

    # --- Pure decode ----------------------------------------------------------------------------

    def _add_new_blocks(self, entries: list[ScheduledSequence]) -> list[tuple[int, int]]:
        mask, tables = self._mask, self._arrays.block_tables
        added = []
        for row, entry in enumerate(entries):
            seq = entry.seq
            position = seq.num_scheduled_tokens - 1
            if position & mask == 0:
                block_idx = position >> self._shift
                block_id = seq.block_table[block_idx]
                added.append((row * self._max_blocks + block_idx, block_id))
                self._slot_tables[seq.slot, block_idx] = block_id
                self._slot_num_blocks[seq.slot] = block_idx + 1
        if self._buckets is None:
            for place, block_id in added:
                tables.reshape(-1)[place] = block_id
        return added

    def _build_decode(self, sequences: list[Sequence]) -> Batch:
        """On a CPU, where every token is known: rows one step back, in place."""
        num_seqs, arrays = len(sequences), self._arrays
        slots = [self._sync_slot(seq) for seq in sequences]
        arrays.token_ids[:num_seqs] = [seq.token_ids[-1] for seq in sequences]
        arrays.seq_lens[:num_seqs] = [seq.num_scheduled_tokens - 1 for seq in sequences]
        arrays.positions[:num_seqs] = arrays.seq_lens[:num_seqs] - 1
        arrays.cu_seqlens_q[: num_seqs + 1] = self._arange[: num_seqs + 1]
        arrays.logits_indices[:num_seqs] = self._arange[:num_seqs]
        self._gather_tables(slots, sequences)
        self._gather_sampling(slots, sequences)
        arrays.step_idx[:num_seqs] -= 1
        return self._decode_of(sequences, num_seqs)

    def _decode_of(self, sequences: list[Sequence], padded: int) -> Batch:
        size = BatchSize(padded, padded, padded)
        rows = self._arrays.rows
        if self._buckets is None:
            if padded not in self._decode_rows:
                self._decode_rows[padded] = rows.narrow(size)
            rows = self._decode_rows[padded]
        return Batch(rows, size, len(sequences), len(sequences), True, self._special, 0, ())

    # --- Any other schedule ---------------------------------------------------------------------

    def _build_mixed(self, entries: list[ScheduledSequence]) -> Batch:
        """Decodes and prompt chunks in one step; the sequences' tokens lie one after another."""
        self._stage = (self._stage + 1) % len(self._stages)
        arrays = self._arrays = self._stages[self._stage]
        sequences = [entry.seq for entry in entries]
        slots = [self._sync_slot(seq) for seq in sequences]
        starts = [entry.seq.num_scheduled_tokens - entry.num_tokens for entry in entries]
        num_seqs, token_idx = len(entries), 0
        tables = self._gather_tables(slots, sequences)
        drawn_rows: dict[Sequence, int] = {}
        for row, (entry, start) in enumerate(zip(entries, starts, strict=True)):
            count = entry.num_tokens
            tokens = slice(token_idx, token_idx + count)
            positions = arrays.positions[tokens]
            np.add(self._arange[:count], start, out=positions)
            if start < len(entry.seq.token_ids):
                arrays.input_ids[tokens] = entry.seq.token_ids[start : start + count]
                arrays.source_rows[tokens] = -1
            else:  # the step before draws it
                drawn_rows = drawn_rows or {seq: row for row, seq in enumerate(self._drew)}
                arrays.input_ids[token_idx] = 0
                arrays.source_rows[token_idx] = drawn_rows[entry.seq]
            block_ids = tables[row, positions >> self._shift]
            arrays.slot_mapping[tokens] = (block_ids << self._shift) + (positions & self._mask)
            arrays.seq_lens[row] = start + count
            token_idx += count
            arrays.cu_seqlens_q[row + 1] = token_idx
        arrays.cu_seqlens_q[0] = 0
        sampled = [row for row, entry in enumerate(entries) if entry.samples]
        num_logits = len(sampled)
        arrays.logits_indices[:num_logits] = arrays.cu_seqlens_q[1:][sampled] - 1
        self._drew = [sequences[row] for row in sampled]
        self._gather_sampling([slots[row] for row in sampled], self._drew)
        if self._buckets is None:
            size = BatchSize(token_idx, num_seqs, num_logits)
            rows = arrays.rows.narrow(size)
        else:
            size = self._buckets.mixed(token_idx, num_seqs)
            rows = arrays.rows
            self._pad(arrays, token_idx, num_seqs, num_logits, size)
        return Batch(
            rows,
            size,
            num_seqs,
            num_logits,
            False,
            self._special,
            tables.shape[1],
            (),
            _prompt_chunks(entries, starts),
        )

    def _pad(
        self, arrays: _HostArrays, num_tokens: int, num_seqs: int, num_logits: int, size: BatchSize
    ) -> None:
        """Tokens that belong to nobody and store nothing, sequences without tokens, greedy rows."""
        tokens = slice(num_tokens, size.num_tokens)
        arrays.input_ids[tokens] = arrays.positions[tokens] = 0
        arrays.slot_mapping[tokens] = arrays.source_rows[tokens] = -1
        arrays.cu_seqlens_q[num_seqs + 1 :] = num_tokens
        arrays.seq_lens[num_seqs:] = 0
        arrays.logits_indices[num_logits:] = 0
        arrays.step_idx[num_logits:] = 0
        for values in arrays.params:
            values[num_logits:] = 0

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

    def forget_all(self) -> None:
        """No sequence is left: one that has ended is not kept, nor whoever reads its tokens."""
        self._slot_owner = [None] * len(self._slot_owner)
        self._decoding = self._decode_batch = None
        self._drew, self._special = [], []

    def _gather_tables(self, slots: list[int], sequences: list[Sequence]) -> Int32:
        """[S, width], in the step's memory."""
        width = max(len(seq.block_table) for seq in sequences)
        tables = self._arrays.block_tables
        if self._buckets is None:
            tables = tables[: len(slots), :width]
        else:
            tables = tables.reshape(-1)[: len(slots) * width].reshape(len(slots), width)
        tables[...] = self._slot_tables[slots, :width]
        return tables

    def _gather_sampling(self, slots: list[int], sequences: list[Sequence]) -> None:
        num_logits = len(slots)
        for rows, per_slot in zip(self._arrays.params, self._slot_params, strict=True):
            rows[:num_logits] = per_slot[slots]
        self._arrays.step_idx[:num_logits] = [
            seq.num_scheduled_tokens - seq.num_prompt_tokens for seq in sequences
        ]
        self._special = [(row, seq) for row, seq in enumerate(sequences) if seq.needs_logits]


def _prompt_chunks(entries: list[ScheduledSequence], starts: list[int]) -> list[PromptChunk]:
    chunks, row = [], 0
    for entry, start in zip(entries, starts, strict=True):
        seq = entry.seq
        if seq.params.prompt_logprobs is not None and seq.choice == 0:
            num_tokens = min(start + entry.num_tokens, seq.num_prompt_tokens - 1) - start
            if num_tokens > 0:
                chunks.append(PromptChunk(seq, row, start, num_tokens))
        row += entry.num_tokens
    return chunks
