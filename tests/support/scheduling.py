"""A scheduler with a fake model whose KV pool tells right from wrong content.

The KV of a token is a digest of all tokens up to it, as in a real model it is a function of them.
Every step first writes, then reads each scheduled sequence's whole window through its block table
and compares: a block freed too early, written by two, or handed out for a wrong prefix shows up
as a wrong read. The next token is a function of the last digest, so a sequence's output is known
beforehand, whatever it runs beside.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any
from zlib import crc32

from tinyvllm.block_manager import BlockManager
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Schedule, ScheduledSequence, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable

EOS = 0
VOCAB = 40


def digests(token_ids: list[int], root: bytes = b"") -> list[int]:
    """The KV of each token. `root` stands for what else a prefix depends on (its salt).

    The same in every process: hash() is, of tuples of integers, but not of None or bytes.
    """
    values = []
    value = crc32(root)
    for token_id in token_ids:
        value = hash((value, token_id))
        values.append(value)
    return values


def next_token(token_ids: list[int]) -> int:
    return digests(token_ids)[-1] % VOCAB


def expected_output(
    prompt: list[int], params: SamplingParams, limit: int, eos: tuple[int, ...] = (EOS,)
) -> tuple[list[int], str]:
    """Output and finish reason of a sequence that runs alone; at most `limit` tokens in all."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    output: list[int] = []
    max_tokens = min(limit - len(prompt), params.max_tokens or limit)
    while True:
        output.append(next_token(prompt + output))
        if output[-1] in stops and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"


