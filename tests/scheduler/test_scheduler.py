"""Scheduler: one test for each rule of its docstring."""

from __future__ import annotations

import random

import pytest
from support.scheduling import EOS, World, expected_output

from tinyvllm.block_manager import BlockManager
from tinyvllm.errors import ConfigError, ContextLengthError, InvalidParameterError
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence, SequenceStatus

WAITING, PREFILL, DECODE, FINISHED = SequenceStatus


def plan(schedule):
    """A step as [(seq_id, num_tokens, samples)]."""
    return [(e.seq.seq_id, e.num_tokens, e.samples) for e in schedule.sequences]


def endless(**options):
    """A world whose model never draws a stop token."""
    return World(token=lambda token_ids: 5, **options)


# --- budget and order of a step


def test_decodes_come_first_then_chunks_fill_the_budget():
    world = endless(num_blocks=64, max_num_batched_tokens=10)
    world.add(4)
    assert plan(world.step()) == [(0, 4, True)]
    world.add(20)
    world.add(20)
    assert plan(world.step()) == [(0, 1, True), (1, 9, False)]
    schedule = world.step()
    assert plan(schedule) == [(0, 1, True), (1, 9, False)]
    assert (schedule.num_tokens, schedule.num_decodes, schedule.num_samples) == (10, 1, 1)
    assert not schedule.is_pure_decode
    assert plan(world.step()) == [(0, 1, True), (1, 2, True), (2, 7, False)]
    world.step()
    world.step()
    schedule = world.step()
    assert plan(schedule) == [(0, 1, True), (1, 1, True), (2, 1, True)]
    assert schedule.is_pure_decode


def test_a_chunk_of_one_token_is_used_too():
    world = endless(num_blocks=64, max_num_batched_tokens=4, max_num_seqs=4)
    for _ in range(3):
        world.add(1)
    world.step()
    world.add(3)
    for samples in (False, False, True):
        assert plan(world.step())[3:] == [(3, 1, samples)]


def test_running_prompts_continue_before_new_ones_are_admitted():
    world = endless(num_blocks=64, max_num_batched_tokens=8)
    for _ in range(3):
        world.add(12)
    assert plan(world.step()) == [(0, 8, False)]
    assert plan(world.step()) == [(0, 4, True), (1, 4, False)]
    assert plan(world.step()) == [(0, 1, True), (1, 7, False)]
    assert plan(world.step()) == [(0, 1, True), (1, 1, True), (2, 6, False)]


