"""SlotLogits: what requests ask of their logits beside a draw, launched behind the forward pass.

    raw logits ──adjust_logits──► adjusted ──sample──► token ids ──count_tokens──► the slot's counts
         └───────────────top_logprobs◄─────────────────────┘
              log-probabilities, for the host

A step may be launched while the one before still runs, so what they share with the host is kept
once for each of NUM_STAGES steps in turn (`Mirror`): which rows there are, the state of the slots
and the log-probabilities. A slot's state is written when a sequence gets its first logits there
(again after a preemption), its mask when that changes. The counts are the device's alone.

Nothing is allocated before a request asks for it, and the counts, [num_slots, vocab_size], not
before one has penalties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinyvllm.batch import NUM_STAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from tinyvllm.ops import Ops
    from tinyvllm.sequence import Sequence

Logprobs = tuple[float, dict[int, float]]
"""(of the token, {id: of each of the k most likely ones})"""

_MIN_BIASES = 16  # columns
_MAX_LOGPROBS = 20  # columns; what SamplingParams allows and `ops.top_logprobs` finds


class Mirror:
    """Memory that host and device both know: on a CPU the same; for a GPU pinned memory and its
    copy on the device, brought up to date in the order of the stream."""

    __slots__ = ("_host", "array", "device")

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, is_copied: bool
    ) -> None:
        self.device = self._host = torch.zeros(shape, dtype=dtype, device=device)
        if is_copied:
            self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.array = self._host.numpy()

    def upload(self, rows: Seq[int]) -> None:
        """These rows, in one copy of all between the first and the last of them."""
        if rows and self._host is not self.device:
            span = slice(min(rows), max(rows) + 1)
            self.device[span].copy_(self._host[span], non_blocking=True)

    def download(self, num_rows: int) -> None:
        """The first rows. They are there when the stream has come so far."""
        if self._host is not self.device:
            self._host[:num_rows].copy_(self.device[:num_rows], non_blocking=True)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's draw: what its ops are, and whose the results will be."""

    stage: int
    num_logits: int
    adjusts: bool
    logprobs: Seq[tuple[int, int, int]]
    """(row of logits, seq_id, how many of the most likely tokens)"""

    @property
    def ops_key(self) -> tuple[int, int, bool, bool]:
        """Plans of the same key have the same ops on the same memory."""
        return self.stage, self.num_logits, self.adjusts, bool(self.logprobs)