class World:
    """Scheduler, block manager and fake model; every step checks all books and all reads."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 256,
        scheduling: str = "continuous",
        enable_prefix_caching: bool = True,
        token: Callable[[Sequence], int] | None = None,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_manager=self.blocks,
            scheduling=scheduling,
        )
        self.kv: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.token = token or (lambda seq: next_token(seq.token_ids))
        self.seqs: list[Sequence] = []
        self._ids = count()

    def add(
        self,
        prompt: list[int] | int,
        *,
        priority: int = 0,
        eos: tuple[int, ...] = (EOS,),
        salt: bytes = b"",
        **sampling: Any,
    ) -> Sequence:
        """Adds a sequence. A prompt given as a length is made of tokens nobody else has."""
        seq_id = next(self._ids)
        if isinstance(prompt, int):
            prompt = [1000 * (seq_id + 1) + i for i in range(prompt)]
        seq = Sequence(
            seq_id,
            prompt,
            SamplingParams(**sampling),
            request_id=f"r{seq_id}",
            priority=priority,
            eos_token_ids=eos,
        )
        seq.cache_salt = salt
        self.scheduler.add(seq)
        self.seqs.append(seq)
        self.check()
        return seq

    def run_model(self, schedule: Schedule) -> list[int]:
        """Writes KV for all entries, then reads all windows; the drawn tokens."""
        size = self.blocks.block_size
        written = set()
        drawn = []
        truth = {e.seq: digests(e.seq.token_ids, e.seq.cache_salt) for e in schedule.sequences}
        for entry in schedule.sequences:
            seq = entry.seq
            start = seq.num_computed_tokens
            assert entry.num_tokens >= 1, entry
            assert entry.samples == (start + entry.num_tokens == len(seq.token_ids)), entry
            for position in range(start, start + entry.num_tokens):
                slot = (seq.block_table[position // size], position % size)
                assert slot not in written, f"two writes to {slot} in one step"
                written.add(slot)
                self.kv[slot[0]][slot[1]] = truth[seq][position]
        for entry in schedule.sequences:
            seq = entry.seq
            for position in range(seq.num_computed_tokens + entry.num_tokens):
                value = self.kv[seq.block_table[position // size]][position % size]
                assert value == truth[seq][position], f"wrong KV at {position} of {seq}"
            if entry.samples:
                drawn.append(self.token(seq))
        return drawn

    def schedule(self) -> Schedule:
        """schedule() with everything checked that can be said of any step from outside."""
        scheduler = self.scheduler
        had_work = scheduler.has_work
        waiting = [s for s in self.seqs if s.status is SequenceStatus.WAITING and not s.paused]
        paused = {s for s in self.seqs if s.paused}
        schedule = scheduler.schedule()
        self.check()
        entries = schedule.sequences
        scheduled = [e.seq for e in entries]
        assert bool(schedule) == had_work, "progress: work exists exactly when a token is scheduled"
        assert len(set(scheduled)) == len(scheduled)
        assert not paused & set(scheduled)
        assert not set(schedule.preempted) & set(scheduled)
        assert schedule.num_tokens == sum(e.num_tokens for e in entries)
        assert schedule.num_tokens <= scheduler.max_num_batched_tokens
        assert schedule.num_samples == sum(e.samples for e in entries)
        is_decode = [s.status is SequenceStatus.DECODE for s in scheduled]
        assert is_decode == sorted(is_decode, reverse=True), "decodes come first"
        assert schedule.num_decodes == sum(is_decode)
        assert schedule.is_pure_decode == (bool(is_decode) and all(is_decode))
        decodes = {s for s in self.seqs if s.status is SequenceStatus.DECODE and not s.paused}
        assert decodes == set(scheduled[: schedule.num_decodes]), "every decode runs"

        # Strict order: whoever lost its place while runnable lost it to a better one ...
        evicted = [s for s in schedule.preempted if not s.paused]
        admitted = [s for s in waiting if s.slot >= 0]
        for seq in evicted:
            assert any(s.order < seq.order for s in scheduled), seq
            assert all(s.order < seq.order for s in admitted), seq
        # ... and the queue is first in, first out.
        left = [s for s in waiting if s.slot < 0]
        if admitted and left:
            assert max(s.order for s in admitted) < min(s.order for s in left)
        # A waiter of better priority than a runner is only kept out by better ones.
        if left and not evicted and not scheduler.is_static:
            head = min(left, key=lambda s: s.order)
            worse = [s for s in scheduled if s.priority > head.priority]
            if worse and schedule.num_tokens < scheduler.max_num_batched_tokens:
                yielding = [
                    s for s in self.seqs if s.slot >= 0 and (s.paused or s.priority > head.priority)
                ]
                assert not self.blocks.can_allocate(
                    self.blocks.num_blocks_for(len(head.token_ids) + 1),
                    self.blocks.match_prefix(head),
                    [s.block_table for s in yielding],
                ), head
        return schedule

    def update(self, schedule: Schedule, drawn: list[int]) -> list[ScheduledSequence]:
        updated = self.scheduler.update(schedule, drawn)
        self.check()
        return updated

    def step(self) -> Schedule:
        schedule = self.schedule()
        want = [
            (e.seq, len(e.seq.token_ids) + 1, e.seq.num_computed_tokens + e.num_tokens)
            for e in schedule.sequences
            if e.samples
        ]
        updated = self.update(schedule, self.run_model(schedule))
        assert [e.seq for e in updated] == [seq for seq, _, _ in want]
        for seq, length, computed in want:
            assert len(seq.token_ids) == length, seq
            assert seq.status is SequenceStatus.FINISHED or seq.num_computed_tokens == computed, seq
        return schedule

    def run(self, max_steps: int = 1000) -> int:
        """Steps until nothing can run; the number of steps."""
        for n in range(max_steps):
            if not self.scheduler.has_work:
                return n
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_output(self, seq: Sequence) -> None:
        """A finished sequence has exactly the output of a run alone."""
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        output, reason = expected_output(
            prompt, seq.params, self.scheduler.max_seq_len, seq.eos_token_ids
        )
        if seq.finish_reason in ("stop", "length"):
            assert (seq.output_token_ids, seq.finish_reason) == (output, reason), seq
        else:
            assert seq.output_token_ids == output[: seq.num_output_tokens], seq

    def check_empty(self) -> None:
        """Nothing is left of anybody."""
        assert self.scheduler.num_unfinished == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.num_paused == 0
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        self.check()