def test_short_prompts_pass_a_long_one_which_keeps_half_of_each_step():
    """Either way the wait is bounded, however many of the other kind come."""
    world = endless(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=16)
    long = world.add(100, max_tokens=1)
    num_steps = 0
    while long.status is not FINISHED:
        short = world.add(6, max_tokens=1)
        entries = world.step().sequences
        num_steps += 1
        given = {entry.seq: entry.num_tokens for entry in entries}
        assert given[long] >= 8 or long.status is FINISHED
        # The queue grows by 6 tokens a step and gets 8: a short prompt never waits.
        assert short.status is FINISHED
    assert num_steps <= -(-100 // 8)
    world.run()


def test_a_long_prompt_gets_through_a_flood_of_short_ones_in_bounded_time():
    world = endless(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=16)
    ahead = [world.add(12, max_tokens=1) for _ in range(6)]
    long = world.add(100, max_tokens=1)
    num_steps = 0
    while long.status is not FINISHED:
        for _ in range(3):  # more than a step computes
            world.add(12, max_tokens=1)
        world.step()
        num_steps += 1
    assert all(seq.status is FINISHED for seq in ahead)
    work_ahead = 6 * 12
    assert num_steps <= -(-2 * (work_ahead + 100) // 16) + 1


def test_a_long_prompt_shares_with_nobody_of_worse_priority():
    world = endless(num_blocks=64, max_num_batched_tokens=8)
    world.add(20, priority=0)
    world.add(2, priority=1)
    assert plan(world.step()) == [(0, 8, False)]


def test_a_waiter_of_better_priority_goes_before_running_prompts():
    world = endless(num_blocks=64, max_num_batched_tokens=8)
    world.add(24, priority=1)
    world.step()
    world.add(24, priority=1)
    world.add(10, priority=0)
    assert plan(world.step()) == [(2, 8, False)]
    assert plan(world.step()) == [(2, 2, True), (0, 6, False)]


def test_a_returning_earlier_arrival_does_not_stall_a_running_prompt():
    world = endless(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=8)
    world.add(4)
    world.add(4)
    world.step()
    world.scheduler.set_paused(0, True)
    world.add(20)
    assert world.step().preempted == [world.seqs[0]]
    world.scheduler.set_paused(0, False)
    world.scheduler.abort(1)
    assert plan(world.step()) == [(2, 7, False), (0, 1, True)], "4 of 5 known tokens are cached"


def test_the_queue_is_by_priority_then_arrival():
    world = endless(num_blocks=64, max_num_seqs=1)
    for priority in (1, 0, 1, -3, 0):
        world.add(2, priority=priority, max_tokens=1)
    ran = [world.step().sequences[0].seq.seq_id for _ in range(5)]
    assert ran == [3, 1, 4, 0, 2]


def test_slots_are_unique_dense_and_reused():
    world = endless(num_blocks=64, max_num_seqs=3)
    seqs = [world.add(2) for _ in range(4)]
    world.step()
    assert [s.slot for s in seqs] == [0, 1, 2, -1]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (3, 1)
    world.scheduler.abort(1)
    world.step()
    assert [s.slot for s in seqs] == [0, -1, 2, 1]


def test_budget_below_the_slots_is_refused():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(3\).*max_num_seqs \(4\)"):
        World(max_num_seqs=4, max_num_batched_tokens=3)


def test_an_idle_scheduler_schedules_nothing():
    world = World()
    schedule = world.scheduler.schedule()
    assert not schedule
    assert (schedule.num_tokens, schedule.is_pure_decode) == (0, False)
    assert schedule.preempted == []


def test_decode_entries_are_not_built_anew_each_step():
    world = endless(num_blocks=64)
    world.add(2)
    world.step()
    assert world.step().sequences[0] is world.step().sequences[0]


# --- admission and the pool


def test_admission_takes_all_blocks_and_wants_one_token_to_spare():
    world = endless(num_blocks=4, block_size=4)
    world.add(4)  # 1 block, a second with its first output
    world.step()
    world.step()
    held = world.add(8)  # 2 blocks are free and would do for the prompt, not for an output
    world.step()
    assert held.status is WAITING
    world.scheduler.abort(0)
    world.step()
    assert held.status is DECODE
    assert len(held.block_table) == 2


def test_the_head_of_the_queue_is_not_overtaken_by_what_would_fit():
    world = endless(num_blocks=4, block_size=4)
    world.add(7)
    world.step()
    big, small = world.add(12), world.add(1)
    world.step()
    assert (big.status, small.status) == (WAITING, WAITING)


def test_a_decode_takes_its_block_from_the_later_arrival():
    world = endless(num_blocks=4, block_size=4)
    first, second = world.add(7), world.add(7)
    world.step()
    world.step()  # both have 8 tokens computed: each wants a third block, none is free
    schedule = world.step()
    assert plan(schedule) == [(0, 1, True)]
    assert schedule.preempted == [second]
    assert (second.status, second.slot, second.block_table) == (WAITING, -1, [])
    assert len(second.token_ids) == 9
    assert first.num_preemptions == 0
    assert world.scheduler.num_preemptions == second.num_preemptions == 1


def test_the_worst_preempts_itself_and_waits_until_it_can_stay():
    world = endless(num_blocks=4, block_size=4, max_num_seqs=2)
    first, second = world.add(3, max_tokens=12), world.add(7, max_tokens=8)
    world.step()
    world.step()
    schedule = world.step()  # the pool: first has 2 blocks, second needs its third
    assert schedule.preempted == [second]
    steps = 0
    while first.status is not FINISHED:
        assert plan(world.step()) == [(0, 1, True)], "the second must not come and go"
        steps += 1
    assert steps > 5
    world.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert len(second.output_token_ids) == 8


def test_a_better_one_never_yields_to_a_worse_one():
    world = endless(num_blocks=4, block_size=4, max_num_seqs=2)
    worse, better = world.add(7, priority=1), world.add(7, priority=0)
    world.step()
    world.step()
    assert world.step().preempted == [worse]
    assert plan(world.step()) == [(1, 1, True)]
    assert better.num_preemptions == 0


def test_the_victim_loses_least_work():
    world = endless(num_blocks=9, block_size=4, max_num_batched_tokens=64)
    world.add(11)  # 3 blocks, a fourth in the third step
    long, short = world.add(13), world.add(6)
    world.step()
    world.step()
    assert world.step().preempted == [short]
    assert long.status is DECODE


def test_work_that_others_share_is_not_lost():
    world = endless(num_blocks=10, block_size=4, max_num_batched_tokens=64)
    stem = list(range(16))
    keeper = world.add([*stem, 50])  # blocks: 4 shared and 1
    world.step()
    sharer = world.add([*stem, 51])  # 4 shared and 1
    other = world.add(12)  # 3, and a fourth for its first output
    world.step()
    world.step()
    assert sharer.num_cached_tokens == 16
    assert sharer.num_computed_tokens > other.num_computed_tokens
    victims = []
    while not victims:
        victims = world.step().preempted
    assert victims == [sharer]
    assert (keeper.status, other.status) == (DECODE, DECODE)


def test_the_worst_priority_is_the_victim_however_much_it_loses():
    world = endless(num_blocks=9, block_size=4, max_num_batched_tokens=64)
    world.add(11)
    worst, middle = world.add(13, priority=2), world.add(6, priority=1)
    world.step()
    world.step()
    assert world.step().preempted == [worst]
    assert middle.status is DECODE


# --- displacement


def test_a_better_priority_displaces_a_runner_when_slots_are_the_limit():
    world = endless(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=2)
    first, second = world.add(1, priority=1), world.add(1, priority=1)
    world.step()
    world.step()
    vip = world.add(1, priority=0)
    schedule = world.step()  # decodes had filled the whole budget
    assert plan(schedule) == [(0, 1, True), (2, 1, True)]
    assert schedule.preempted == [second]
    assert first.status is DECODE
    assert vip.status is DECODE


def test_a_better_priority_displaces_for_blocks_as_many_as_it_takes():
    world = endless(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    cheap, middle, dear = (world.add(n, priority=1) for n in (3, 6, 9))
    world.step()
    vip = world.add(10, priority=0)  # 3 blocks; 6 are taken, 2 free
    assert world.step().preempted == [cheap]
    assert (vip.status, middle.status, dear.status) == (DECODE, DECODE, DECODE)


def test_an_earlier_arrival_alone_displaces_nobody():
    world = endless(num_blocks=64, max_num_seqs=1)
    first = world.add(2)
    world.step()
    world.scheduler.set_paused(0, True)
    second = world.add(2)
    assert world.step().preempted == [first]
    world.scheduler.set_paused(0, False)
    assert first.order < second.order
    for _ in range(5):
        assert world.step().preempted == []
    assert (first.status, second.status) == (WAITING, DECODE)


def test_nobody_is_displaced_in_vain():
    world = endless(num_blocks=8, block_size=4, max_num_seqs=3, max_num_batched_tokens=64)
    world.add(16)  # 5 blocks with its first output, of the same priority as the waiter
    small = world.add(2, priority=1)
    world.step()
    vip = world.add(16)
    for _ in range(3):
        assert world.step().preempted == []
    assert (small.status, vip.status) == (DECODE, WAITING)


def test_the_displaced_one_is_not_readmitted_in_the_same_step():
    world = endless(num_blocks=8, block_size=4, max_num_seqs=3, max_num_batched_tokens=64)
    seqs = [world.add(n, priority=1) for n in (3, 10)]
    world.step()
    world.add(20, priority=0)  # needs both to go, then leaves 2 blocks, enough for the first
    schedule = world.step()
    assert plan(schedule) == [(2, 20, True)]
    assert schedule.preempted == seqs


# --- preempted sequences


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_recomputation_emits_nothing_twice(enable_prefix_caching):
    world = World(
        num_blocks=7,
        block_size=4,
        max_num_batched_tokens=6,
        enable_prefix_caching=enable_prefix_caching,
    )
    seqs = [world.add(n, ignore_eos=True, max_tokens=14) for n in (5, 6, 7, 8)]
    world.run()
    assert sum(s.num_preemptions for s in seqs) >= 2
    for seq in seqs:
        assert seq.num_output_tokens == 14
        world.check_output(seq)
    world.check_empty()


def test_a_preempted_sequence_finds_its_own_blocks_but_that_is_no_cached_prompt():
    world = World(num_blocks=32, block_size=4, max_num_seqs=1, max_num_batched_tokens=64)
    seq = world.add(9, priority=1, ignore_eos=True, max_tokens=6)
    world.step()
    world.add(2, priority=0, max_tokens=1)
    assert world.step().preempted == [seq]
    assert plan(world.step()) == [(0, 2, True)], "8 of 10 known tokens are still in the cache"
    assert seq.num_cached_tokens == 0
    assert world.blocks.prefix_cache_hits == 0
    world.run()
    world.check_output(seq)


# --- priority changes


def test_a_waiting_sequence_moves_in_the_queue():
    world = endless(num_blocks=64, max_num_seqs=1)
    for _ in range(4):
        world.add(2, max_tokens=1)
    world.scheduler.set_priority(3, -1)
    world.scheduler.set_priority(0, 1)
    world.scheduler.set_priority(77, 1)
    ran = [world.step().sequences[0].seq.seq_id for _ in range(4)]
    assert ran == [3, 1, 2, 0]


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_running_sequence_yields_or_stays_by_its_new_priority(max_ahead):
    world = World(num_blocks=64, max_num_seqs=1, max_ahead=max_ahead)
    first, second = (world.add(5, ignore_eos=True, max_tokens=20) for _ in range(2))
    for _ in range(3):
        world.step()
    world.scheduler.set_priority(0, 1)
    while second.slot < 0:
        world.step()
    assert first.status is WAITING
    world.scheduler.set_priority(1, 1)
    world.step()
    assert second.slot == 0, "a tie is no reason to preempt"
    world.run()
    for seq in (first, second):
        assert seq.num_preemptions == (seq is first)
        world.check_output(seq)


# --- several choices


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "shared"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (21, 5)])
def test_forks_share_the_full_blocks_of_the_prompt(caching, length, shared):
    world = World(
        num_blocks=64, block_size=4, max_num_batched_tokens=64, enable_prefix_caching=caching
    )
    first = world.add(length, ignore_eos=True, max_tokens=9, num_choices=3)
    forks = first.forks
    world.step()
    assert first.forks == [] and world.scheduler.num_waiting == 2
    schedule = world.step()
    assert plan(schedule)[1:] == [(1, length - 4 * shared, True), (2, length - 4 * shared, True)]
    assert world.blocks.num_shared_blocks == shared
    for seq in forks:
        assert seq.block_table[:shared] == first.block_table[:shared]
        assert set(seq.block_table[shared:]).isdisjoint(first.block_table)
        assert seq.order == (0, 0, seq.choice)
    world.run()
    for seq in (first, *forks):
        world.check_output(seq)
    world.check_empty()


def test_forks_come_before_later_arrivals():
    world = World(num_blocks=64, max_num_seqs=1)
    first = world.add(3, ignore_eos=True, max_tokens=2, num_choices=2)
    (fork,) = first.forks
    later = world.add(3, ignore_eos=True, max_tokens=2)
    while first.status is not FINISHED:
        world.step()
    world.step()
    assert (fork.status, later.status) == (DECODE, WAITING)
    world.run()


def test_forks_of_a_prompt_that_ends_with_its_first_token_run_alone():
    world = World(num_blocks=64, block_size=4, enable_prefix_caching=False)
    first = world.add(9, max_tokens=1, num_choices=2)
    (fork,) = first.forks
    world.step()
    assert first.status is FINISHED
    assert plan(world.step()) == [(1, 9, True)]
    world.check_output(fork)
    world.check_empty()


@pytest.mark.parametrize("change", ["paused", "worse"])
def test_a_fork_takes_no_blocks_from_a_parent_that_it_may_displace(change):
    """Without a prefix cache they would be gone with it."""
    world = World(num_blocks=5, block_size=4, max_num_seqs=4, enable_prefix_caching=False)
    first = world.add(13, ignore_eos=True, num_choices=2)
    (fork,) = first.forks
    world.step()
    if change == "paused":
        world.scheduler.set_paused(0, True)
    else:
        world.scheduler.set_priority(0, 1)
    world.step()
    assert fork.slot >= 0 and first.status is WAITING
    world.scheduler.set_paused(0, False)
    world.run()
    for seq in (first, fork):
        world.check_output(seq)


def test_a_request_that_ends_early_takes_its_forks_along():
    world = World(num_blocks=64)
    first = world.add(5, num_choices=3)
    forks = first.forks
    world.end_request(first)
    assert {seq.status for seq in (first, *forks)} == {FINISHED}
    world.check_empty()
    assert not world.scheduler.has_work


# --- slow readers


def test_a_paused_sequence_keeps_its_place_and_goes_on():
    world = World(num_blocks=64)
    seq, other = (world.add(6, ignore_eos=True, max_tokens=20) for _ in range(2))
    world.step()
    world.scheduler.set_paused(0, True)
    world.scheduler.set_paused(0, True)
    table, slot = list(seq.block_table), seq.slot
    assert world.scheduler.num_paused == 1
    for _ in range(3):
        assert plan(world.step()) == [(1, 1, True)]
    assert (seq.block_table, seq.slot) == (table, slot)
    world.scheduler.set_paused(0, False)
    assert plan(world.step()) == [(0, 1, True), (1, 1, True)]
    world.run()
    for s in (seq, other):
        world.check_output(s)
    assert seq.num_preemptions == 0
    world.check_empty()


def test_when_all_are_paused_there_is_no_work():
    world = World()
    world.add(3)
    world.add(3)
    world.step()
    for seq_id in (0, 1):
        world.scheduler.set_paused(seq_id, True)
    assert not world.scheduler.has_work
    assert world.scheduler.num_unfinished == 2
    assert not world.schedule()
    world.scheduler.set_paused(1, False)
    assert world.scheduler.has_work
    assert plan(world.step()) == [(1, 1, True)]


@pytest.mark.parametrize("limit", ["slots", "blocks"])
def test_a_paused_sequence_yields_to_whoever_can_run(limit):
    options = {"max_num_seqs": 1} if limit == "slots" else {"num_blocks": 2}
    world = World(block_size=4, **options)
    stuck = world.add(5, priority=-1, ignore_eos=True, max_tokens=2)
    world.step()
    world.scheduler.set_paused(0, True)
    other = world.add(3, ignore_eos=True, max_tokens=2)
    assert world.step().preempted == [stuck]
    world.run()
    assert other.status is FINISHED
    assert stuck.status is WAITING
    assert not world.scheduler.has_work
    world.scheduler.set_paused(0, False)
    world.run()
    world.check_output(stuck)
    world.check_empty()


def test_a_decode_takes_blocks_from_a_paused_better_one_rather_than_stop():
    world = endless(num_blocks=4, block_size=4)
    stuck, runner = world.add(7), world.add(7)
    world.step()
    world.scheduler.set_paused(0, True)
    world.step()
    schedule = world.step()
    assert plan(schedule) == [(1, 1, True)]
    assert schedule.preempted == [stuck]
    assert runner.num_preemptions == 0


@pytest.mark.parametrize("priority", [-1, 0])
def test_a_paused_better_one_is_spared_while_a_worse_one_is_enough(priority):
    world = endless(num_blocks=6, block_size=4, max_num_batched_tokens=32)
    stuck, runner, worse = world.add(5, priority=priority), world.add(7), world.add(6)
    world.step()
    world.scheduler.set_paused(0, True)
    world.step()
    assert world.step().preempted == [worse]
    assert stuck.slot >= 0
    assert runner.status is DECODE


def test_pausing_in_flight_keeps_the_token():
    world = World(num_blocks=64)
    seq = world.add(6, ignore_eos=True)
    for status in (PREFILL, DECODE):
        schedule = world.schedule()
        assert seq.status is status
        drawn = world.run_model(schedule)
        world.scheduler.set_paused(0, True)
        before = seq.num_output_tokens
        assert [e.seq for e in world.update(schedule, drawn).entries] == [seq]
        assert seq.num_output_tokens == before + 1
        assert not world.schedule()
        world.scheduler.set_paused(0, False)


def test_paused_while_waiting_is_passed_over():
    world = World(max_num_seqs=1)
    seq = world.add(3, max_tokens=1)
    world.scheduler.set_paused(0, True)
    world.add(3, max_tokens=1)
    assert plan(world.step()) == [(1, 3, True)]
    assert not world.scheduler.has_work
    world.scheduler.abort(0)
    assert seq.finish_reason == "abort"
    world.check_empty()


# --- static batches


def test_static_admits_only_when_the_batch_is_done():
    world = endless(num_blocks=64, max_num_seqs=2, scheduling="static")
    world.add(3, max_tokens=2)
    world.add(3, max_tokens=4)
    late = world.add(3, max_tokens=1)
    sizes = []
    while late.status is WAITING:
        sizes.append(len(world.step().sequences))
    assert sizes == [2, 2, 1, 1, 1]
    assert late.status is FINISHED
    world.check_empty()


def test_a_static_batch_is_admitted_whole_even_beyond_one_steps_budget():
    world = endless(num_blocks=64, max_num_batched_tokens=8, scheduling="static")
    seqs = [world.add(7) for _ in range(5)]
    world.step()
    assert [s.status is WAITING for s in seqs] == [False] * 4 + [True]


def test_a_stuck_reader_does_not_hold_up_the_next_static_batch():
    world = endless(num_blocks=64, max_num_seqs=2, scheduling="static")
    world.add(3)
    world.step()
    world.scheduler.set_paused(0, True)
    world.add(3)
    assert plan(world.step()) == [(1, 3, True)]


# --- what add() refuses and cuts


def test_an_empty_prompt_is_refused():
    world = World()
    with pytest.raises(InvalidParameterError, match="0 tokens") as error:
        world.add([])
    assert error.value.param == "prompt"
    world.check_empty()


@pytest.mark.parametrize(("length", "fits"), [(1, True), (9, True), (10, False), (500, False)])
def test_a_prompt_must_leave_a_token_of_max_model_len(length, fits):
    world = World(num_blocks=64, max_model_len=10)
    if fits:
        assert world.add(length).max_tokens == 10 - length
    else:
        with pytest.raises(ContextLengthError, match=rf"{length} tokens.*max_model_len \(10\)"):
            world.add(length)
        world.check_empty()


@pytest.mark.parametrize(("length", "fits"), [(15, True), (16, False), (30, False)])
def test_a_prompt_must_leave_a_token_of_the_pool(length, fits):
    world = World(num_blocks=4, block_size=4, max_model_len=100)
    if fits:
        seq = world.add(length, ignore_eos=True)
        world.run()
        assert (seq.finish_reason, len(seq.token_ids)) == ("length", 16)
    else:
        with pytest.raises(ContextLengthError, match=rf"{length} tokens.*4 blocks of 4.*to 15"):
            world.add(length)
    world.check_empty()


def test_others_continue_when_one_is_refused():
    world = World(max_model_len=10)
    seq = world.add(3, ignore_eos=True)
    world.step()
    with pytest.raises(ContextLengthError):
        world.add(10)
    world.run()
    world.check_output(seq)


# --- how sequences end


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({"max_model_len": 30}, 30),
        ({"num_blocks": 5}, 20),
        ({"max_model_len": 30, "max_tokens": 5}, 8),
        ({"max_model_len": 30, "max_tokens": 100}, 30),
        ({"max_model_len": 30, "max_tokens": 1}, 4),
    ],
)
def test_length_ends_at_max_tokens_max_model_len_or_pool(limits, length):
    max_tokens = limits.pop("max_tokens", None)
    world = endless(**{"num_blocks": 64, "block_size": 4, "max_model_len": 100, **limits})
    seq = world.add(3, max_tokens=max_tokens)
    world.run()
    assert len(seq.token_ids) == length
    assert (seq.finish_reason, seq.stop_reason) == ("length", None)
    world.check_empty()


