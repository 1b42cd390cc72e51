"""Host time per token: everything in a decode step that is not an op, phase by phase.

Only steady decoding counts: the clock starts when every stream has had a few tokens and stops
before the first one ends. "Host, in steps' way" is the time in which no ops ran: from a step's last
op to the next one's first, so with the threads' wake-ups and waits for each other's GIL in it. The
engine thread's phases are what it does for a token, beside the ops as far as steps run ahead; the
readers' side is the event loop thread's processor time.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import tinyvllm
from tinyvllm.bench.report import number, text_table
from tinyvllm.engine import StepTimings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tinyvllm.bench.report import Report
    from tinyvllm.bench.workloads import Workload

PHASES = ("schedule", "build", "launch", "update", "detokenize", "publish")
IN_THE_WAY = "host, in steps' way"
_SETTLE = 4
"""Tokens that every stream has had before the clock starts, and still gets after it stops."""


class _Window:
    """Clocks that run while all streams decode."""

    def __init__(self, engine: tinyvllm.AsyncEngine, num_streams: int, output_len: int) -> None:
        self.timings = StepTimings()
        self.reader = 0.0
        self._engine = engine
        self._not_settled = num_streams
        self._output_len = output_len
        self._running = False

    def note(self, num_tokens: int) -> None:
        """One stream has had `num_tokens` tokens."""
        if num_tokens == _SETTLE:
            self._not_settled -= 1
            if self._not_settled == 0:
                self._running = True
                self.reader = -time.thread_time()
                self._engine.step_timings = self.timings
        elif num_tokens == self._output_len - _SETTLE and self._running:
            self._running = False
            self._engine.step_timings = None
            self.reader += time.thread_time()


def host_table(
    report: Report,
    model_dir: Path,
    device: str,
    num_threads: int,
    workloads: Sequence[Workload],
    rounds: int,
) -> None:
    """Measure and print the table: microseconds per token, a column for each workload."""
    columns: list[dict[str, float]] = []
    for workload in workloads:
        found = asyncio.run(_measure(model_dir, device, num_threads, workload, rounds))
        columns.append(min(found, key=lambda phases: phases[IN_THE_WAY]))
        for phase, us in columns[-1].items():
            report.write(
                {
                    "record": "host",
                    "streams": workload.num_requests,
                    "phase": phase,
                    "us_per_token": us,
                }
            )
    header = ["host us per token", *(workload.name for workload in workloads)]
    lines = [[phase, *(number(column[phase]) for column in columns)] for phase in columns[0]]
    report.print(text_table(header, lines))
    report.print()


async def _measure(
    model_dir: Path, device: str, num_threads: int, workload: Workload, rounds: int
) -> list[dict[str, float]]:
    found = []
    async with tinyvllm.AsyncEngine(
        model_dir,
        device=device,
        num_threads=num_threads,
        max_num_seqs=max(64, workload.num_requests),
        max_model_len=workload.max_model_len,
        # An engine far ahead of its readers would be done before they start the clock.
        max_buffered_tokens=_SETTLE,
    ) as engine:
        vocab_size = engine.model_config.vocab_size
        for round_idx in range(-1, rounds):
            window = _Window(engine, workload.num_requests, workload.output_len[0])
            streams = [
                engine.generate(
                    list(work.prompt_ids),
                    temperature=0,
                    max_tokens=work.max_tokens,
                    ignore_eos=True,
                )
                for work in workload.draw(round_idx, vocab_size)
            ]
            await asyncio.gather(*(_read(stream, window) for stream in streams))
            if round_idx >= 0:
                found.append(per_token(window.timings, window.reader))
    return found


async def _read(stream: tinyvllm.TokenStream, window: _Window) -> None:
    num_tokens = 0
    async for _ in stream:
        num_tokens += 1
        window.note(num_tokens)


def per_token(timings: StepTimings, reader: float) -> dict[str, float]:
    """Microseconds per token: every phase, their sum, and what stands beside them."""
    scale = 1e6 / timings.num_tokens
    phases = {phase: getattr(timings, phase) * scale for phase in PHASES}
    return {
        **phases,
        "engine thread": sum(phases.values()),
        "reading the streams": reader * scale,
        "ops": timings.ops * scale,
        IN_THE_WAY: timings.idle * scale,
    }
