"""200 concurrent streams with random cancels, breaks and abandoned iterators: the rest is right."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from support.engine_helpers import GREEDY, settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import AsyncEngine

    MakeEngine = Callable[..., AsyncEngine]

WAYS = ("read", "read", "read", "break", "cancel", "abandon", "aclose", "timeout", "never read")


@pytest.mark.anyio
@pytest.mark.parametrize("seed", [0, 1])
async def test_200_streams(
    make_engine: MakeEngine,
    prompts: list[list[int]],
    expected: list[list[int]],
    anyio_backend_name: str,
    seed: int,
) -> None:
    rng = random.Random(seed)
    complete = 0
    tasks_before = asyncio.all_tasks() if anyio_backend_name == "asyncio" else None

    async def one(engine: AsyncEngine, prompt_idx: int, way: str, after: int) -> None:
        nonlocal complete
        # Those that are left are longer than a buffer, so that they are left while they run.
        stream = engine.generate(
            prompts[prompt_idx], GREEDY, max_tokens=12 if way == "read" else 99
        )
        if way == "never read":
            return
        if way == "abandon":
            iterator = aiter(stream)
            for _ in range(after):
                await anext(iterator)
            return
        if way == "aclose":
            async with stream:
                for _ in range(after):
                    await anext(stream)
            return
        ids: list[int] = []
        with (
            anyio.CancelScope() as scope,
            anyio.move_on_after(0.02 * after if way == "timeout" else None),
        ):
            async for token in stream:
                ids.append(token.id)
                if len(ids) == after:
                    if way == "break":
                        break
                    if way == "cancel":
                        scope.cancel()
        if way == "read":
            assert ids == expected[prompt_idx]
            assert stream.finish_reason == "length"
            complete += 1
        else:
            assert ids[:12] == expected[prompt_idx][: len(ids)]
            assert stream.finish_reason == "abort" or (way == "timeout" and len(ids) > 99 - 34)

    async with make_engine(num_blocks=64, max_buffered_tokens=32) as engine:
        ways = [rng.choice(WAYS) for _ in range(200)]
        async with anyio.create_task_group() as tasks:
            for way in ways:
                tasks.start_soon(
                    one, engine, rng.randrange(len(prompts)), way, rng.randrange(1, 12)
                )
                if rng.random() < 0.2:
                    await anyio.lowlevel.checkpoint()
        gc.collect()
        await settled(engine)
        assert complete == ways.count("read")
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        core: Any = engine._engine
        core._scheduler.check_integrity()
        assert core._states == {}
        if anyio_backend_name == "asyncio":
            assert asyncio.all_tasks() == tasks_before
        # Still of use.
        stream = engine.generate(prompts[20], GREEDY)
        assert [token.id async for token in stream] == expected[20]


@pytest.mark.anyio
async def test_pauses_aborts_and_preemptions_together(
    make_engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Slow readers in a small pool."""
    rng = random.Random(3)

    async def read(engine: AsyncEngine, i: int) -> None:
        ids = []
        async for token in engine.generate(prompts[i], GREEDY, priority=i % 3):
            ids.append(token.id)
            for _ in range(rng.randrange(30)):
                await anyio.lowlevel.checkpoint()
        assert ids == expected[i]

    async with make_engine(num_blocks=16, max_num_seqs=6, max_buffered_tokens=2) as engine:
        async with anyio.create_task_group() as tasks:
            for i in range(len(prompts)):
                tasks.start_soon(read, engine, i)
        await settled(engine)
        assert engine.stats().num_preemptions > 0