SCRIPTED_PROMPT = 3


def script(*token_ids):
    """A model that draws these after a prompt of SCRIPTED_PROMPT tokens."""
    return lambda known: token_ids[len(known) - SCRIPTED_PROMPT]


@pytest.mark.parametrize(
    ("sampling", "num_output_tokens", "reason", "stop_reason"),
    [
        ({}, 2, "stop", EOS),
        ({"ignore_eos": True}, 6, "length", None),
        ({"ignore_eos": True, "stop_token_ids": (8,)}, 3, "stop", 8),
        ({"stop_token_ids": (8,)}, 2, "stop", EOS),
        ({"stop_token_ids": (7,)}, 1, "stop", 7),
        ({"stop_token_ids": (7,), "min_tokens": 1}, 2, "stop", EOS),
        ({"stop_token_ids": (8,), "min_tokens": 2}, 3, "stop", 8),
        ({"stop_token_ids": (8,), "min_tokens": 3}, 5, "stop", 1),
        ({"ignore_eos": True, "stop_token_ids": (0,)}, 2, "stop", 0),
        ({"max_tokens": 2}, 2, "stop", EOS),
        ({"max_tokens": 1}, 1, "length", None),
        ({"max_tokens": 2, "min_tokens": 2}, 2, "length", None),
    ],
)
def test_stops(sampling, num_output_tokens, reason, stop_reason):
    world = World(num_blocks=64, token=script(7, EOS, 8, 9, 1, 9))
    seq = world.add(SCRIPTED_PROMPT, eos=(EOS, 1), **{"max_tokens": 6, **sampling})
    world.run()
    assert seq.num_output_tokens == num_output_tokens
    assert (seq.finish_reason, seq.stop_reason) == (reason, stop_reason)
    world.check_empty()


