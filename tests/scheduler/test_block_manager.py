"""BlockManager alone: books, prefix cache, eviction."""

from __future__ import annotations

import pytest

from tinyvllm.block_manager import BlockManager
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.sequence import Sequence

SIZE = 4


def make(token_ids, salt=b""):
    seq = Sequence(0, token_ids, SamplingParams())
    seq.cache_salt = salt
    return seq


def take(manager, seq, compute=True):
    """Allocates for all tokens of `seq`, using the cache; computes them all but the last."""
    manager.allocate(seq, manager.match_prefix(seq))
    if compute:
        before = seq.num_computed_tokens
        seq.num_computed_tokens = len(seq.token_ids) - 1
        manager.commit(seq, before)
    return seq


def hits(manager, token_ids, salt=b""):
    return len(manager.match_prefix(make(token_ids, salt)))


def test_allocate_append_free_conserve_blocks():
    manager = BlockManager(4, SIZE)
    seq = take(manager, make(range(9)))
    assert len(seq.block_table) == 3
    assert seq.capacity == 12
    assert manager.num_free_blocks == 1
    assert manager.append(seq)
    assert seq.capacity == 16
    assert not manager.append(seq)
    assert len(seq.block_table) == 4
    manager.check_integrity([seq])
    manager.free(seq)
    assert (seq.block_table, seq.capacity, seq.num_computed_tokens) == ([], 0, 0)
    assert manager.num_free_blocks == 4
    manager.check_integrity([])


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (16, 3)]
)
def test_a_hit_is_whole_blocks_and_leaves_a_token(num_tokens, num_hits):
    manager = BlockManager(16, SIZE)
    manager.free(take(manager, make(range(17))))
    seq = make(range(num_tokens))
    found = manager.match_prefix(seq)
    assert len(found) == num_hits
    manager.allocate(seq, found)
    assert seq.num_computed_tokens == seq.num_cached_tokens == num_hits * SIZE
    manager.check_integrity([seq])


def test_a_prefix_ends_at_the_first_difference():
    manager = BlockManager(16, SIZE)
    manager.free(take(manager, make(range(17))))
    assert hits(manager, [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12]) == 1
    assert hits(manager, [99, *range(1, 17)]) == 0


def test_blocks_are_shared_only_after_their_kv_is_computed():
    manager = BlockManager(16, SIZE)
    seq = take(manager, make(range(13)), compute=False)
    assert hits(manager, range(13)) == 0
    seq.num_computed_tokens = 7
    manager.commit(seq, 0)
    assert hits(manager, range(13)) == 1
    seq.num_computed_tokens = 12
    manager.commit(seq, 7)
    assert hits(manager, range(13)) == 3
    other = take(manager, make(range(13)))
    assert other.block_table[:3] == seq.block_table[:3]
    assert other.block_table[3] != seq.block_table[3]
    manager.check_integrity([seq, other])
    manager.free(seq)
    manager.check_integrity([other])


def test_the_same_block_behind_another_prefix_is_another_block():
    manager = BlockManager(16, SIZE)
    manager.free(take(manager, make([1] * 4 + [2] * 4 + [3])))
    assert hits(manager, [2] * 4 + [1] * 4 + [3]) == 0
    assert hits(manager, [1] * 4 + [1] * 4 + [3]) == 1


def test_equal_python_hashes_are_not_equal_prefixes():
    twin = 2**61 - 1
    assert hash((twin,) * 4) == hash((0,) * 4)
    manager = BlockManager(16, SIZE)
    manager.free(take(manager, make([0] * 4 + [1])))
    assert hits(manager, [twin] * 4 + [1]) == 0


def test_salts_share_nothing_and_cannot_be_forged_from_digests():
    manager = BlockManager(16, SIZE)
    seq = take(manager, make(range(13), salt=b"tenant"))
    assert hits(manager, range(13)) == 0
    assert hits(manager, range(13), salt=b"tenan") == 0
    assert hits(manager, range(13), salt=b"tenant") == 3
    # What follows the first block must not be reachable with its digest for a salt.
    assert hits(manager, range(4, 13), salt=seq.block_hashes[0]) == 0


def test_two_that_compute_the_same_block_keep_their_own():
    manager = BlockManager(16, SIZE)
    first = take(manager, make(range(9)), compute=False)
    second = take(manager, make(range(9)), compute=False)
    for seq in (first, second):
        seq.num_computed_tokens = 8
        manager.commit(seq, 0)
    manager.check_integrity([first, second])
    assert manager.match_prefix(make(range(9))) == first.block_table[:2]
    manager.free(first)
    manager.free(second)
    assert manager.num_free_blocks == 16
    manager.check_integrity([])


def test_eviction_takes_the_least_recently_used_and_the_tail_before_the_head():
    manager = BlockManager(8, SIZE)
    old, new = make([1] * 13), make([2] * 13)
    manager.free(take(manager, old))
    manager.free(take(manager, new))
    assert manager.num_free_blocks == 8
    # Two blocks are plain free (the last, partial ones); from the third on, `old` goes, tail first.
    for num_taken, left_of_old, left_of_new in ((2, 3, 3), (3, 2, 3), (5, 0, 3), (6, 0, 2)):
        taker = take(manager, make([9] * (SIZE * num_taken)), compute=False)
        assert hits(manager, [1] * 13) == left_of_old
        assert hits(manager, [2] * 13) == left_of_new
        manager.check_integrity([taker])
        manager.free(taker)


