"""An engine under a load of every kind, for long: memory and latency stay flat.

`make soak` runs half an hour; SOAK_SECONDS=180 is what CI takes. Without that variable, as in
`make test`, it is left out: a slope needs minutes.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from engine.test_chaos import one

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import AsyncEngine

    MakeEngine = Callable[..., AsyncEngine]

SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))
NUM_TASKS = 24
SAMPLE_PERIOD = 0.5
MAX_SLOPE = 1 << 20  # bytes a minute, once warm
WARM_UP = 0.3  # of the time


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    num_bytes: int
    latency: float
    cpu_seconds: float
    num_requests: int


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


@pytest.mark.skipif(not SECONDS, reason="SOAK_SECONDS is not set (make soak)")
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.timeout(0)
async def test_memory_and_latency_stay_flat(
    make_engine: MakeEngine, prompts: Any, expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    samples: list[Sample] = []
    begin = time.monotonic()
    num_requests = 0

    async def load(engine: AsyncEngine, seed: int) -> None:
        nonlocal num_requests
        rng = random.Random(seed)
        while time.monotonic() - begin < SECONDS:
            await one(engine, rng, prompts, expected)
            num_requests += 1

    async with make_engine(num_blocks=96, max_num_seqs=16, max_buffered_tokens=8) as engine:
        engine.enable_metrics()
        async with anyio.create_task_group() as tasks:
            for seed in range(NUM_TASKS):
                tasks.start_soon(load, engine, seed)
            while (elapsed := time.monotonic() - begin) < SECONDS:
                await anyio.sleep(SAMPLE_PERIOD)
                probe = engine.generate([5, 6, 7], priority=-9, temperature=0.0, max_tokens=1)
                await probe.text()
                samples.append(
                    Sample(
                        seconds=elapsed,
                        num_bytes=resident_bytes(),
                        latency=probe.timings.total or 0.0,
                        cpu_seconds=time.process_time(),
                        num_requests=num_requests,
                    )
                )
        assert engine.stats().num_waiting == 0
    warm = [sample for sample in samples if sample.seconds > WARM_UP * SECONDS]
    slope = statistics.linear_regression(
        [sample.seconds / 60 for sample in warm], [sample.num_bytes for sample in warm]
    ).slope
    third = len(warm) // 3
    first, last = speeds(warm[:third]), speeds(warm[-third:])
    with capsys.disabled():
        print(
            f"\nsoak: {num_requests:,} requests in {SECONDS:.0f} s; memory {slope / 2**20:+.3f} "
            f"MiB a minute at {warm[-1].num_bytes / 2**20:.0f} MiB; first and last third: latency "
            f"p10 {1e3 * first[0]:.2f} and {1e3 * last[0]:.2f} ms, processor time of a request "
            f"{1e3 * first[1]:.2f} and {1e3 * last[1]:.2f} ms"
        )
    assert slope < MAX_SLOPE
    # Processor time of a request is the engine's own; latency is other programs' as well.
    assert last[1] < 1.25 * first[1]
    assert last[0] < 2 * first[0]


def speeds(samples: list[Sample]) -> tuple[float, float]:
    """Tenth percentile of a request's latency, and processor time of one, in seconds."""
    latencies = sorted(sample.latency for sample in samples)
    spent = samples[-1].cpu_seconds - samples[0].cpu_seconds
    return latencies[len(latencies) // 10], spent / (
        samples[-1].num_requests - samples[0].num_requests
    )
