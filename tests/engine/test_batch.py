"""BatchBuilder against a plain computation of the same arrays, over the scheduler's real steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tinyvllm import SamplingParams
from tinyvllm.batch import Batch, BatchBuilder
from tinyvllm.block_manager import BlockManager
from tinyvllm.ops import reference
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence

if TYPE_CHECKING:
    from tinyvllm.sequence import Schedule


def check(batch: Batch, schedule: Schedule, block_size: int) -> None:
    ids, positions, slot_mapping, cu, seq_lens, logits_indices = [], [], [], [0], [], []
    sampling: list[tuple[Any, ...]] = []
    special = []
    for row, entry in enumerate(schedule.sequences):
        seq = entry.seq
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + entry.num_tokens
        ids += seq.token_ids[start:end]
        positions += range(start, end)
        slot_mapping += [
            seq.block_table[p // block_size] * block_size + p % block_size
            for p in range(start, end)
        ]
        cu.append(len(ids))
        seq_lens.append(end)
        num_blocks = -(-end // block_size)
        table = batch.rows.forward.block_tables[row, :num_blocks].tolist()
        assert table == seq.block_table[:num_blocks]
        if entry.samples:
            logits_indices.append(len(ids) - 1)
            p = seq.params
            if p.min_tokens or p.logprobs is not None:
                special.append((len(sampling), seq))
            drawn = seq.num_output_tokens
            sampling.append((p.temperature, p.top_k, p.top_p, p.min_p, seq.seed, drawn))
    forward, draw = batch.rows.forward, batch.rows.sampling
    if batch.is_pure_decode:  # what the step itself begins with
        reference.advance_decode(
            forward.input_ids,
            forward.positions,
            forward.seq_lens,
            draw.step_idx,
            forward.slot_mapping,
            draw.token_ids,
            forward.block_tables,
            block_size,
        )
    assert forward.input_ids.tolist() == ids
    assert forward.positions.tolist() == positions
    assert forward.slot_mapping.tolist() == slot_mapping
    assert forward.cu_seqlens_q.tolist() == cu
    assert forward.seq_lens.tolist() == seq_lens
    assert forward.logits_indices.tolist() == logits_indices
    columns = (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seeds, draw.step_idx)
    for column, wanted in zip(columns, zip(*sampling, strict=True), strict=False):
        assert column.tolist() == pytest.approx(list(wanted), rel=1e-6)
    assert all(len(column) == len(sampling) for column in (*columns, draw.token_ids))
    assert list(batch.special) == special
    shape = (batch.size.num_tokens, batch.num_seqs, batch.num_logits)
    assert shape == (len(ids), len(seq_lens), len(sampling))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_blocks", [14, 200], ids=["preempting", "roomy"])
def test_every_step_of_a_random_run(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([16, 32])
    max_num_seqs = rng.choice([1, 4, 9])
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching=rng.random() < 0.5)
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([max_num_seqs, 48]),
        max_model_len=256,
        block_manager=manager,
    )
    builder = BatchBuilder(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=256,
        block_size=block_size,
    )
    live: list[Sequence] = []
    num_added = num_pure = num_mixed = 0
    while num_added < 40 or scheduler.num_unfinished:
        if num_added < 40 and rng.random() < 0.15:
            prompt = [rng.randrange(9) for _ in range(rng.choice([1, 15, 16, 17, 40, 100]))]
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.5, 1.0]),
                top_k=rng.choice([0, 5]),
                top_p=rng.choice([0.5, 1.0]),
                min_p=rng.choice([0.0, 0.1]),
                seed=rng.randrange(-(2**62), 2**62),
                max_tokens=rng.choice([1, 20, 60]),
                min_tokens=rng.choice([0, 1]),
                logprobs=rng.choice([None, None, 2]),
            )
            live.append(Sequence(num_added, prompt, params))
            scheduler.add(live[-1])
            num_added += 1
        for seq in live:
            if rng.random() < 0.01:
                scheduler.set_paused(seq.seq_id, not seq.paused)
            if rng.random() < 0.002:
                scheduler.abort(seq.seq_id)
        if not scheduler.has_work:
            for seq in live:
                scheduler.set_paused(seq.seq_id, False)
        if not scheduler.has_work:
            continue
        schedule = scheduler.schedule()
        batch = builder.build(schedule)
        check(batch, schedule, block_size)
        num_pure += batch.is_pure_decode
        num_mixed += not batch.is_pure_decode
        # What ops.sample would leave in memory.
        drawn = [rng.randrange(9) for _ in range(batch.num_logits)]
        for row, token_id in enumerate(drawn):
            batch.rows.sampling.token_ids[row] = token_id
        scheduler.update(schedule, drawn)
        live = [seq for seq in live if seq.finish_reason is None]
    assert num_pure > 20 and num_mixed > 20
    assert num_blocks > 14 or scheduler.num_preemptions > 0 or max_num_seqs == 1
