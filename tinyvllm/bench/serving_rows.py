"""What company costs: running streams while long prompts arrive (`mixed`), and what a common prefix
saves (`shared`). Of tinyvllm alone: both are about its scheduler."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tinyvllm
from tinyvllm.bench.report import SUBJECT, Row, percentile
from tinyvllm.bench.workloads import MAX_TOKEN_ID

if TYPE_CHECKING:
    from pathlib import Path

    from tinyvllm.bench.workloads import Size

_SETTLE = 4
"""Tokens that every stream has had before its gaps count."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Streams that run, and prompts that arrive beside them."""

    num_streams: int
    prompt_len: int
    num_prompts: int
    interval: float
    """Seconds from one prompt to the next at least; each also waits for the one before."""
    num_quiet_tokens: int
    """Of each stream, before the first prompt."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Prompts of a common beginning."""

    num_requests: int
    prefix_len: int
    own_len: int
    output_len: int


MIXED: dict[Size, Mixed] = {
    "cpu": Mixed(16, 1024, 3, 0.0, 32),
    "full": Mixed(64, 8192, 5, 1.0, 256),
    "tiny": Mixed(2, 40, 2, 0.0, 4),
}
SHARED: dict[Size, Shared] = {
    "cpu": Shared(16, 512, 16, 16),
    "full": Shared(256, 1024, 16, 64),
    "tiny": Shared(3, 40, 4, 3),
}


def mixed_rows(
    model_dir: Path, device: str, num_threads: int, budget: int, size: Size, rounds: int
) -> list[Row]:
    """Gaps between the streams' tokens alone and beside prompts, and the last chunk alone.

    `budget`: tokens of a step, so of a chunk.
    """
    work = MIXED[size]
    name = f"mixed {work.num_streams} + {work.prompt_len}"
    found = asyncio.run(_mixed(model_dir, device, num_threads, budget, work, rounds))
    return [Row(name, metric, "ms", False, {SUBJECT: values}) for metric, values in found.items()]


async def _mixed(
    model_dir: Path, device: str, num_threads: int, budget: int, work: Mixed, rounds: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    async with tinyvllm.AsyncEngine(
        model_dir,
        device=device,
        num_threads=num_threads,
        max_num_seqs=work.num_streams + 1,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    ) as engine:
        rng = random.Random(0)
        top = min(MAX_TOKEN_ID, engine.model_config.vocab_size - 1)

        async def prefill(prompt_len: int = work.prompt_len) -> float:
            """Seconds until one long prompt has its first token."""
            ids = [rng.randint(0, top) for _ in range(prompt_len)]
            begin = time.perf_counter()
            await engine.generate(ids, temperature=0, max_tokens=1).text()
            return time.perf_counter() - begin

        for round_idx in range(-1, rounds):
            chunk = await prefill()
            if work.prompt_len > budget:  # the last chunk takes longest: it sees all the others
                chunk -= await prefill(work.prompt_len - budget)
            readers = [
                _Reader(engine, [rng.randint(0, top)], work.num_quiet_tokens)
                for _ in range(work.num_streams)
            ]
            await asyncio.gather(*(reader.is_settled.wait() for reader in readers))
            quiet = [gap for reader in readers for gap in reader.gaps]
            for reader in readers:
                reader.gaps.clear()
            for _ in range(work.num_prompts):
                pause = work.interval - await prefill()
                await asyncio.sleep(max(0.0, pause))
            beside = [gap for reader in readers for gap in reader.gaps]
            for reader in readers:
                await reader.stop()
            if round_idx < 0:
                continue
            for metric, value in (
                ("inter-token p50, alone", percentile(quiet, 50)),
                ("inter-token p99, alone", percentile(quiet, 99)),
                ("inter-token p50, beside prompts", percentile(beside, 50)),
                ("inter-token p99, beside prompts", percentile(beside, 99)),
                ("last chunk, alone", chunk * 1e3),
            ):
                found.setdefault(metric, []).append(value)
    return found


class _Reader:
    """A stream without end, and the milliseconds between its tokens."""

    def __init__(
        self, engine: tinyvllm.AsyncEngine, prompt: list[int], num_quiet_tokens: int
    ) -> None:
        self.gaps: list[float] = []
        self.is_settled = asyncio.Event()
        self._num_quiet_tokens = num_quiet_tokens
        self._stream = engine.generate(prompt, temperature=0, ignore_eos=True)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        last = None
        async for token in self._stream:
            now = time.perf_counter()
            if last is not None and token.index > _SETTLE:
                self.gaps.append((now - last) * 1e3)
                if len(self.gaps) == self._num_quiet_tokens:
                    self.is_settled.set()
            last = now

    async def stop(self) -> None:
        self._stream.abort()
        await self._task


def shared_rows(
    model_dir: Path, device: str, num_threads: int, size: Size, rounds: int
) -> list[Row]:
    """Output speed with prefix caching and without, all requests at once."""
    work = SHARED[size]
    speeds = {
        cached: asyncio.run(_shared(model_dir, device, num_threads, work, rounds, cached))
        for cached in (True, False)
    }
    ratios = [a / b for a, b in zip(speeds[True], speeds[False], strict=True)]
    name = f"shared {work.num_requests} x {work.prefix_len}+{work.own_len}/{work.output_len}"
    rows: list[tuple[str, str, Any]] = [
        ("output, prefix caching", "tok/s", speeds[True]),
        ("output, no prefix caching", "tok/s", speeds[False]),
        ("gain", "x", ratios),
    ]
    return [Row(name, metric, unit, True, {SUBJECT: values}) for metric, unit, values in rows]


async def _shared(
    model_dir: Path, device: str, num_threads: int, work: Shared, rounds: int, cached: bool
) -> list[float]:
    found = []
    async with tinyvllm.AsyncEngine(
        model_dir,
        device=device,
        num_threads=num_threads,
        max_num_seqs=work.num_requests,
        max_model_len=work.prefix_len + work.own_len + work.output_len,
        enable_prefix_caching=cached,
    ) as engine:
        top = min(MAX_TOKEN_ID, engine.model_config.vocab_size - 1)
        for round_idx in range(-1, rounds):
            rng = random.Random(round_idx)

            def draw(count: int, rng: random.Random = rng) -> list[int]:
                return [rng.randint(0, top) for _ in range(count)]

            prefix = draw(work.prefix_len)
            prompts = [prefix + draw(work.own_len) for _ in range(work.num_requests)]
            begin = time.perf_counter()
            streams = [
                engine.generate(prompt, temperature=0, max_tokens=work.output_len, ignore_eos=True)
                for prompt in prompts
            ]
            await asyncio.gather(*(stream.text() for stream in streams))
            seconds = time.perf_counter() - begin
            if round_idx >= 0:
                found.append(work.num_requests * work.output_len / seconds)
    return found
