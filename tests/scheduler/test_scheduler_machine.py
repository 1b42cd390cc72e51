"""Scheduler and block manager under everything at once, driven by hypothesis.

`World` checks each step: blocks and references balance, nobody writes to a block that another may
read, what a launched step reads is right until it has ended, strict order, progress. The end of
each run checks every output and that the wait of everybody is bounded by the tokens there are.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.scheduling import EOS, World

from tinyvllm.errors import ContextLengthError
from tinyvllm.sequence import SequenceStatus

pytestmark = pytest.mark.timeout(1800)  # HYPOTHESIS_PROFILE=deep takes minutes

# Few prompts of few tokens, so that prefixes are shared, doubled and nearly the same.
PROMPTS = st.builds(
    lambda stem, length, tail: (stem * 20)[:length] + tail,
    st.sampled_from(([1], [1, 2], [1, 2, 1], [3, 4, 5, 6, 7])),
    st.integers(0, 40),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts at every moment, slow readers, priorities, forks, tiny pools."""

    num_transitions = 0

    @initialize(
        num_blocks=st.integers(4, 12) | st.integers(4, 64),
        block_size=st.sampled_from((2, 4, 4, 16)),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 40),
        max_model_len=st.sampled_from((24, 64, 200)),
        scheduling=st.sampled_from(("continuous", "continuous", "continuous", "static")),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        max_ahead=st.sampled_from((0, 1, 1, 2)),
    )
    def start(self, max_num_seqs, spare_budget, **options):
        self.world = World(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_budget,
            **options,
        )

    def _pick(self, data, unfinished=True):
        self._count()
        seqs = [
            s
            for s in self.world.seqs
            if self.world.has_arrived(s)
            and not (unfinished and s.status is SequenceStatus.FINISHED)
        ]
        return data.draw(st.sampled_from(seqs)) if seqs else None

    @rule(
        prompt=PROMPTS,
        priority=st.sampled_from((0, 0, 0, 1, -1)),
        max_tokens=st.none() | st.none() | st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.sampled_from((True, True, False)),
        stop_token_ids=st.sampled_from(((), (), (7,), (1, 2))),
        salt=st.sampled_from((b"", b"", b"", b"tenant")),
        caches=st.sampled_from((True, True, True, False)),
        num_choices=st.sampled_from((1, 1, 1, 2, 4)),
        count=st.integers(1, 4),
    )
    def arrive(self, prompt, count, max_tokens, min_tokens, **options):
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        for _ in range(count):
            self._count()
            try:
                self.world.add(prompt, max_tokens=max_tokens, min_tokens=min_tokens, **options)
            except ContextLengthError:
                assert len(prompt) >= self.world.scheduler.max_seq_len
            else:
                assert len(prompt) < self.world.scheduler.max_seq_len

    @rule(n=st.integers(1, 8))
    def steps(self, n):
        for _ in range(n):
            self._count()
            self.world.step()

    @precondition(lambda self: len(self.world.in_flight) <= self.world.max_ahead)
    @rule()
    def launch(self):
        """A step whose result comes only after whatever happens next."""
        self._count()
        schedule = self.world.schedule()
        if schedule:
            self.world.launch(schedule)

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def land(self):
        self._count()
        self.world.land()

    @rule(data=st.data())
    def abort(self, data):
        seq = self._pick(data, unfinished=False)
        if seq is not None:
            was_finished, reason = seq.status is SequenceStatus.FINISHED, seq.finish_reason
            forks = seq.forks
            result = self.world.scheduler.abort(seq.seq_id)
            assert result is (None if was_finished else seq)
            assert seq.finish_reason == (reason if was_finished else "abort")
            for fork in forks:  # they would arrive with its first token
                self.world.scheduler.finish(fork, "abort")
            if not self.world.in_flight:
                assert seq.slot == -1
                assert seq.block_table == []
            self.world.check()

    @rule(data=st.data())
    def finish_by_stop_string(self, data):
        seq = self._pick(data)
        if seq is not None and seq.num_output_tokens:
            self.world.scheduler.finish(seq, "error", "END")  # "stop" would be checked as eos
            self.world.check()

    @rule(data=st.data())
    def time_out(self, data):
        seq = self._pick(data)
        if seq is not None:
            self.world.end_request(seq)
            self.world.check()

    @rule(data=st.data(), priority=st.integers(-1, 2))
    def set_priority(self, data, priority):
        seq = self._pick(data)
        if seq is not None:
            self.world.scheduler.set_priority(seq.seq_id, priority)
            assert seq.order[:2] == (priority, seq.arrival)
            self.world.check()

    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data, paused):
        seq = self._pick(data)
        if seq is not None:
            self.world.scheduler.set_paused(seq.seq_id, paused)
            self.world.check()

    @rule(data=st.data())
    def pause_all_but_one(self, data):
        keep = self._pick(data)
        for seq in self.world.seqs:
            self.world.scheduler.set_paused(seq.seq_id, seq is not keep)
        self.world.check()

    @rule()
    def outputs_so_far(self):
        for seq in self.world.seqs:
            self.world.check_output(seq)

    @classmethod
    def _count(cls):
        cls.num_transitions += 1

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        for seq in world.seqs:
            world.scheduler.set_paused(seq.seq_id, False)
        # Everyone finishes, in steps bounded by the tokens there are: nothing ping-pongs.
        bound = sum(
            min(s.max_len, world.scheduler.max_seq_len)
            for s in world.seqs
            if s.status is not SequenceStatus.FINISHED
        )
        bound *= 1 + (world.max_ahead > 0)  # who waits for its last token is passed over
        world.run(bound + 1 + 2 * len(world.in_flight))
        for seq in world.seqs:
            assert seq.status is SequenceStatus.FINISHED
            world.check_output(seq)
        world.check_empty()


assert EOS == 0  # next_token must be able to draw it
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    stateful_step_count=50, deadline=None, max_examples=max(380, settings().max_examples)
)


def test_the_machine_made_enough_transitions(capsys):
    """Steps, arrivals, priority changes, ends: what changed the scheduler's state, in all runs."""
    made = SchedulerMachine.num_transitions
    if not made:
        pytest.skip("the machine did not run")
    with capsys.disabled():
        print(f"\nscheduler state machine: {made:,} transitions")
    assert made >= 20_000
