"""One decode step, kernel by kernel, and the gaps between them.

On a GPU an engine decodes steadily while torch's profiler (kineto, CUPTI) notes what the device
does. A step begins at its `advance_decode` and ends where the last thing before the next one ends.
On a CPU the ops of a step are called one by one.

The gap before a kernel is the time from the end of everything before it to its start. A kernel that
is let in early overlaps those before it: that gap is negative, by the time that both ran, so that
kernels and gaps always add up to the step. The profiler costs time, in the gaps above all: the
line above each table has the step's time without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

import tinyvllm
from tinyvllm import _C
from tinyvllm.bench.contenders import UnavailableError
from tinyvllm.bench.op_table import Step, by_kind, step_calls
from tinyvllm.bench.report import number, text_table
from tinyvllm.engine import StepTimings
from tinyvllm.loader import load_config, load_model
from tinyvllm.ops import get_ops

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinyvllm.bench.report import Report
    from tinyvllm.bench.workloads import Work, Workload
    from tinyvllm.models import Transformer

_MARKERS = ("advance_decode", "embedding", "sample")
"""What a step begins with: the first of these that the device ran."""
_SETTLE = 4
"""Tokens that every stream has had before anything is measured, and that an engine may be ahead."""
_NUM_STEPS = 16
"""That are looked at, and as many before them without the profiler."""
_NUM_TOKENS = 4 * (_SETTLE + _NUM_STEPS)
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the device did; microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Timed:
    """An event of a step, and the gap before it."""

    name: str
    duration: float
    gap: float


@dataclass(frozen=True, slots=True)
class Row:
    """All events of a name, or at one place of a layer; microseconds."""

    name: str
    calls: float
    """A step."""
    per_call: float
    per_step: float
    gaps: float
    """A step, before its events."""


def trace_events(trace: dict[str, Any]) -> list[Event]:
    """Kernels, copies and fills of a trace in Chrome's format, in the order of their beginnings."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [
        Event(short_name(each["name"]), float(each["ts"]), float(each["dur"]))
        for each in trace.get("traceEvents", ())
        if each.get("ph") == "X" and each.get("cat") in kinds
    ]
    return sorted(events, key=lambda event: event.start)


