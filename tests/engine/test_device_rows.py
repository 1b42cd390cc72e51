"""What a GPU's steps are made of, run on a CPU: padded sizes, tokens that the host has not seen,
tables kept up by small copies, a step launched before the last one's result is known."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinyvllm import EngineConfig, SamplingParams
from tinyvllm.batch import BatchBuilder, Buckets
from tinyvllm.block_manager import BlockManager
from tinyvllm.cuda_steps import DeviceRows
from tinyvllm.model_runner import ModelRunner
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Schedule, Sequence, SequenceStatus

if TYPE_CHECKING:
    from pathlib import Path

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 5, 24


class Ahead:
    """Engine's loop over reference ops. The device knows a token at once, the host a step late."""

    def __init__(self, model_dir: Path, num_blocks: int, max_ahead: int) -> None:
        config = EngineConfig(
            device="cpu",
            ops="reference",
            dtype="float32",
            num_blocks=num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )
        self.runner: Any = ModelRunner(model_dir, config)
        sizes: dict[str, Any] = {
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }
        self.scheduler = Scheduler(
            **sizes,
            max_model_len=self.runner.max_model_len,
            block_manager=BlockManager(num_blocks, 16),
        )
        buckets = Buckets(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
        self.builder = BatchBuilder(
            **sizes, max_model_len=self.runner.max_model_len, block_size=16, buckets=buckets
        )
        self.rows = DeviceRows(
            torch.device("cpu"),
            **sizes,
            max_blocks=-(-self.runner.max_model_len // 16),
            buckets=buckets,
        )
        self.runner._cuda = SimpleNamespace(rows=self.rows, close=lambda: None)
        self.max_ahead = max_ahead
        self.in_flight: deque[tuple[Schedule, list[int]]] = deque()
        self.sizes: set[tuple[Any, bool]] = set()
        self.num_continued = 0

    def step(self) -> None:
        schedule = self.scheduler.schedule()
        if schedule:
            assert self.builder.runs_ahead(schedule)
            batch = self.builder.build(schedule)
            self.num_continued += batch.is_pure_decode
            rows = self.rows.upload(batch)
            self.sizes.add((batch.size, batch.is_pure_decode))
            self.runner._run_step(rows, batch.size, batch.is_pure_decode)
            drawn = rows.sampling.token_ids[: batch.num_logits].tolist()
            self.in_flight.append((schedule, drawn))
        if not schedule or len(self.in_flight) > self.max_ahead:
            self.scheduler.update(*self.in_flight.popleft())

    def run(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()


def sequences(count: int, seed: int) -> list[Sequence]:
    rng = random.Random(seed)
    return [
        Sequence(
            i,
            [rng.randrange(3, 300) for _ in range(rng.choice((1, 5, 16, 17, 40, 60)))],
            SamplingParams(
                temperature=rng.choice((0.0, 0.0, 0.8)),
                seed=i,
                max_tokens=rng.choice((1, 2, 20, 30)),
                stop_token_ids=tuple(rng.sample(range(311), 6)),
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path) -> list[list[int]]:
    """Each sequence by itself, one token after the other."""
    world = Ahead(tiny_model_dir, 64, max_ahead=0)
    outputs = []
    for seq in sequences(10, seed=3):
        world.scheduler.add(seq)
        world.run()
        outputs.append(seq.output_token_ids)
    return outputs


@pytest.mark.parametrize("num_blocks", [8, 64], ids=["preempting", "roomy"])
@pytest.mark.parametrize("max_ahead", [0, 1])
def test_steps_ahead_draw_the_same_tokens(
    tiny_model_dir: Path, alone: list[list[int]], num_blocks: int, max_ahead: int
) -> None:
    world = Ahead(tiny_model_dir, num_blocks, max_ahead)
    waiting = sequences(10, seed=3)
    everyone = list(waiting)
    rng = random.Random(4)
    while waiting or world.scheduler.has_work or world.in_flight:
        if waiting and rng.random() < 0.3:
            world.scheduler.add(waiting.pop(0))
        if world.scheduler.has_work or world.in_flight:
            world.step()
        world.scheduler.check_integrity()
    assert [seq.output_token_ids for seq in everyone] == alone
    assert all(seq.status is SequenceStatus.FINISHED for seq in everyone)
    if num_blocks == 8:
        assert world.scheduler.num_preemptions > 0
    known = Buckets(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    graphs = {(size, False) for size in known.every_mixed()}
    decodes = known.every_decode()
    assert {size for size in world.sizes if not size[1]} <= graphs
    assert {size.num_seqs for size, is_decode in world.sizes if is_decode} <= set(decodes)
    assert world.num_continued > 10


@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(1, 1), (3, 7), (256, 8192), (512, 512)])
def test_buckets_hold_every_step(max_num_seqs: int, max_tokens: int) -> None:
    buckets = Buckets(max_num_seqs, max_tokens)
    decodes, mixed = buckets.every_decode(), set(buckets.every_mixed())
    for n in range(1, max_num_seqs + 1):
        assert n <= buckets.decode(n) and buckets.decode(n) in decodes
    for n in {*range(1, 300), *range(300, max_tokens, 97), max_tokens} & {
        *range(1, max_tokens + 1)
    }:
        for num_seqs in {1, min(n, 16), min(n, 17, max_num_seqs), min(n, max_num_seqs)}:
            size = buckets.mixed(n, min(num_seqs, max_num_seqs))
            assert size.num_tokens >= n and size.num_seqs >= min(num_seqs, max_num_seqs)
            assert size in mixed, (n, num_seqs, size)
            # What a decode's rows are padded to lies in the rows that its first step has written.
            if n <= max_num_seqs:
                assert buckets.decode(n) <= buckets.mixed(n, n).num_tokens
                assert buckets.decode(n) <= max(buckets.mixed(n, n).num_seqs, n)
    assert len(decodes) + len(mixed) < 80
