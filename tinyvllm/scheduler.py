"""Scheduler: which tokens the next step computes.

One step has one token budget. Sequences that decode come first, one token each; what is left goes
to prompt chunks, so a long prompt never stalls running streams.

Order is strict: `seq.order` is (priority, arrival), lower first.
  * Prompts: running ones continue before new ones are admitted, unless the new one's priority is
    strictly better. The head of the queue is never overtaken, so every wait is bounded by the work
    ahead of it.
  * A prompt that one step cannot end gives half of the step to later ones of its priority that are
    shorter than what is left of it. So short prompts pass a long one without waiting for its end,
    and whatever comes after it, it is computed in at most twice the steps that it takes alone:
    a prompt of T tokens with W tokens of prompts ahead (of its priority or better) is computed
    2 * (W + T) / budget steps after those have slots, where budget is what decodes leave of a step.
  * Admission takes a slot and the blocks of all known tokens at once (with one token to spare), so
    a prompt never runs out of blocks half-way and a preempted sequence returns only when it can
    stay.
  * A decode that needs a block when there is none preempts a sequence of worse order, else a
    paused one, else itself. A waiting sequence preempts for a slot or blocks only where priority
    is strictly worse, or paused. Nobody is preempted by somebody of worse order while runnable:
    nothing can ping-pong, and the best runnable sequence always moves.
  * Among the allowed victims: the worst priority first, in it the one that loses least work.

A preempted sequence keeps its tokens and later computes them again as one prompt.

Steps may run ahead: `schedule()` may be called again before the last step's `update()`.

    schedule(N) ─► launched ─► schedule(N+1) ─► launched ─► update(N) ─► schedule(N+2) ...

  * `num_scheduled_tokens` says what all launched steps will have computed; everything else about a
    sequence changes only in `update`.
  * A token that step N draws is N+1's input on the device; the host need not know it. What must
    know it waits: the first decode after a prompt, a sequence whose last token is on its way, a
    preemption. Nobody is preempted while a step is in flight: `schedule()` is empty then, which
    asks for the `update()` of what has been launched. What may be drawn next is no matter of the
    schedule: the draw waits for it where it must, not the step (model_runner.py).
  * Fence: slot and blocks of a sequence that ends while a step in flight contains it are free when
    the last such step has been updated, not before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from operator import attrgetter
from typing import TYPE_CHECKING

from tinyvllm.errors import ConfigError, ContextLengthError, InvalidParameterError
from tinyvllm.sequence import FinishReason, Schedule, ScheduledSequence, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinyvllm.block_manager import BlockManager

# Module names: an attribute of an Enum class costs ten times as much to read.
_WAITING = SequenceStatus.WAITING
_PREFILL = SequenceStatus.PREFILL
_DECODE = SequenceStatus.DECODE
_FINISHED = SequenceStatus.FINISHED

_order = attrgetter("order")
_entry_order = attrgetter("seq.order")


def _order_of(seq: Sequence) -> tuple[int, ...]:
    return (seq.priority, seq.arrival, *((seq.choice,) if seq.choice else ()))


@dataclass(slots=True, eq=False)
class Update:
    """What a step's result changed. Nothing in it changes later."""

    entries: list[ScheduledSequence]
    """Those that got a token."""
    token_ids: list[int]
    """Their tokens."""
    finished: dict[int, FinishReason]
    """seq_id -> why, of those that the token ended."""