def test_finish_by_a_stop_string():
    world = World()
    seq = world.add(3, ignore_eos=True)
    world.step()
    world.scheduler.finish(seq, "stop", "END")
    assert (seq.status, seq.finish_reason, seq.stop_reason) == (FINISHED, "stop", "END")
    world.scheduler.finish(seq, "error")
    assert seq.finish_reason == "stop"
    world.check_empty()


@pytest.mark.parametrize("status", ["waiting", "prefill", "decode", "preempted", "paused"])
def test_abort_frees_everything_at_once_and_once(status):
    world = World(num_blocks=8, block_size=4, max_num_seqs=1, max_num_batched_tokens=4)
    seq = world.add(9, priority=1, ignore_eos=True)
    for _ in range({"waiting": 0, "prefill": 1}.get(status, 4)):
        world.step()
    if status == "preempted":
        world.add(2, max_tokens=1)
        world.step()
        assert seq.num_preemptions == 1
    if status == "paused":
        world.scheduler.set_paused(0, True)
    assert world.scheduler.abort(0) is seq
    assert (seq.status, seq.finish_reason, seq.slot) == (FINISHED, "abort", -1)
    world.check_empty()
    assert world.scheduler.abort(0) is None
    world.scheduler.set_paused(0, True)
    world.check_empty()


