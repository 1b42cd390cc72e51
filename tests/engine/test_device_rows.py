"""What a GPU's steps are made of, run on a CPU: padded sizes, tokens that the host has not seen,
tables kept up by small copies, a step launched before the last one's result is known, and of one
with special rows the draw behind the forward pass, which may come when that result is known."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinyvllm import EngineConfig, SamplingParams
from tinyvllm.allowed_tokens import AllowedTokens
from tinyvllm.batch import Batch, BatchBuilder, BatchSize, Buckets
from tinyvllm.block_manager import BlockManager
from tinyvllm.cuda_steps import DeviceRows
from tinyvllm.model_runner import ModelRunner
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Schedule, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinyvllm.model_runner import Logprobs, Step

VOCAB_SIZE = 311
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 5, 24


class FakeStep:
    """CudaStep, ended as soon as it is finished."""

    def __init__(self, drawn: torch.Tensor) -> None:
        self.drawn = drawn
        self.ids: list[int]

    def wait(self) -> list[int]:
        return self.ids

    def seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


class FakeCudaSteps:
    """CudaSteps whose device computes at once."""

    def __init__(self, rows: DeviceRows, runner: Any) -> None:
        self.rows, self.runner = rows, runner
        self.sizes: set[tuple[BatchSize, bool]] = set()
        self.open: FakeStep | None = None  # its draw has to come before the next launch
        self.num_draws_late = 0

    def launch(self, batch: Batch) -> FakeStep:
        step = self._start(batch, self.runner._run_step)
        self.finish(step)
        return step

    def launch_forward(self, batch: Batch) -> FakeStep:
        step = self.open = self._start(batch, self.runner._run_forward)
        return step

    def resume(self, step: FakeStep) -> None:
        assert step is self.open

    def finish(self, step: FakeStep) -> None:
        step.ids = step.drawn.tolist()
        self.open = None

    def close(self) -> None:
        pass

    def _start(self, batch: Batch, run: Any) -> FakeStep:
        assert self.open is None, "launched before the last step's draw"
        self.sizes.add((batch.size, batch.is_pure_decode))
        self.rows.upload(batch)
        run(self.rows.narrow(batch.size), batch.size, batch.is_pure_decode)
        return FakeStep(self.rows.drawn[: batch.num_logits])


class LateStream:
    """A CPU's stream that runs a graph when somebody waits for its result, or a later one's: what
    the host writes meanwhile it must not see."""

    def __init__(self) -> None:
        self._queue: deque[LateLaunch] = deque()

    def launch(self, graph: Any, result: torch.Tensor) -> LateLaunch:
        launch = LateLaunch(self, graph, result)
        self._queue.append(launch)
        return launch

    def run_until(self, last: LateLaunch) -> None:
        while last.ids is None:
            launch = self._queue.popleft()
            launch.graph.replay()
            launch.ids = launch.tensor.tolist()


class LateLaunch:
    seconds = idle_seconds = 0.0

    def __init__(self, stream: LateStream, graph: Any, tensor: torch.Tensor) -> None:
        self.stream, self.graph, self.tensor = stream, graph, tensor
        self.ids: list[int] | None = None

    def result(self) -> list[int]:
        self.stream.run_until(self)
        assert self.ids is not None
        return self.ids

    def cancel(self) -> None:
        pass


class CountedOps:
    """Ops that tell how often each was called."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._ops, name)