class SlotLogits:
    """Used by the engine thread."""

    def __init__(
        self,
        ops: Ops,
        *,
        num_slots: int,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        is_copied: bool,
        on_new_memory: Callable[[], None],
    ) -> None:
        """`num_rows`: rows of logits of a step at most. `is_copied`: the device reads a copy of
        what the host writes. `on_new_memory`: what was captured of `run` is out of date."""
        self._ops = ops
        self._num_slots, self._num_rows, self._vocab_size = num_slots, num_rows, vocab_size
        self._device, self._is_copied = device, is_copied
        self._on_new_memory = on_new_memory
        self._stage = 0
        # slot_idx and num_logprobs of each row
        self._rows = [self._mirror(2, num_rows) for _ in range(NUM_STAGES)]
        self._tables: list[_SlotTables] = []
        self._results: list[_TopLogprobs] = []
        self._adjusted: torch.Tensor
        self._counts: torch.Tensor
        self._has_counts = False
        self._count_owners: list[_Owner | None] = [None] * num_slots

    def plan(self, special: Seq[tuple[int, Sequence]], num_logits: int) -> Plan:
        """The draw of a step whose `special` (row, sequence) ask for something: brings over what
        it reads of the host. One that has ended meanwhile still has its slot, and a mask."""
        self._stage = stage = (self._stage + 1) % NUM_STAGES
        slot_idx, num_logprobs = self._rows[stage].array
        slot_idx[:num_logits] = num_logprobs[:num_logits] = -1
        adjusting: list[Sequence] = []
        logprobs = []
        for row, seq in special:
            if seq.allowed is not None:
                slot_idx[row] = seq.slot
                adjusting.append(seq)
            if seq.params.logprobs is not None:
                num_logprobs[row] = seq.params.logprobs
                logprobs.append((row, seq.seq_id, min(seq.params.logprobs, self._vocab_size)))
        self._rows[stage].upload((0, 1))
        if adjusting:
            self._sync(stage, adjusting)
        if logprobs and not self._results:
            self._results = [
                _TopLogprobs(
                    drawn=self._mirror(self._num_rows, dtype=torch.float32),
                    values=self._mirror(self._num_rows, _MAX_LOGPROBS, dtype=torch.float32),
                    ids=self._mirror(self._num_rows, _MAX_LOGPROBS),
                )
                for _ in range(NUM_STAGES)
            ]
        return Plan(stage, num_logits, bool(adjusting), logprobs)

    def run(
        self,
        plan: Plan,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        sample: Callable[[torch.Tensor], None],
    ) -> None:
        """The ops, in the order of the stream; inside of a capture they are recorded. `sample`
        draws the `token_ids` from what it is given. The logits [num_logits, V] stay raw."""
        slot_idx, num_logprobs = self._rows[plan.stage].device[:, : plan.num_logits]
        if plan.adjusts:
            adjusted = self._adjusted[: plan.num_logits]
            tables = self._tables[plan.stage]
            self._ops.adjust_logits(
                adjusted,
                logits,
                slot_idx,
                tables.penalties.device,
                self._counts,
                tables.prompt_mask.device,
                tables.bias_ids.device,
                tables.bias_values.device,
                tables.allowed_mask.device,
            )
            sample(adjusted)
            if self._has_counts:
                self._ops.count_tokens(self._counts, token_ids, slot_idx)
        else:
            sample(logits)
        if plan.logprobs:
            results, n = self._results[plan.stage], plan.num_logits
            self._ops.top_logprobs(
                results.values.device[:n],
                results.ids.device[:n],
                results.drawn.device[:n],
                logits,
                token_ids,
                num_logprobs,
            )

    def download(self, plan: Plan) -> None:
        """After `run`: `logprobs` will be there when the stream has come so far."""
        if plan.logprobs:
            results = self._results[plan.stage]
            for each in (results.values, results.ids, results.drawn):
                each.download(plan.num_logits)

    def logprobs(self, plan: Plan) -> dict[int, Logprobs]:
        """seq_id -> of the raw distribution (before masks and temperature), of a step that has
        ended; until as many later plans as there are stages."""
        if not plan.logprobs:
            return {}
        results = self._results[plan.stage]
        found: dict[int, Logprobs] = {}
        for row, seq_id, count in plan.logprobs:
            ids, values = results.ids.array[row, :count], results.values.array[row, :count]
            top = dict(zip(ids.tolist(), values.tolist(), strict=True))
            found[seq_id] = results.drawn.array[row].item(), top
        return found

    def _sync(self, stage: int, sequences: Iterable[Sequence]) -> None:
        """Bring the state of their slots up to date."""
        if not self._tables:
            self._tables = [
                _SlotTables(self._mirror, self._num_slots, self._vocab_size)
                for _ in range(NUM_STAGES)
            ]
            self._adjusted = self._zeros(self._num_rows, self._vocab_size, dtype=torch.float32)
            # Rows without penalties are never looked up: one row stands for all.
            self._counts = self._zeros(1, self._vocab_size).expand(self._num_slots, -1)
        for seq in sequences:
            num_biases = len(seq.params.logit_bias or ())
            if num_biases > self._tables[0].num_biases:
                for tables in self._tables:
                    tables.widen(1 << (num_biases - 1).bit_length())
                self._on_new_memory()
            if seq.params.has_penalties and self._count_owners[seq.slot] != _owner(seq):
                self._count_owners[seq.slot] = _owner(seq)
                self._start_counts(seq)
        self._tables[stage].sync(sequences)

    def _start_counts(self, seq: Sequence) -> None:
        """Of a sequence that gets its first logits in its slot: every token of it is known. On a
        CPU no step is in flight then."""
        if not self._has_counts:
            self._counts = self._zeros(self._num_slots, self._vocab_size)
            self._has_counts = True
            self._on_new_memory()
        if seq.num_output_tokens:  # it was preempted; a GPU's stream is waited for
            output = np.asarray(seq.output_token_ids, np.int64)
            counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
            self._counts[seq.slot].copy_(torch.from_numpy(counts))
        else:
            self._counts[seq.slot].zero_()

    def _mirror(self, *shape: int, dtype: torch.dtype = torch.int32) -> Mirror:
        return Mirror(shape, dtype, self._device, self._is_copied)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class _TopLogprobs:
    """What `ops.top_logprobs` writes."""

    drawn: Mirror  # [R] f32
    values: Mirror  # [R, _MAX_LOGPROBS] f32
    ids: Mirror  # [R, _MAX_LOGPROBS] i32