def test_abort_of_the_unknown_is_nothing():
    assert World().scheduler.abort(77) is None


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_the_token_of_one_aborted_in_flight_is_dropped(gone, mixed):
    world = World(num_blocks=64)
    seqs = [world.add(3, ignore_eos=True) for _ in range(3)]
    if not mixed:
        world.step()
    else:
        world.scheduler.set_paused(2, True)
        world.step()
        world.scheduler.set_paused(2, False)
    schedule = world.schedule()
    assert len(schedule.sequences) == 3
    assert schedule.is_pure_decode != mixed
    drawn = world.run_model(schedule)
    known = len(seqs[gone].token_ids)
    world.scheduler.abort(gone)
    update = world.update(schedule, drawn)
    assert [e.seq.seq_id for e in update.entries] == [i for i in range(3) if i != gone]
    assert len(seqs[gone].token_ids) == known
    for seq in seqs:
        world.check_output(seq)
    world.run()


def test_a_result_of_the_wrong_length_is_our_own_bug():
    world = World()
    world.add(3)
    with pytest.raises(AssertionError):
        world.scheduler.update(world.schedule(), [])


def test_an_id_may_not_be_used_twice_at_once():
    world = World()
    seq = world.add(3)
    with pytest.raises(AssertionError):
        world.scheduler.add(seq)