class Scheduler:
    """Decides what each step runs. Engine thread only, except `check_prompt_len`.

    A step is `schedule()`, then the model, then `update()`; every schedule is updated, in order.
    `add`, `abort`, `finish`, `set_paused` and `set_priority` may come at any time.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_manager: BlockManager,
        scheduling: str = "continuous",
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({max_num_seqs}): every running sequence decodes each step",
                param="max_num_batched_tokens",
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.block_manager = block_manager
        self.is_static = scheduling == "static"
        self.max_seq_len = min(max_model_len, block_manager.num_blocks * block_manager.block_size)
        """Prompt plus output tokens of one sequence at most: by the model or by the pool."""
        self.num_preemptions = 0
        self.num_paused = 0
        self._num_arrivals = 0
        self._num_in_flight = 0  # scheduled steps without their update
        self._must_drain = False  # somebody has to be preempted, which steps in flight forbid
        self._fenced: dict[int, Sequence] = {}  # ended, but in a step in flight
        self._sequences: dict[int, Sequence] = {}  # every unfinished one, by seq_id
        self._running: dict[int, Sequence] = {}  # those with a slot and blocks, paused or not
        self._free_slots = list(range(max_num_seqs))  # a heap: low slots first keeps them dense
        # Sorted by order, best first, and without the paused: the candidates of a step.
        self._waiting: list[Sequence] = []
        self._prefills: list[Sequence] = []
        self._decodes: list[ScheduledSequence] = []

    @property
    def has_work(self) -> bool:
        """Something can run: then `schedule()` is not empty, unless steps are in flight. False
        when all are paused."""
        return len(self._sequences) > self.num_paused

    @property
    def num_unfinished(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def num_running(self) -> int:
        """Sequences with a slot: paused ones included, and ended ones behind the fence."""
        return len(self._running) + len(self._fenced)

    def check_prompt_len(self, num_prompt_tokens: int) -> None:
        """Raises unless a prompt of this length can run. Reads constants only: any thread.

        `InvalidParameterError` for an empty prompt; `ContextLengthError` for one that leaves no
        room for an output token in `max_model_len` or in the whole pool.
        """
        if num_prompt_tokens < 1:
            raise InvalidParameterError("prompt has 0 tokens; give at least one", param="prompt")
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"prompt has {num_prompt_tokens} tokens, which leaves no room for output within "
                f"max_model_len ({self.max_model_len}); shorten it to {self.max_seq_len - 1}",
                param="prompt",
            )
        if num_prompt_tokens >= self.max_seq_len:
            manager = self.block_manager
            raise ContextLengthError(
                f"prompt has {num_prompt_tokens} tokens, but the KV pool holds {self.max_seq_len} "
                f"({manager.num_blocks} blocks of {manager.block_size}) with the output; shorten "
                f"it to {self.max_seq_len - 1} or raise num_blocks",
                param="prompt",
            )

    def add(self, seq: Sequence) -> None:
        """Queues `seq`; cuts its `max_tokens` to what fits. Raises as `check_prompt_len`.

        Its forks are queued right behind it once its prompt is computed, whose blocks they share.
        """
        self.check_prompt_len(seq.num_prompt_tokens)
        seq.arrival = self._num_arrivals
        self._num_arrivals += 1
        for fork in seq.forks:
            fork.arrival = seq.arrival
        self._enter(seq)

    def _enter(self, seq: Sequence) -> None:
        assert seq.seq_id not in self._sequences, seq
        seq.max_len = min(seq.max_len, self.max_seq_len)
        seq.max_tokens = seq.max_len - seq.num_prompt_tokens
        seq.order = _order_of(seq)
        self._sequences[seq.seq_id] = seq
        self.num_paused += seq.paused
        self._list(seq)

    def abort(self, seq_id: int, reason: FinishReason = "abort") -> Sequence | None:
        """Ends the sequence at once; None when it is unknown or has finished. Idempotent."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self.finish(seq, reason)
        return seq

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends `seq` and frees its slot and blocks; nothing when it has finished before."""
        if seq.status is _FINISHED:
            return
        if seq.seq_id in self._sequences:  # else a fork that has not arrived yet
            self._unlist(seq)
            self._release(seq)
            del self._sequences[seq.seq_id]
            if seq.paused:
                self.num_paused -= 1
        seq.status = _FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        seq.parent, seq.forks = None, []

    def set_paused(self, seq_id: int, paused: bool) -> None:
        """Stops or resumes the scheduling of a sequence; nothing when it has finished.

        A paused one keeps slot and blocks until somebody needs them.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq.paused == paused:
            return
        for fork in seq.forks:  # which have not arrived yet
            fork.paused = paused
        if paused:
            self._unlist(seq)
            seq.paused = True
            self.num_paused += 1
        else:
            seq.paused = False
            self.num_paused -= 1
            self._list(seq)

    def set_priority(self, seq_id: int, priority: int) -> None:
        """Changes the place of a sequence, waiting or running; nothing when it has finished."""
        seq = self._sequences.get(seq_id)
        if seq is None or seq.priority == priority:
            return
        self._unlist(seq)
        seq.priority = priority
        seq.order = _order_of(seq)
        self._list(seq)
        for fork in seq.forks:
            fork.priority = priority

    def schedule(self) -> Schedule:
        """The next step. Allocates its blocks. Empty when steps in flight have to end first."""
        preempted: list[Sequence] = []
        decodes = self._schedule_decodes(preempted)
        chunks: list[ScheduledSequence] = []
        if (self._prefills or self._waiting) and not self._must_drain:
            chunks = self._schedule_chunks(preempted)
        if preempted:
            decodes = self._decodes.copy()
        if self._must_drain:
            self._must_drain = False
            return Schedule([], 0, 0, 0, False, [])
        n = len(decodes)
        for entry in decodes:
            entry.seq.num_scheduled_tokens += 1
        if not chunks:
            if n:
                self._num_in_flight += 1
            return Schedule(decodes, n, n, n, n > 0, preempted)
        num_tokens = num_samples = n
        for entry in chunks:
            entry.seq.num_scheduled_tokens += entry.num_tokens
            num_tokens += entry.num_tokens
            num_samples += entry.samples
        self._num_in_flight += 1
        return Schedule(decodes + chunks, num_tokens, n, num_samples, False, preempted)

    def update(self, schedule: Schedule, token_ids: list[int]) -> Update:
        """Takes the result of the oldest step in flight.

        `token_ids` are the drawn tokens of the entries with `samples`, in order. Tokens of
        sequences that ended since `schedule()` are dropped. Changes neither argument.
        """
        assert len(token_ids) == schedule.num_samples, (len(token_ids), schedule.num_samples)
        assert self._num_in_flight > 0
        self._num_in_flight -= 1
        entries = schedule.sequences
        finished: dict[int, FinishReason] = {}
        if schedule.is_pure_decode:
            return self._advance_decodes(entries, token_ids, finished)
        num_decodes = schedule.num_decodes
        result = self._advance_decodes(entries[:num_decodes], token_ids[:num_decodes], finished)
        drawn = iter(token_ids[num_decodes:])
        for entry in entries[num_decodes:]:
            token_id = next(drawn) if entry.samples else None
            seq = entry.seq
            num_computed_before = seq.num_computed_tokens
            seq.num_computed_tokens += entry.num_tokens
            if seq.status is not _PREFILL:
                self._pass_fence(seq)
                continue
            self.block_manager.commit(seq, num_computed_before)
            if token_id is not None:
                self._unlist(seq)
                seq.status = _DECODE
                self._list(seq)
                if seq.forks:
                    self._enter_forks(seq)
                seq.token_ids.append(token_id)
                self._check_stop(seq, token_id, finished)
                result.entries.append(entry)
                result.token_ids.append(token_id)
        return result

    def abort_all(self) -> None:
        """Ends every sequence."""
        for seq in list(self._sequences.values()):
            self.finish(seq, "abort")

    def snapshot(self, max_waiting: int) -> list[Sequence]:
        """The running sequences by slot, then the first `max_waiting` waiting ones by order, at
        some moment; any thread."""
        running = sorted(self._running.values(), key=attrgetter("slot"))
        waiting = [seq for seq in list(self._sequences.values()) if seq.slot < 0]
        return running + nsmallest(max_waiting, waiting, key=_order)

    def check_integrity(self) -> None:
        """Raises AssertionError when any book does not balance. For tests."""
        sequences = self._sequences.values()
        fenced = self._fenced.values()
        self.block_manager.check_integrity([*sequences, *fenced])
        slots = [seq.slot for seq in (*self._running.values(), *fenced)]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), slots
        assert self.num_paused == sum(seq.paused for seq in sequences)
        listed: list[Iterable[Sequence]] = [
            self._waiting,
            self._prefills,
            [entry.seq for entry in self._decodes],
        ]
        for status, members in zip((_WAITING, _PREFILL, _DECODE), listed, strict=True):
            want = [seq for seq in sequences if seq.status is status and not seq.paused]
            assert list(members) == sorted(want, key=_order), (status, members)
        for seq in sequences:
            assert (seq.slot >= 0) == (seq.seq_id in self._running), seq
            assert (seq.slot >= 0) == (seq.status is not _WAITING) == bool(seq.block_table), seq
            assert seq.finish_reason is None, seq
            assert len(seq.token_ids) < seq.max_len <= self.max_seq_len, seq
            assert seq.num_computed_tokens < len(seq.token_ids), seq
            assert seq.num_computed_tokens <= seq.num_scheduled_tokens < seq.max_len, seq
        for seq in (*sequences, *fenced):
            in_flight = seq.num_scheduled_tokens != seq.num_computed_tokens
            assert not in_flight or self._num_in_flight, seq
            assert in_flight or seq.seq_id not in self._fenced, seq

    def _schedule_decodes(self, preempted: list[Sequence]) -> list[ScheduledSequence]:
        """Every decode that can run, each with a block for its token. The hot loop."""
        is_behind = self._num_in_flight > 0
        held_back = False
        for entry in self._decodes.copy():
            seq = entry.seq
            num_scheduled = seq.num_scheduled_tokens
            if is_behind and num_scheduled + 1 >= seq.max_len:
                held_back = True  # its last token is on its way
            elif num_scheduled == seq.capacity:
                # A sequence preempted by an earlier one in this loop has both at zero.
                if seq.status is _DECODE and not self.block_manager.append(seq):
                    if is_behind:
                        self._must_drain = True
                        break
                    self._append_by_force(seq, preempted)
        if not held_back:
            return self._decodes.copy()
        return [
            entry
            for entry in self._decodes
            if entry.seq.num_scheduled_tokens + 1 < entry.seq.max_len
        ]

    def _enter_forks(self, seq: Sequence) -> None:
        forks, seq.forks = seq.forks, []
        for fork in forks:
            if fork.status is not _FINISHED:
                self._enter(fork)

    def _schedule_chunks(self, preempted: list[Sequence]) -> list[ScheduledSequence]:
        """Prompt chunks for what the decodes leave of the budget, admitting as it goes."""
        if self.is_static and not self._prefills and not self._decodes:
            # A batch is admitted whole, and only when nothing of the last one can run.
            while self._waiting and self._admit(self._waiting[0], preempted):
                pass
        admitting = not self.is_static
        chunks: list[tuple[Sequence, int]] = []
        num_tokens = 0
        # The first prompt that this step cannot end. It has its half at once, and in the end what
        # shorter ones leave of the other.
        long: Sequence | None = None
        long_idx = long_remaining = 0
        prefills = self._prefills.copy()
        i = 0
        while True:
            # Not a running difference: displacing a decode gives its token back. Decodes that fill
            # the budget fill all slots, and then a head is admitted only by displacing one.
            budget = self.max_num_batched_tokens - len(self._decodes) - num_tokens
            if budget <= 0 and (chunks or long is not None):
                break
            while i < len(prefills) and prefills[i].status is not _PREFILL:
                i += 1  # preempted in this loop
            running = prefills[i] if i < len(prefills) else None
            head = self._waiting[0] if admitting and self._waiting else None
            if head is not None and (running is None or head.priority < running.priority):
                if long is not None and (
                    head.priority != long.priority or len(head.token_ids) >= long_remaining
                ):
                    admitting = False
                    continue
                if head in preempted or not self._admit(head, preempted):
                    admitting = False
                    continue
                seq = head
                budget = self.max_num_batched_tokens - len(self._decodes) - num_tokens
            elif running is not None:
                seq = running
                i += 1
            else:
                break
            remaining = len(seq.token_ids) - seq.num_scheduled_tokens
            if remaining == 0:  # all of it is in flight
                continue
            if long is not None:
                if seq.priority != long.priority:
                    break
                if remaining >= long_remaining:
                    continue
            elif remaining > budget:
                long, long_idx, long_remaining = seq, len(chunks), remaining
                num_tokens += -(-budget // 2)
                continue
            n = min(remaining, budget)
            num_tokens += n
            chunks.append((seq, n))
        if long is not None and long.status is _PREFILL:
            shared = sum(n for _, n in chunks)
            rest = self.max_num_batched_tokens - len(self._decodes) - shared
            chunks.insert(long_idx, (long, min(long_remaining, rest)))
        return [
            ScheduledSequence(seq, n, n == len(seq.token_ids) - seq.num_scheduled_tokens)
            for seq, n in chunks
        ]

    def _admit(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Gives the waiting `seq` a slot and blocks, displacing others where it may."""
        manager = self.block_manager
        needs_slot = not self._free_slots
        if needs_slot and not self._displaceable(seq):  # cheap: a full house asks every step
            return False
        hits = manager.match_prefix(seq)
        # One token more than known: else it might be preempted again for its first output.
        num_blocks = manager.num_blocks_for(len(seq.token_ids) + 1)
        if needs_slot or not manager.can_allocate(num_blocks, hits):
            victims = self._displaceable(seq)
            if not self._displace(victims, seq, num_blocks, hits, preempted):
                return False
        self._unlist(seq)
        manager.allocate(seq, hits)
        seq.slot = heappop(self._free_slots)
        seq.status = _PREFILL
        self._running[seq.seq_id] = seq
        self._list(seq)
        return True

    def _displaceable(self, seq: Sequence) -> list[Sequence]:
        """Whom the waiting `seq` may displace."""
        priority = seq.priority
        return [s for s in self._running.values() if s.priority > priority or s.paused]

    def _append_by_force(self, seq: Sequence, preempted: list[Sequence]) -> None:
        """A block for a decode when none is free: somebody's, or `seq` goes itself."""
        victims = [s for s in self._running.values() if s.order > seq.order or s.paused]
        if self._displace(victims, seq, 1, [], preempted):
            appended = self.block_manager.append(seq)
            assert appended, seq
        else:
            self._preempt(seq)
            preempted.append(seq)

    def _displace(
        self,
        victims: list[Sequence],
        seq: Sequence,
        num_blocks: int,
        hits: list[int],
        preempted: list[Sequence],
    ) -> bool:
        """Preempts of `victims`, at least one (a slot comes with it), until `seq` can have
        `num_blocks`: all or nothing."""
        manager = self.block_manager
        released = [victim.block_table for victim in victims]
        if not victims or not manager.can_allocate(num_blocks, hits, released):
            return False
        if self._num_in_flight:
            self._must_drain = True
            return False

        def cost(victim: Sequence) -> tuple[bool, int, int, int]:
            num_shared = len(victim.block_table) - manager.num_exclusive_blocks(victim)
            lost = max(0, victim.num_computed_tokens - num_shared * manager.block_size)
            better = victim.order < seq.order  # paused: only when no worse one is enough
            return better, -victim.priority, lost, -victim.arrival

        for victim in sorted(victims, key=cost):
            self._preempt(victim)
            preempted.append(victim)
            if manager.can_allocate(num_blocks, hits):
                break
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._unlist(seq)
        self._release(seq)
        seq.status = _WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._list(seq)

    def _release(self, seq: Sequence) -> None:
        """Takes slot and blocks away, now or behind the fence."""
        if seq.slot < 0:
            return
        del self._running[seq.seq_id]
        self._fenced[seq.seq_id] = seq
        self._pass_fence(seq)

    def _pass_fence(self, seq: Sequence) -> None:
        """Frees what an ended sequence holds, once no step in flight contains it."""
        if seq.num_computed_tokens != seq.num_scheduled_tokens:
            return
        del self._fenced[seq.seq_id]
        heappush(self._free_slots, seq.slot)
        seq.slot = -1
        self.block_manager.free(seq)

    def _list(self, seq: Sequence) -> None:
        """Enters `seq` among the candidates of its status, unless it is paused."""
        if seq.paused:
            return
        if seq.status is _DECODE:
            insort(self._decodes, ScheduledSequence(seq, 1, True), key=_entry_order)
        else:
            insort(self._prefills if seq.status is _PREFILL else self._waiting, seq, key=_order)

    def _unlist(self, seq: Sequence) -> None:
        """Undoes `_list`; to be called before status or `paused` change."""
        if seq.paused:
            return
        if seq.status is _DECODE:
            del self._decodes[bisect_left(self._decodes, seq.order, key=_entry_order)]
        else:
            members = self._prefills if seq.status is _PREFILL else self._waiting
            del members[bisect_left(members, seq.order, key=_order)]

    def _advance_decodes(
        self,
        entries: list[ScheduledSequence],
        token_ids: list[int],
        finished: dict[int, FinishReason],
    ) -> Update:
        """Appends one token each. The hot loop: well under a microsecond a sequence."""
        dropped: list[ScheduledSequence] = []
        block_size = self.block_manager.block_size
        for entry, token_id in zip(entries, token_ids, strict=True):
            seq = entry.seq
            seq.num_computed_tokens = num_computed = seq.num_computed_tokens + 1
            if seq.status is not _DECODE:
                dropped.append(entry)
                self._pass_fence(seq)
                continue
            known = seq.token_ids
            known.append(token_id)
            if num_computed % block_size == 0:
                self.block_manager.commit(seq, num_computed - 1)
            if token_id in seq.stop_ids or len(known) >= seq.max_len:
                self._check_stop(seq, token_id, finished)
        if not dropped:
            return Update(entries, token_ids, finished)
        kept = [pair for pair in zip(entries, token_ids, strict=True) if pair[0] not in dropped]
        return Update([entry for entry, _ in kept], [token for _, token in kept], finished)

    def _check_stop(self, seq: Sequence, token_id: int, finished: dict[int, FinishReason]) -> None:
        """Finishes `seq` when its newest token `token_id` ends it."""
        length = len(seq.token_ids)
        if token_id in seq.stop_ids and length > seq.min_len:
            self.finish(seq, "stop", token_id)
            finished[seq.seq_id] = "stop"
        elif length >= seq.max_len:
            self.finish(seq, "length")
            finished[seq.seq_id] = "length"
