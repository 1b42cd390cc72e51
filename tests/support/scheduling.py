"""A scheduler with a fake model whose KV pool tells right from wrong content.

The KV of a token is a digest of all tokens up to it, as in a real model it is a function of them.
Every step first writes, then reads each scheduled sequence's whole window through its block table
and compares: a block freed too early, written by two, or handed out for a wrong prefix shows up
as a wrong read. With `max_ahead` steps run ahead of the host as on a GPU: the model knows the drawn
tokens at once, the scheduler a step later; what a step in flight may touch nobody may get. The next
token is a function of the last digest, so a sequence's output is known beforehand, whatever it runs
beside.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any
from zlib import crc32

from tinyvllm.block_manager import BlockManager
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.scheduler import Scheduler, Update
from tinyvllm.sequence import Schedule, Sequence, SequenceStatus

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
        token: Callable[[list[int]], int] = next_token,
        max_ahead: int = 0,
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
        self.token = token
        self.max_ahead = max_ahead
        self.in_flight: deque[tuple[Schedule, list[int], dict[int, Sequence]]] = deque()
        self.unseen: dict[Sequence, list[int]] = {}  # drawn tokens that the host has not got
        self.seqs: list[Sequence] = []
        self._ids = count()

    def add(
        self,
        prompt: list[int] | int,
        *,
        priority: int = 0,
        eos: tuple[int, ...] = (EOS,),
        salt: bytes = b"",
        caches: bool = True,
        num_choices: int = 1,
        **sampling: Any,
    ) -> Sequence:
        """Adds a sequence. A prompt given as a length is made of tokens nobody else has.

        Choices beyond the first are forks of it; they draw the same tokens here.
        """
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
        seq.reads_prefix_cache = seq.writes_prefix_cache = caches
        forks = [seq.fork(next(self._ids), choice, choice) for choice in range(1, num_choices)]
        self.scheduler.add(seq)
        self.seqs += [seq, *forks]
        self.check()
        return seq

    def has_arrived(self, seq: Sequence) -> bool:
        """False for a fork whose prompt is not computed yet."""
        return seq.seq_id in self.scheduler._sequences or seq.status is SequenceStatus.FINISHED

    def end_request(self, seq: Sequence) -> None:
        """All choices, as an engine does when its reader leaves or its time is over."""
        first = seq.parent or seq
        for each in self.seqs:
            if each is first or each.parent is first:
                self.scheduler.finish(each, "abort")

    def run_model(self, schedule: Schedule) -> list[int]:
        """Writes KV for all entries, then reads all windows; the drawn tokens."""
        size = self.blocks.block_size
        written: set[tuple[int, int]] = set()
        drawn: list[int] = []
        known = {e.seq: e.seq.token_ids + self.unseen.get(e.seq, []) for e in schedule.sequences}
        truth = {seq: digests(ids, seq.cache_salt) for seq, ids in known.items()}
        ends = {e.seq: e.seq.num_scheduled_tokens for e in schedule.sequences}
        for entry in schedule.sequences:
            seq = entry.seq
            start = ends[seq] - entry.num_tokens
            assert entry.num_tokens >= 1, entry
            assert start >= seq.num_computed_tokens, entry
            assert entry.samples == (ends[seq] == len(known[seq])), entry
            for position in range(start, ends[seq]):
                slot = (seq.block_table[position // size], position % size)
                assert slot not in written, f"two writes to {slot} in one step"
                written.add(slot)
                self.kv[slot[0]][slot[1]] = truth[seq][position]
        for entry in schedule.sequences:
            seq = entry.seq
            for position in range(ends[seq]):
                value = self.kv[seq.block_table[position // size]][position % size]
                assert value == truth[seq][position], f"wrong KV at {position} of {seq}"
            if entry.samples:
                drawn.append(self.token(known[seq]))
                self.unseen.setdefault(seq, []).append(drawn[-1])
        return drawn

    def launch(self, schedule: Schedule) -> None:
        """Runs the model as a device would: at once, while the host knows the result later."""
        drawn = self.run_model(schedule)
        size = self.blocks.block_size
        touched: dict[int, Sequence] = {}
        for seq in (entry.seq for entry in schedule.sequences):
            last = -(-seq.num_scheduled_tokens // size)
            # Full blocks that others share are read only; from the first not full one on, ours.
            for block_id in seq.block_table[seq.num_computed_tokens // size : last]:
                touched[block_id] = seq
        for _, _, earlier in self.in_flight:
            for block_id, seq in touched.items():
                owner = earlier.get(block_id, seq)
                assert owner is seq, f"fence: {seq} got block {block_id} of a step in flight"
        self.in_flight.append((schedule, drawn, touched))

    def schedule(self) -> Schedule:
        """schedule() with everything checked that can be said of any step from outside."""
        scheduler = self.scheduler
        had_work = scheduler.has_work
        waiting = [
            s
            for s in self.seqs
            if s.status is SequenceStatus.WAITING and not s.paused and self.has_arrived(s)
        ]
        paused = {s for s in self.seqs if s.paused}
        schedule = scheduler.schedule()
        self.check()
        entries = schedule.sequences
        scheduled = [e.seq for e in entries]
        if not self.in_flight:
            assert bool(schedule) == had_work, (
                "progress: work exists exactly when a token is scheduled"
            )
        elif not schedule:
            return schedule
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
        whose_last_is_on_its_way = {
            s for s in decodes if self.unseen.get(s) and s.num_scheduled_tokens + 1 >= s.max_len
        }
        running = set(scheduled[: schedule.num_decodes])
        assert running <= decodes <= running | whose_last_is_on_its_way, "every decode runs"
        assert not schedule.preempted or not self.in_flight, "preempted under a step in flight"

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
                running = [s for s in self.seqs if s.slot >= 0]
                yielding = [
                    s
                    for s in running
                    # One that has ended is behind its fence: nobody can take from it.
                    if s.status is not SequenceStatus.FINISHED
                    and (s.paused or s.priority > head.priority)
                ]
                assert not self.blocks.can_allocate(
                    self.blocks.num_blocks_for(len(head.token_ids) + 1),
                    self.blocks.match_prefix(head),
                    [s.block_table for s in yielding],
                ), head
        return schedule

    def update(self, schedule: Schedule, drawn: list[int]) -> Update:
        """update() of the oldest launched step, checked."""
        want = [
            (e.seq, len(e.seq.token_ids) + 1, e.seq.num_computed_tokens + e.num_tokens, token_id)
            for e, token_id in zip([e for e in schedule.sequences if e.samples], drawn, strict=True)
            if e.seq.status is not SequenceStatus.FINISHED
        ]
        for entry in schedule.sequences:
            if entry.samples and self.unseen.get(entry.seq):
                self.unseen[entry.seq].pop(0)
                if entry.seq.status is SequenceStatus.FINISHED:
                    self.unseen[entry.seq].clear()
        update = self.scheduler.update(schedule, drawn)
        self.check()
        assert [e.seq for e in update.entries] == [seq for seq, *_ in want]
        assert update.token_ids == [token_id for *_, token_id in want]
        for seq, length, computed, token_id in want:
            assert len(seq.token_ids) == length and seq.token_ids[-1] == token_id, seq
            finished = seq.status is SequenceStatus.FINISHED
            assert finished == (seq.seq_id in update.finished), seq
            if finished:
                assert update.finished[seq.seq_id] == seq.finish_reason
                self.unseen.pop(seq, None)
            else:
                assert seq.num_computed_tokens == computed, seq
        return update

    def step(self) -> Schedule:
        """Launch a step, or as many steps late as `max_ahead` says, take a result."""
        schedule = self.schedule()
        if schedule:
            self.launch(schedule)
        if self.in_flight and (len(self.in_flight) > self.max_ahead or not schedule):
            self.land()
        return schedule

    def land(self) -> Update:
        """The host gets the result of the oldest step in flight."""
        schedule, drawn, _ = self.in_flight.popleft()
        return self.update(schedule, drawn)

    def run(self, max_steps: int = 1000) -> int:
        """Steps until nothing can run; the number of steps."""
        for n in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
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