_Owner = tuple[int, int]


def _owner(seq: Sequence) -> _Owner:
    """Whose state a slot has: a sequence's, since it was preempted so often."""
    return seq.seq_id, seq.num_preemptions


class _SlotTables:
    """The slots' state, all but the counts, as the steps of one stage read it."""

    def __init__(self, new_mirror: Callable[..., Mirror], num_slots: int, vocab_size: int) -> None:
        self._new_mirror = new_mirror
        self._num_slots = num_slots
        num_words = -(-vocab_size // 32)
        self.penalties = new_mirror(num_slots, 3, dtype=torch.float32)
        self.prompt_mask = new_mirror(num_slots, num_words)
        self.bias_ids = new_mirror(num_slots, _MIN_BIASES)
        self.bias_values = new_mirror(num_slots, _MIN_BIASES, dtype=torch.float32)
        self.allowed_mask = new_mirror(num_slots, num_words)
        self._owners: list[_Owner | None] = [None] * num_slots
        # A version of AllowedTokens, and whether the sequence may stop.
        self._masks: list[tuple[int, bool] | None] = [None] * num_slots

    @property
    def num_biases(self) -> int:
        """Of one slot at most."""
        return len(self.bias_ids.array[0])

    def sync(self, sequences: Iterable[Sequence]) -> None:
        new, masked = [], []
        for seq in sequences:
            slot, owner = seq.slot, _owner(seq)
            if self._owners[slot] != owner:
                self._owners[slot] = owner
                self._masks[slot] = None
                self._write(slot, seq)
                new.append(slot)
            may_stop = seq.num_scheduled_tokens >= seq.min_len
            mask = (seq.allowed.version, may_stop)
            if self._masks[slot] != mask:
                self._masks[slot] = mask
                self.allowed_mask.array[slot] = seq.allowed.row(may_stop)
                masked.append(slot)
        for table in (self.penalties, self.prompt_mask, self.bias_ids, self.bias_values):
            table.upload(new)
        self.allowed_mask.upload(masked)

    def widen(self, num_biases: int) -> None:
        """More columns for biases."""
        for name in ("bias_ids", "bias_values"):
            old: Mirror = getattr(self, name)
            new = self._new_mirror(self._num_slots, num_biases, dtype=old.device.dtype)
            if name == "bias_ids":
                new.array[:] = -1
            new.array[:, : old.array.shape[1]] = old.array
            new.upload((0, self._num_slots - 1))
            setattr(self, name, new)

    def _write(self, slot: int, seq: Sequence) -> None:
        """All but the mask."""
        params = seq.params
        self.penalties.array[slot] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        if params.has_penalties:
            bits = np.zeros(self.prompt_mask.array.shape[1] * 32, np.uint8)
            bits[seq.token_ids[: seq.num_prompt_tokens]] = 1
            self.prompt_mask.array[slot] = np.packbits(bits, bitorder="little").view(np.int32)
        biases = params.logit_bias or {}
        self.bias_ids.array[slot] = -1
        self.bias_ids.array[slot, : len(biases)] = list(biases)
        self.bias_values.array[slot, : len(biases)] = list(biases.values())
