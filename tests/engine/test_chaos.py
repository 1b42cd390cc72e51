"""5,000 requests from 50 tasks that leave in every way there is: the rest is right, nothing stays,
and the loop they run on is never held up."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from support.engine_helpers import GREEDY, settled

from tinyvllm import InvalidParameterError, RequestTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import AsyncEngine

    MakeEngine = Callable[..., AsyncEngine]

NUM_TASKS = 50
NUM_REQUESTS_PER_TASK = 100
MAX_BLOCKED = 0.020  # seconds
WATCH_PERIOD = 0.002
ENDED_EARLY = ("break", "cancel", "abandon", "aclose", "deadline", "never read", "abort")
WAYS = ("read", "read", "feed", "slow", "timeout", "bad", "choices", "priority", *ENDED_EARLY)


class Watchdog:
    """How long the loop's own work kept it from a timer that was due.

    Processor time of the loop's thread between two wake-ups: what other processes and threads take
    does not count, what the library computes on the loop does. `late` has the wall time too.
    """

    def __init__(self) -> None:
        self.busy: list[float] = []
        self.late: list[float] = []

    async def watch(self) -> None:
        while True:
            cpu, wall = time.thread_time(), time.perf_counter()
            await anyio.sleep(WATCH_PERIOD)
            self.busy.append(time.thread_time() - cpu)
            self.late.append(time.perf_counter() - wall - WATCH_PERIOD)


async def one(engine: AsyncEngine, rng: random.Random, prompts: Any, expected: Any) -> str:
    """One request in a random way; the way. Every token seen is right."""
    way = rng.choice(WAYS)
    i = rng.randrange(len(prompts))
    prompt, right, after = prompts[i], expected[i], rng.randrange(1, 12)
    if way == "bad":
        bad = rng.choice(
            ({"temperature": -1}, {"timeout": 0}, {"n": 0}, {"priority": "x"}, {"max_tokens": 0})
        )
        with pytest.raises(InvalidParameterError):
            engine.generate(prompt, GREEDY, **bad)
        if rng.random() < 0.5:
            with pytest.raises(InvalidParameterError):
                await engine.generate("word " * 2000, GREEDY).text()
        return way
    # Those that are left are longer than a buffer, so that they are left while they run.
    options: dict[str, Any] = {"max_tokens": 99} if way in ENDED_EARLY else {}
    if way == "timeout":
        options = {"timeout": 0.002 * after, "max_tokens": 400}
    elif way == "choices":
        options = {"n": 3, "temperature": 2.0, "seed": i}
    stream = engine.generate(prompt, GREEDY, priority=rng.choice((0, 0, 1)), **options)
    ids: list[int] = []
    if way == "never read":
        return way
    if way == "choices":
        texts = await stream.texts()
        assert len(texts) == 3 and stream.usage.completion_tokens == 36
        return way
    if way == "feed":
        await stream.feed(lambda tokens: ids.extend(token.id for token in tokens))
    elif way == "abandon":
        iterator = aiter(stream)
        ids = [(await anext(iterator)).id for _ in range(after)]
    elif way == "aclose":
        async with stream:
            ids = [(await anext(stream)).id for _ in range(after)]
    else:
        with (
            pytest.raises(RequestTimeoutError) if way == "timeout" else nullcontext(),
            anyio.CancelScope() as scope,
            anyio.move_on_after(0.002 * after if way == "deadline" else None),
        ):
            async for token in stream:
                ids.append(token.id)
                if way == "slow":
                    await anyio.sleep(0.001)
                if len(ids) != after:
                    continue
                if way == "break":
                    break
                if way == "cancel":
                    scope.cancel()
                if way == "abort":
                    stream.abort()
                if way == "priority":
                    stream.set_priority(rng.randrange(-1, 2))
    if way in ("read", "feed", "slow", "priority"):
        assert ids == right
        assert stream.finish_reason == "length"
    else:
        assert ids[:12] == right[: len(ids)]
    return way


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("trio", {})], ids=["asyncio", "trio"])
@pytest.mark.timeout(170)
async def test_chaos(
    make_engine: MakeEngine,
    prompts: list[list[int]],
    expected: list[list[int]],
    capsys: pytest.CaptureFixture[str],
    anyio_backend_name: str,
) -> None:
    ways: Counter[str] = Counter()
    watchdog = Watchdog()

    async def task(engine: AsyncEngine, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(NUM_REQUESTS_PER_TASK):
            ways[await one(engine, rng, prompts, expected)] += 1
            if rng.random() < 0.2:
                await anyio.lowlevel.checkpoint()

    begin = time.perf_counter()
    async with make_engine(num_blocks=96, max_num_seqs=16, max_buffered_tokens=8) as engine:
        gc.collect()
        gc.freeze()  # what the tests before have left is not this loop's to walk
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(watchdog.watch)
                async with anyio.create_task_group() as tasks:
                    for seed in range(NUM_TASKS):
                        tasks.start_soon(task, engine, seed)
                watching.cancel_scope.cancel()
        finally:
            gc.unfreeze()
        seconds = time.perf_counter() - begin
        gc.collect()
        await settled(engine)
        stats = engine.stats()
        core: Any = engine._engine
        core._scheduler.check_integrity()
        assert core._states == {}
        assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks and stats.sequences == ()
        stream = engine.generate(prompts[20], GREEDY)
        assert [token.id async for token in stream] == expected[20]
    busy, late = sorted(watchdog.busy), sorted(watchdog.late)
    with capsys.disabled():
        print(
            f"\nchaos on {anyio_backend_name}: {ways.total():,} requests in {seconds:.1f} s, "
            f"{stats.num_output_tokens:,} tokens, {stats.num_preemptions} preemptions; loop busy "
            f"{1e3 * busy[-1]:.1f} ms at most, late by {1e3 * late[-1]:.1f} ms at most, "
            f"{1e3 * late[int(0.99 * len(late))]:.1f} ms p99"
        )
    assert ways.total() == NUM_TASKS * NUM_REQUESTS_PER_TASK
    assert set(ways) == set(WAYS)
    assert stats.num_preemptions > 0
    assert busy[-1] < MAX_BLOCKED