def test_a_hit_makes_a_prefix_recent():
    manager = BlockManager(8, SIZE)
    manager.free(take(manager, make([1] * 13)))
    manager.free(take(manager, make([2] * 13)))
    manager.free(take(manager, make([1] * 13)))
    taker = take(manager, make([9] * (SIZE * 5)), compute=False)
    assert hits(manager, [1] * 13) == 3
    assert hits(manager, [2] * 13) == 0
    manager.check_integrity([taker])


def test_a_hit_is_not_evicted_by_its_own_allocation():
    manager = BlockManager(4, SIZE)
    manager.free(take(manager, make([1] * 13)))
    seq = make([1] * 4 + [2] * 12)
    assert manager.can_allocate(4, manager.match_prefix(seq))
    take(manager, seq)
    manager.check_integrity([seq])
    assert not manager.append(seq)


def test_can_allocate_counts_sharing_exactly():
    manager = BlockManager(8, SIZE)
    first = take(manager, make(range(13)))  # 3 cached blocks and 1
    second = take(manager, make([*range(12), 99]))  # the same 3 and 1 of its own
    assert manager.num_free_blocks == 3
    prompt = make([*range(12), 98])
    found = manager.match_prefix(prompt)
    assert len(found) == 3
    assert manager.can_allocate(6, found)
    assert not manager.can_allocate(7, found)
    assert manager.can_allocate(3)
    assert not manager.can_allocate(4)
    # Freeing one gives its own block only; freeing both gives the shared ones, which the hits use.
    assert manager.can_allocate(4, (), [first.block_table])
    assert not manager.can_allocate(5, (), [first.block_table])
    assert manager.can_allocate(7, found, [first.block_table])
    both = [first.block_table, second.block_table]
    assert manager.can_allocate(8, (), both)
    assert manager.can_allocate(8, found, both)
    assert not manager.can_allocate(9, found, both)
    assert manager.num_exclusive_blocks(first) == 1


def test_without_prefix_caching_nothing_is_remembered():
    manager = BlockManager(8, SIZE, enable_prefix_caching=False)
    manager.free(take(manager, make(range(13))))
    assert hits(manager, range(13)) == 0
    assert manager.prefix_cache_queries == manager.prefix_cache_hits == 0
    manager.check_integrity([])


def test_reset_forgets_idle_prefixes_and_those_in_use():
    manager = BlockManager(16, SIZE)
    manager.free(take(manager, make([1] * 13)))
    running = take(manager, make([2] * 13))
    manager.reset_prefix_cache()
    assert hits(manager, [1] * 13) == hits(manager, [2] * 13) == 0
    manager.check_integrity([running])
    manager.free(running)
    assert manager.num_free_blocks == 16
    manager.check_integrity([])


def test_statistics_count_tokens_of_first_admissions():
    manager = BlockManager(16, SIZE)
    seq = take(manager, make(range(13)))
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (13, 0)
    other = take(manager, make(range(10)))
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (23, 8)
    manager.free(other)
    other.num_preemptions = 1
    other.num_cached_tokens = 0
    take(manager, other)
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (23, 8)
    assert other.num_cached_tokens == 0
    manager.check_integrity([seq, other])


def _double_free(manager, seq):
    manager._free.append(seq.block_table[-1])


def _lost_block(manager, seq):
    manager._free.pop()


def _lost_reference(manager, seq):
    manager._ref_counts[seq.block_table[0]] -= 1


def _cached_and_free(manager, seq):
    manager._hash_of_block[manager._free[0]] = b"x"


def _stale_cache_entry(manager, seq):
    manager._block_of_hash[b"x"] = seq.block_table[0]


def _writes_to_a_cached_block(manager, seq):
    seq.num_computed_tokens = 3


def _short_table(manager, seq):
    seq.capacity += SIZE


@pytest.mark.parametrize(
    "corrupt",
    [
        _double_free,
        _lost_block,
        _lost_reference,
        _cached_and_free,
        _stale_cache_entry,
        _writes_to_a_cached_block,
        _short_table,
    ],
)
def test_check_integrity_sees_every_kind_of_damage(corrupt):
    manager = BlockManager(8, SIZE)
    seq = take(manager, make(range(9)))
    manager.check_integrity([seq])
    corrupt(manager, seq)
    with pytest.raises(AssertionError):
        manager.check_integrity([seq])


def test_check_integrity_sees_a_writer_of_a_shared_block():
    manager = BlockManager(8, SIZE)
    first, second = take(manager, make(range(9))), make(range(9))
    second.block_table = list(first.block_table)
    second.capacity, second.num_computed_tokens = first.capacity, first.num_computed_tokens
    for block_id in first.block_table:
        manager._ref_counts[block_id] += 1
        manager.num_shared_blocks += 1
    with pytest.raises(AssertionError, match="shared and written"):
        manager.check_integrity([first, second])