class Ahead:
    """Engine's loop over reference ops, with a GPU's arrays or (`max_ahead` None) a CPU's, whose
    steps are waited for. The device knows a token at once, the host a step late. Over native ops:
    a CPU's arrays and graphs, and a stream that runs as late as it may."""

    def __init__(
        self, model_dir: Path, num_blocks: int, max_ahead: int | None, ops: str = "reference"
    ) -> None:
        config = EngineConfig(
            device="cpu",
            ops="reference" if ops == "reference" else "native",
            dtype="float32" if ops == "reference" else "bfloat16",
            num_blocks=num_blocks,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enforce_eager=max_ahead is None,
        )
        self.runner: Any = ModelRunner(model_dir, config)
        self.ops = self.runner.ops = CountedOps(self.runner.ops)
        sizes: dict[str, Any] = {
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }
        self.scheduler = Scheduler(
            **sizes,
            max_model_len=self.runner.max_model_len,
            block_manager=BlockManager(num_blocks, 16),
        )
        buckets = None
        if ops == "native":
            self.runner._stream = None if max_ahead is None else LateStream()
        elif max_ahead is not None:
            buckets = Buckets(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
            rows = DeviceRows(
                torch.device("cpu"),
                **sizes,
                max_blocks=-(-self.runner.max_model_len // 16),
                buckets=buckets,
            )
            self.cuda = self.runner._cuda = FakeCudaSteps(rows, self.runner)
        self.builder = BatchBuilder(
            **sizes, max_model_len=self.runner.max_model_len, block_size=16, buckets=buckets
        )
        self.max_ahead = max_ahead or 0
        self.in_flight: deque[tuple[Schedule, Step]] = deque()
        self.num_continued = self.num_steps = self.num_draws_late = 0
        self.logprobs: dict[int, list[Logprobs]] = {}
        self.followed: list[Sequence] = []
        self.between: Callable[[], None] = lambda: None
        """Called when a step has been launched, before a result is taken."""

    def add(self, seq: Sequence) -> None:
        self.scheduler.add(seq)
        if seq.allowed is not None and seq.allowed.depends_on_output:
            self.followed.append(seq)

    def step(self) -> None:
        schedule = self.scheduler.schedule()
        runs_ahead = self.builder.runs_ahead(schedule)
        while self.in_flight and not runs_ahead:
            self.land()
        if schedule:
            batch = self.builder.build(schedule)
            self.num_continued += batch.is_pure_decode
            self.num_steps += 1
            step = self.runner.launch(batch)
            self.in_flight.append((schedule, step))
            self.num_draws_late += None in (
                getattr(step, name, step) for name in ("_drawing", "_plan")
            )
        self.between()
        if self.in_flight and (not schedule or len(self.in_flight) > self.max_ahead):
            self.land()

    def land(self) -> None:
        schedule, step = self.in_flight.popleft()
        output = step.result()
        for seq_id, logprobs in output.logprobs.items():
            self.logprobs.setdefault(seq_id, []).append(logprobs)
        self.scheduler.update(schedule, output.token_ids)
        for seq in self.followed:
            if seq.finish_reason is None and seq.allowed.num_taken < seq.num_output_tokens:
                seq.allowed.take(seq.output_token_ids)
        if self.in_flight:
            self.in_flight[0][1].draw()

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


SPECIAL: list[dict[str, Any]] = [
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logprobs": 5},
    {},
    {"bad_words": ["x"], "logprobs": 2},
    {"repetition_penalty": 1.4, "min_tokens": 6},
    {"logit_bias": dict.fromkeys(range(20, 60), 2.0), "logprobs": 0},
    {"allowed_token_ids": range(40, 90), "bad_words": ["x"]},
]


def special_sequences(count: int, seed: int) -> list[Sequence]:
    """Those of `sequences` that ask for more than a draw, most of them."""
    found = []
    for i, seq in enumerate(sequences(count, seed)):
        params = replace(seq.params, **SPECIAL[i % len(SPECIAL)])
        special = Sequence(i, seq.token_ids, params)
        if params.adjusts_logits:
            # After every third token there are some that may not come next.
            words = [(a, b) for a in range(0, VOCAB_SIZE, 3) for b in range(a % 7, VOCAB_SIZE, 7)]
            special.allowed = AllowedTokens(
                params, VOCAB_SIZE, special.stop_ids, words if params.bad_words else ()
            )
        found.append(special)
    return found


def run_alone(model_dir: Path, everyone: list[Sequence], ops: str = "reference") -> tuple[Any, Any]:
    """(tokens, log-probabilities), each by itself, as a CPU runs it: op by op, waited for."""
    world = Ahead(model_dir, 64, None, ops)
    for seq in everyone:
        world.add(seq)
        world.run()
    return [seq.output_token_ids for seq in everyone], world.logprobs


def run_in_company(world: Ahead, everyone: list[Sequence], leaves: bool = False) -> None:
    """They arrive at random; some are aborted at random, between steps and between a
    forward pass and its draw."""
    waiting = everyone.copy()
    rng = random.Random(4)

    def leave() -> None:
        if leaves and rng.random() < 0.1:
            world.scheduler.abort(rng.randrange(len(everyone)))

    world.between = leave
    while waiting or world.scheduler.has_work or world.in_flight:
        if waiting and rng.random() < 0.3:
            world.add(waiting.pop(0))
        if world.scheduler.has_work or world.in_flight:
            world.step()
        leave()
        world.scheduler.check_integrity()
    assert all(seq.status is SequenceStatus.FINISHED for seq in everyone)
    assert world.ops.counts["sample"] <= world.num_steps, "a step draws once"


@pytest.mark.parametrize("num_blocks", [8, 64], ids=["preempting", "roomy"])
@pytest.mark.parametrize("max_ahead", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "special"])
def test_steps_ahead_draw_the_same_tokens(
    tiny_model_dir: Path, num_blocks: int, max_ahead: int, kind: str
) -> None:
    make = sequences if kind == "plain" else special_sequences
    tokens, logprobs = run_alone(tiny_model_dir, make(10, seed=3))
    world, everyone = Ahead(tiny_model_dir, num_blocks, max_ahead), make(10, seed=3)
    run_in_company(world, everyone)
    assert [seq.output_token_ids for seq in everyone] == tokens
    if num_blocks == 8:
        assert world.scheduler.num_preemptions > 0
    assert (world.num_draws_late > 0) == (kind == "special" and max_ahead > 0)
    # Those of a token that nobody wants any more may come behind the others.
    assert world.logprobs.keys() == logprobs.keys()
    for seq_id, found in world.logprobs.items():
        assert [list(top) for _, top in found][: len(logprobs[seq_id])] == [
            list(top) for _, top in logprobs[seq_id]
        ]
        for (mine, top), (theirs, other) in zip(found, logprobs[seq_id], strict=False):
            assert mine == pytest.approx(theirs, abs=1e-5)
            assert list(top.values()) == pytest.approx(list(other.values()), abs=1e-5)
    known = Buckets(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    graphs = {(size, False) for size in known.every_mixed()}
    decodes = known.every_decode()
    sizes = world.cuda.sizes
    assert {size for size in sizes if not size[1]} <= graphs
    assert {size.num_seqs for size, is_decode in sizes if is_decode} <= set(decodes)
    assert world.num_continued > 10


@pytest.mark.parametrize("num_blocks", [8, 64], ids=["preempting", "roomy"])
def test_a_stream_that_is_late_draws_the_same_tokens(tiny_model_dir: Path, num_blocks: int) -> None:
    """The host is a step ahead and has written all that the next step needs of it."""
    tokens, logprobs = run_alone(tiny_model_dir, special_sequences(10, seed=3), "native")
    world, everyone = Ahead(tiny_model_dir, num_blocks, 1, "native"), special_sequences(10, seed=3)
    run_in_company(world, everyone)
    assert [seq.output_token_ids for seq in everyone] == tokens
    assert world.num_draws_late > 0
    for seq_id, found in logprobs.items():
        assert world.logprobs[seq_id][: len(found)] == found


@pytest.mark.parametrize("num_blocks", [8, 64], ids=["preempting", "roomy"])
def test_those_that_leave_between_forward_pass_and_draw(
    tiny_model_dir: Path, num_blocks: int
) -> None:
    tokens, _ = run_alone(tiny_model_dir, special_sequences(10, seed=3))
    world, everyone = Ahead(tiny_model_dir, num_blocks, 1), special_sequences(10, seed=3)
    run_in_company(world, everyone, leaves=True)
    for seq, expected in zip(everyone, tokens, strict=True):
        assert seq.output_token_ids == expected[: seq.num_output_tokens], seq
    assert {seq.finish_reason for seq in everyone} > {"abort"}
    assert world.num_draws_late > 0
    assert world.scheduler.num_running == 0
    assert world.scheduler.block_manager.num_free_blocks == num_blocks


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
