"""Metrics from time stamps, fair rounds, and prompts that are the same for everyone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tinyvllm.bench.contenders import Run, Settings, create
from tinyvllm.bench.measure import (
    bytes_per_token,
    compare,
    latency_metrics,
    same_prefix,
    streams_metrics,
    throughput_metrics,
    ttft_metrics,
)
from tinyvllm.bench.workloads import SIZES, Work, Workload
from tinyvllm.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WORKLOAD = Workload("pairs", 2, (3, 5), (2, 4))


def test_latency_leaves_the_first_token_out() -> None:
    metrics = latency_metrics([Run(0.0, [1, 2, 3], [9.0, 9.5, 10.0])], 0.0)
    assert metrics == {
        ("decode", "tok/s", True): 2.0,
        ("time per output token", "ms", False): 500.0,
    }


def test_ttft_counts_from_submission() -> None:
    metrics = ttft_metrics([Run(1.0, [1], [1.5])], 0.0, prompt_len=100)
    assert metrics["time to first token", "ms", False] == 500.0
    assert metrics["prefill", "tok/s", True] == 200.0


def test_throughput_has_the_full_batch_apart() -> None:
    early = Run(0.0, [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    late = Run(0.0, [1, 2, 3, 4], [2.0, 3.0, 4.0, 5.0])
    metrics = throughput_metrics([early, late], cpu_seconds=0.8)
    assert metrics["output", "tok/s", True] == 8 / 5
    # Both run in (2, 4]: two tokens each.
    assert metrics["decode, all 2 running", "tok/s", True] == 4 / 2
    assert metrics["processor time per 1,000 tokens", "s", False] == pytest.approx(100)


def test_throughput_without_a_moment_when_all_run() -> None:
    runs = [Run(0.0, [1], [1.0]), Run(0.0, [1], [2.0])]
    assert not any("running" in name for name, _, _ in throughput_metrics(runs, 0.0))


def test_streams_percentiles() -> None:
    runs = [Run(0.0, [1, 2], [0.1, 0.3]), Run(0.0, [1, 2], [0.2, 0.3])]
    metrics = streams_metrics(runs, 0.0)
    assert metrics["time to first token p50", "ms", False] == pytest.approx(100)
    assert metrics["time to first token p99", "ms", False] == pytest.approx(200)
    assert metrics["inter-token p99", "ms", False] == pytest.approx(200)
    assert metrics["output", "tok/s", True] == pytest.approx(4 / 0.3)


def test_draws_repeat_and_rounds_differ() -> None:
    first = WORKLOAD.draw(0, vocab_size=50)
    assert first == WORKLOAD.draw(0, vocab_size=50) != WORKLOAD.draw(1, vocab_size=50)
    for work in first:
        assert 3 <= len(work.prompt_ids) <= 5 and 2 <= work.max_tokens <= 4
        assert all(0 <= token_id < 50 for token_id in work.prompt_ids)


def test_every_size_has_every_workload() -> None:
    for sizes in SIZES.values():
        assert sizes.latency and sizes.ttft and sizes.throughput and sizes.streams
        assert all(workload.num_requests == 1 for workload in (*sizes.latency, *sizes.ttft))


class FakeEngine:
    """Answers at once, and writes down what it was asked, and when."""

    def __init__(self, name: str, diary: list[tuple[str, list[Work]]]) -> None:
        self.name, self.version, self._diary = name, "0", diary

    def run(self, work: Sequence[Work], temperature: float) -> list[Run]:
        self._diary.append((self.name, list(work)))
        return [Run(0.0, [7] * w.max_tokens, [1.0 + i for i in range(w.max_tokens)]) for w in work]

    def close(self) -> None:
        pass


def test_rounds_are_interleaved_warmed_up_and_alike() -> None:
    diary: list[tuple[str, list[Work]]] = []
    engines = [FakeEngine("tinyvllm", diary), FakeEngine("other", diary)]
    rows, runs = compare(WORKLOAD, engines, 2, 50, streams_metrics)
    assert [name for name, _ in diary] == [
        *("tinyvllm", "other"),
        *("tinyvllm", "other"),
        *("other", "tinyvllm"),
    ]
    asked = [work for _, work in diary]
    assert asked[0] == asked[1] and asked[2] == asked[3] and asked[4] == asked[5]
    assert asked[0] != asked[2] != asked[4]
    assert all(len(values) == 2 for row in rows for values in row.values.values())
    assert all(row.ratio("other") == 1.0 for row in rows)
    assert same_prefix(runs[0], runs[1])[0] == sum(work.max_tokens for work in asked[4])


def test_same_prefix_stops_at_the_first_difference() -> None:
    ours = [Run(0.0, [1, 2, 3, 4]), Run(0.0, [5, 6])]
    theirs = [Run(0.0, [1, 2, 9, 4]), Run(0.0, [5, 6])]
    assert same_prefix(ours, theirs) == (4, 6)


def test_bytes_per_token_of_smollm2() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    # 134.5 million parameters at two bytes, norms (35,136 of them) aside.
    assert bytes_per_token(config) == 2 * (134_515_008 - 61 * 576)


def test_unknown_engine_is_named(tmp_path: Path) -> None:
    settings = Settings(
        model_dir=tmp_path, device="cpu", num_threads=1, max_num_seqs=1, max_model_len=8
    )
    with pytest.raises(ValueError, match="no engine is called 'exllama'"):
        create("exllama", settings)