def short_name(name: str) -> str:
    """`void tinyvllm::cuda::(anonymous namespace)::f_kernel<16, (Mode)1>(Params)` -> `f_kernel<16,
    (Mode)1>`: without types, namespaces and arguments."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth, end = 0, len(name)
    for idx, char in enumerate(name):
        depth += (char == "<") - (char == ">")
        if char == "(" and depth == 0 and idx > 0:
            end = idx
            break
    head, bracket, arguments = name[:end].partition("<")
    if not re.fullmatch(r"[\w:~]+", head):  # "Memcpy HtoD (Pinned -> Device)" is no function
        return name
    return head.rpartition("::")[2] + bracket + re.sub(r"\b(?:\w+::)+", "", arguments)


def step_begins(events: Sequence[Event]) -> list[int]:
    """Where steps begin among the events."""
    for marker in _MARKERS:
        if begins := [idx for idx, event in enumerate(events) if marker in event.name]:
            return begins
    return []


def split_steps(events: Sequence[Event]) -> list[list[Timed]]:
    """The steps that are there as a whole, but for the first, which has no gap before it."""
    begins = step_begins(events)
    steps: list[list[Timed]] = []
    for before, begin, end in zip(begins, begins[1:], begins[2:], strict=False):
        last_end = max(event.end for event in events[before:begin])
        steps.append(with_gaps(events[begin:end], last_end))
    return steps


def with_gaps(events: Iterable[Event], last_end: float) -> list[Timed]:
    """Durations and gaps add up to the time from `last_end` to the end of all events."""
    found = []
    for event in events:
        # What overlaps counts once: an event within another adds nothing at all.
        gap = max(event.start - last_end, -event.duration)
        found.append(Timed(event.name, event.duration, gap))
        last_end = max(last_end, event.end)
    return found


def usual_steps(steps: Sequence[list[Timed]]) -> list[list[Timed]]:
    """Those that do what most do: not the ones that also get new blocks, say."""
    sequences = [tuple(each.name for each in step) for step in steps]
    ((usual, _),) = Counter(sequences).most_common(1)
    return [step for step, names in zip(steps, sequences, strict=True) if names == usual]


def rows_by_name(steps: Sequence[list[Timed]]) -> list[Row]:
    """A row for each name, the longest first; means over the steps."""
    groups: dict[str, list[Timed]] = {}
    for step in steps:
        for each in step:
            groups.setdefault(each.name, []).append(each)
    rows = [_row(name, group, len(steps)) for name, group in groups.items()]
    return sorted(rows, key=lambda row: -row.per_step)


def rows_of_a_layer(steps: Sequence[list[Timed]], num_layers: int) -> list[Row]:
    """A row for each kernel of a layer, in order: means over layers and steps.

    The layers' kernels are found by their number; empty when there is none that each layer has
    once, or fewer than three layers. The first and the last layer are left out: what is before and
    behind them differs.
    """
    if not steps or num_layers < 3:
        return []
    counts = Counter(each.name for each in steps[0])
    once = [each.name for each in steps[0] if counts[each.name] == num_layers]
    if not once:
        return []
    layers: list[list[Timed]] = []
    for step in steps:
        begins = [idx for idx, each in enumerate(step) if each.name == once[0]]
        layers += [step[a:b] for a, b in pairwise(begins[1:])]
    places = zip(*usual_steps(layers), strict=True)
    return [_row(events[0].name, events, len(events)) for events in places]


def _row(name: str, events: Sequence[Timed], num_steps: int) -> Row:
    total = sum(each.duration for each in events)
    return Row(
        name,
        len(events) / num_steps,
        total / len(events),
        total / num_steps,
        sum(each.gap for each in events) / num_steps,
    )


def profile_table(
    report: Report, model_dir: Path, device: str, num_threads: int, workloads: Sequence[Workload]
) -> None:
    """Measure and print a table for each workload. Raises `UnavailableError` without kineto."""
    if device == "cpu":
        _C.set_num_threads(num_threads)
        model = load_model(
            model_dir,
            load_config(model_dir),
            get_ops("native"),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_model_len=max(workload.max_model_len for workload in workloads),
        )
        for workload in workloads:
            _cpu_table(report, model, workload)
        return
    _warm_up()
    for workload in workloads:
        work = replace(workload, output_len=(_NUM_TOKENS, _NUM_TOKENS))
        _gpu_table(report, model_dir, device, num_threads, work)


def _gpu_table(
    report: Report, model_dir: Path, device: str, num_threads: int, workload: Workload
) -> None:
    timings, events, num_layers = asyncio.run(_trace(model_dir, device, num_threads, workload))
    if not events:
        raise UnavailableError(
            "step --profile: the profiler saw nothing of what the GPU did: CUPTI is missing, or "
            "the driver forbids it (NVreg_RestrictProfilingToAdminUsers)"
        )
    steps = split_steps(events)
    if not steps:
        names = ", ".join(sorted({event.name for event in events}))
        raise UnavailableError(
            f"step --profile: no two whole steps among {len(events)} events; a step begins with "
            f"one of {', '.join(_MARKERS)}: {names}"
        )
    steps = usual_steps(steps)
    ops = timings.ops / timings.num_steps * 1e6
    idle = timings.idle / timings.num_steps * 1e6
    header = (
        f"{workload.name}, without the profiler: {number(ops + idle)} us a step, "
        f"{number(idle)} of them before its first kernel; with it, means of {len(steps)} steps:"
    )
    _print(report, workload, header, rows_by_name(steps))
    layer = rows_of_a_layer(steps, num_layers)
    if layer:
        lines = [[row.name, number(row.per_call), _signed(row.gaps)] for row in layer]
        lines.append(_sum_line(layer))
        report.print(text_table(["one layer, in order", "us", "gap before"], lines))
        report.print()


def _cpu_table(report: Report, model: Transformer, workload: Workload) -> None:
    ops, context = model.ops, workload.prompt_len[1] + workload.output_len[1] // 2
    step = Step(workload.name, workload.num_requests, 1, context)
    calls = step_calls(model, step, "cpu")
    kinds = {id(call): kind for kind, group in by_kind(model, calls).items() for call in group}
    bound = [(kinds[id(call)], getattr(ops, call[0]), call[1]) for call in calls]
    with ops.capture() as graph:
        for _, op, args in bound:
            op(*args)
    runs: list[list[Timed]] = []
    whole = []
    for _ in range(_REPEATS + 1):
        begin = perf_counter()
        graph.replay()
        whole.append(perf_counter() - begin)
        begin = perf_counter()
        events = []
        for kind, op, args in bound:
            start = perf_counter()
            op(*args)
            events.append(Event(kind, start * 1e6, (perf_counter() - start) * 1e6))
        runs.append(with_gaps(events, begin * 1e6))
    header = (
        f"{workload.name}: {number(statistics.median(whole[1:]) * 1e6)} us a step as one graph; "
        f"op by op, means of {_REPEATS} steps:"
    )
    _print(report, workload, header, rows_by_name(runs[1:]))


def _print(report: Report, workload: Workload, header: str, rows: Sequence[Row]) -> None:
    step_us = sum(row.per_step + row.gaps for row in rows)
    for row in rows:
        report.write(
            {
                "record": "kernel",
                "streams": workload.num_requests,
                "kernel": row.name,
                "calls": row.calls,
                "us_per_call": row.per_call,
                "us_per_step": row.per_step,
                "gap_us_per_step": row.gaps,
                "step_us": step_us,
            }
        )
    lines = [
        [
            row.name,
            number(row.calls),
            number(row.per_call),
            number(row.per_step),
            f"{row.per_step / step_us:.0%}",
            _signed(row.gaps),
        ]
        for row in rows
    ]
    kernels, gaps = sum(row.per_step for row in rows), sum(row.gaps for row in rows)
    calls = number(sum(row.calls for row in rows))
    lines.append(
        [f"step: {number(step_us)} us", calls, "-", number(kernels), "100%", _signed(gaps)]
    )
    report.print(header)
    names = [
        "kernel",
        "calls a step",
        "us a call",
        "us a step",
        "of step",
        "gaps before, us a step",
    ]
    report.print(text_table(names, lines))
    report.print()


def _sum_line(layer: Sequence[Row]) -> list[str]:
    kernels, gaps = sum(row.per_call for row in layer), sum(row.gaps for row in layer)
    return [f"layer: {number(kernels + gaps)} us", number(kernels), _signed(gaps)]


def _signed(value: float) -> str:
    return f"-{number(-value)}" if value <= -0.005 else number(max(value, 0.0))


def _warm_up() -> None:
    """Graphs that were made before CUPTI was there are not always traced: this is called first."""
    activity = torch.profiler.ProfilerActivity.CUDA
    supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    if not torch.profiler.kineto_available() or activity not in supported:
        raise UnavailableError(
            f"step --profile needs a torch with kineto and CUPTI; {torch.__version__} has none"
        )
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with torch.profiler.profile(activities=[activity]):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()


async def _trace(
    model_dir: Path, device: str, num_threads: int, workload: Workload
) -> tuple[StepTimings, list[Event], int]:
    """Steady decoding: some steps' timings, then what the device did in as many more."""
    async with tinyvllm.AsyncEngine(
        model_dir,
        device=device,
        num_threads=num_threads,
        max_num_seqs=max(64, workload.num_requests),
        max_model_len=workload.max_model_len,
        max_buffered_tokens=_SETTLE,
    ) as engine:
        vocab_size = engine.model_config.vocab_size
        readers = [_Reader(engine, work) for work in workload.draw(0, vocab_size)]
        timings = StepTimings()

        async def all_have(num_tokens: int) -> None:
            await asyncio.gather(*(reader.has(num_tokens) for reader in readers))

        await all_have(_SETTLE)
        engine.step_timings = timings
        await all_have(_SETTLE + _NUM_STEPS)
        engine.step_timings = None
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        begin = min(reader.num_tokens for reader in readers)
        profiler.start()
        # Its start took longer than a step: nothing ran meanwhile, and the first steps are not yet
        # as the others.
        await all_have(begin + _SETTLE + _NUM_STEPS)
        profiler.stop()
        for reader in readers:
            await reader.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            events = trace_events(json.loads(file.read_text(encoding="utf-8")))
        return timings, _without_the_first(events, _SETTLE), engine.model_config.num_layers


def _without_the_first(events: list[Event], num_steps: int) -> list[Event]:
    begins = step_begins(events)
    return events[begins[num_steps] :] if len(begins) > num_steps + 2 else events


class _Reader:
    """Reads a stream, and tells how far it is."""

    def __init__(self, engine: tinyvllm.AsyncEngine, work: Work) -> None:
        self.num_tokens = 0
        self._more = asyncio.Event()
        self._stream = engine.generate(
            list(work.prompt_ids), temperature=0, max_tokens=work.max_tokens, ignore_eos=True
        )
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for _ in self._stream:
                self.num_tokens += 1
                self._more.set()
        finally:
            self._more.set()

    async def has(self, num_tokens: int) -> None:
        while self.num_tokens < num_tokens and not self._task.done():
            self._more.clear()
            await self._more.wait()

    async def stop(self) -> None:
        self._stream.abort()
        await self._task
