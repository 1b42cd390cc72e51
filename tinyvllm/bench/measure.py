"""Interleaved rounds: every engine in turn does the round's work, then the next round begins.

A shared machine's speed drifts within minutes, so engines are compared within a round: ratios are
medians of the rounds' ratios, and the ceiling is measured in every round again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import tinyvllm
from tinyvllm.bench import contenders, first_token
from tinyvllm.bench.report import Row, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinyvllm.bench.ceilings import Ceilings
    from tinyvllm.bench.contenders import Contender, Run
    from tinyvllm.bench.workloads import Workload
    from tinyvllm.config import ModelConfig

Metrics = dict[tuple[str, str, bool], float]
"""(metric, unit, higher is better) -> value of one engine in one round."""


def bytes_per_token(config: ModelConfig, itemsize: int = 2) -> int:
    """Bytes of weights that a decode step must read: every matrix once, one row of embeddings."""
    width = config.head_dim
    qkv = config.hidden_size * width * (config.num_heads + 2 * config.num_kv_heads)
    out = config.num_heads * width * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    return (config.num_layers * (qkv + out + mlp) + head) * itemsize


def latency_metrics(runs: Sequence[Run], _cpu_seconds: float) -> Metrics:
    """Decode speed of one stream, from its first token to its last."""
    times = runs[0].times
    seconds = (times[-1] - times[0]) / (len(times) - 1)
    return {
        ("decode", "tok/s", True): 1 / seconds,
        ("time per output token", "ms", False): seconds * 1e3,
    }


def ttft_metrics(runs: Sequence[Run], _cpu_seconds: float, *, prompt_len: int) -> Metrics:
    seconds = runs[0].times[0] - runs[0].submitted
    return {
        ("time to first token", "ms", False): seconds * 1e3,
        ("prefill", "tok/s", True): prompt_len / seconds,
    }


def throughput_metrics(runs: Sequence[Run], cpu_seconds: float) -> Metrics:
    """Decode speed while every request is decoding, and speed and processor time over all."""
    start = min(run.submitted for run in runs)
    end = max(run.times[-1] for run in runs)
    num_tokens = sum(len(run.times) for run in runs)
    metrics: Metrics = {("output", "tok/s", True): num_tokens / (end - start)}
    full_from = max(run.times[0] for run in runs)
    full_to = min(run.times[-1] for run in runs)
    if full_to > full_from:
        inside = sum(full_from < moment <= full_to for run in runs for moment in run.times)
        name = f"decode, all {len(runs)} running"
        metrics[name, "tok/s", True] = inside / (full_to - full_from)
    metrics["processor time per 1,000 tokens", "s", False] = cpu_seconds * 1000 / num_tokens
    return metrics


def streams_metrics(runs: Sequence[Run], _cpu_seconds: float) -> Metrics:
    first = [(run.times[0] - run.submitted) * 1e3 for run in runs]
    gaps = [(b - a) * 1e3 for run in runs for a, b in zip(run.times, run.times[1:], strict=False)]
    span = max(run.times[-1] for run in runs) - min(run.submitted for run in runs)
    return {
        ("output", "tok/s", True): sum(len(run.times) for run in runs) / span,
        ("time to first token p50", "ms", False): percentile(first, 50),
        ("time to first token p99", "ms", False): percentile(first, 99),
        ("inter-token p50", "ms", False): percentile(gaps, 50),
        ("inter-token p99", "ms", False): percentile(gaps, 99),
    }


def compare(
    workload: Workload,
    engines: Sequence[Contender],
    rounds: int,
    vocab_size: int,
    metrics: Callable[[Sequence[Run], float], Metrics],
    *,
    ceilings: Ceilings | None = None,
    bytes_read: int = 0,
) -> tuple[list[Row], list[list[Run]]]:
    """One warm-up (round -1), then `rounds` rounds of `workload`: rows, and the last round's runs.

    With `ceilings`, rows of decode speed carry their share of the read bandwidth of their round.
    """
    rows: dict[tuple[str, str, bool], Row] = {}
    last: list[list[Run]] = []
    limits: list[float] = []  # tokens per second that the round's read bandwidth allows
    for engine in engines:
        engine.run(workload.draw(-1, vocab_size), workload.temperature)
    for round_idx in range(rounds):
        work = workload.draw(round_idx, vocab_size)
        bandwidth = ceilings.read_bandwidth() if ceilings else 0.0
        results: list[Metrics] = []
        last = []
        # Whoever goes first meets the machine as the ceiling's measurement left it: take turns.
        turn = round_idx % len(engines)
        order = [*engines[turn:], *engines[:turn]]
        by_name: dict[str, tuple[list[Run], float]] = {}
        for engine in order:
            before = time.process_time()
            runs = engine.run(work, workload.temperature)
            by_name[engine.name] = (runs, time.process_time() - before)
        for engine in engines:
            runs, cpu_seconds = by_name[engine.name]
            results.append(metrics(runs, cpu_seconds))
            last.append(runs)
        if ceilings:
            limits.append(max(bandwidth, ceilings.read_bandwidth()) / bytes_read)
        for engine, result in zip(engines, results, strict=True):
            for key, value in result.items():
                row = rows.setdefault(key, Row(workload.name, *key, values={}))
                row.values.setdefault(engine.name, []).append(value)
                if ceilings and key == ("decode", "tok/s", True):
                    row.shares = row.shares or {}
                    row.shares.setdefault(engine.name, []).append(value / limits[-1])
                    row.ceilings = limits
    return list(rows.values()), last


def same_prefix(runs: Sequence[Run], others: Sequence[Run]) -> tuple[int, int]:
    """Greedy tokens that two engines agree on before they first differ, of how many."""
    agreed = total = 0
    for run, other in zip(runs, others, strict=True):
        pairs = list(zip(run.token_ids, other.token_ids, strict=True))
        differ = [idx for idx, (a, b) in enumerate(pairs) if a != b]
        agreed += differ[0] if differ else len(pairs)
        total += len(pairs)
    return agreed, total


def start_row(
    names: Sequence[str], model_dir: Path, device: str, num_threads: int, rounds: int
) -> Row:
    """Seconds from starting a process to the first token of a first prompt, in each engine.

    One round more is run first and dropped: it brings files into the page cache.
    """
    values: dict[str, list[float]] = {name: [] for name in names}
    for round_idx in range(rounds + 1):
        for name in names:
            seconds = _seconds_to_first_token(name, model_dir, device, num_threads)
            if round_idx > 0:
                values[name].append(seconds)
    return Row("start", "process start to first token", "s", False, values)


def _seconds_to_first_token(name: str, model_dir: Path, device: str, num_threads: int) -> float:
    """Runs first_token.py by its path, so that no engine pays for another's imports."""
    model = str(model_dir)
    if name == "llama.cpp":
        from tinyvllm.bench.gguf_export import cached_bf16_gguf

        model = str(cached_bf16_gguf(model_dir))
    package_root = str(Path(tinyvllm.__file__).parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    script = first_token.__file__
    command = [sys.executable, "-P", script, name, model, device, str(num_threads)]
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        seconds = time.perf_counter() - start
        _, errors = child.communicate()
    if line.strip() != first_token.DONE or child.returncode != 0:
        raise contenders.UnavailableError(f"{name} did not start: {errors.strip()[-500:]}")
    return seconds