# --- prefix cache seen through the scheduler


def test_a_second_prompt_computes_only_what_differs():
    world = World(num_blocks=64, max_num_batched_tokens=64)
    stem = list(range(100, 112))
    world.add([*stem, 1], max_tokens=1)
    world.step()
    seq = world.add([*stem, 2], max_tokens=1)
    assert plan(world.step()) == [(1, 1, True)]
    assert seq.num_cached_tokens == 12
    assert (world.blocks.prefix_cache_queries, world.blocks.prefix_cache_hits) == (26, 12)
    world.check_output(seq)


def test_a_prompt_that_is_cached_to_its_end_computes_a_whole_block():
    world = World(num_blocks=64, max_num_batched_tokens=64)
    prompt = list(range(100, 112))
    for cached in (0, 8):
        seq = world.add(prompt, max_tokens=3, ignore_eos=True)
        assert plan(world.step())[0][1:] == (12 - cached, True)
        assert seq.num_cached_tokens == cached
        world.run()
        world.check_output(seq)


def test_output_is_cached_for_the_next_turn():
    world = World(num_blocks=64, max_num_batched_tokens=64)
    first = world.add(6, ignore_eos=True, max_tokens=11)  # computes 16 tokens: 4 blocks
    world.run()
    seq = world.add([*first.token_ids, 7, 7], max_tokens=1)
    world.step()
    assert seq.num_cached_tokens == 16


def test_an_aborted_prompt_leaves_only_its_computed_blocks_in_the_cache():
    world = World(num_blocks=64, max_num_batched_tokens=6)
    prompt = list(range(100, 120))
    world.add(prompt)
    world.step()
    schedule = world.schedule()
    world.scheduler.abort(0)
    world.update(schedule, [])
    seq = world.add(prompt, max_tokens=2)
    world.run()
    assert seq.num_cached_tokens == 4
    world.check_output(seq)


# --- sequences


def test_seeds_are_resolved():
    state = random.getstate()
    drawn = {Sequence(0, [1], SamplingParams()).seed for _ in range(20)}
    assert random.getstate() == state
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert Sequence(0, [1], SamplingParams(seed=5)).seed == 5
    assert Sequence(0, [1], SamplingParams(seed=5), seed=6).seed == 6


def test_a_sequence_prints_itself():
    text = repr(Sequence(3, [1, 2], SamplingParams(), priority=4))
    assert text.startswith("Sequence(3, waiting, prompt=2, output=0")


def test_a_busy_scheduler_serves_everyone_with_the_right_tokens():
    rng = random.Random(1)
    world = World(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=120)
    for _ in range(60):
        length = rng.randint(1, 60)
        world.add([rng.randint(1, 2) for _ in range(length)], priority=rng.choice((0, 0, 1)))
        for _ in range(rng.randint(0, 6)):
            world.step()
    world.run(5000)
    for seq in world.seqs:
        world.check_output(seq)
    world.check_empty()
    assert sum(s.num_preemptions for s in world.seqs) > 0
    assert world.blocks.prefix_cache_hits > 0


def test_the_scheduler_needs_no_model():
    """The public calls alone, as an engine makes them."""
    scheduler = Scheduler(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=32,
        block_manager=BlockManager(8, 16),
    )
    prompt = [1, 2, 3]
    scheduler.add(Sequence(0, prompt, SamplingParams(max_tokens=4), eos_token_ids=(EOS,)))
    tokens, _ = expected_output(prompt, SamplingParams(max_tokens=4), 32, eos=())
    got = []
    for token_id in tokens:
        if not scheduler.has_work:
            break
        got += scheduler.update(scheduler.schedule(), [token_id]).token_ids
    assert got == tokens[: len(got)]
    assert len(got) == 4 or got[-1] == EOS
