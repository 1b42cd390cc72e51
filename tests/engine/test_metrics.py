"""Metrics: numbers that add up, in a text that Prometheus's own client reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engine_helpers import GREEDY, settled

from tinyvllm import EngineClosedError, EngineCollector
from tinyvllm.metrics import Histogram, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm import AsyncEngine

    MakeEngine = Callable[..., AsyncEngine]


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value, count in ((0.05, 1), (0.1, 2), (0.5, 3), (7.0, 1)):
        histogram.observe(value, count)
    lines = [(s.suffix, s.labels.get("le"), s.value) for s in histogram.samples()]
    assert lines == [
        ("_bucket", "0.1", 3),
        ("_bucket", "1.0", 6),
        ("_bucket", "+Inf", 7),
        ("_sum", None, pytest.approx(0.05 + 0.2 + 1.5 + 7.0)),
        ("_count", None, 7),
    ]


def test_bounds_ascend() -> None:
    recorder = Recorder()
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "e2e_request_latency",
        "request_queue_time",
    ):
        bounds = getattr(recorder, name).bounds
        assert list(bounds) == sorted(set(bounds))


def parse(text: str) -> dict[tuple[str, str], float]:
    """(name, label value) -> value, read by Prometheus's own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type != "unknown", family.name
        for sample in family.samples:
            found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


@pytest.mark.anyio
async def test_the_numbers_add_up(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine() as engine:
        engine.enable_metrics()
        streams = [engine.generate(prompt, GREEDY) for prompt in prompts[:5]]
        for stream in streams:
            await stream.text()
        streams[0].abort()
        left = engine.generate(prompts[5], GREEDY, max_tokens=99)
        await anext(left)
        left.abort()
        await settled(engine)
        values = parse(engine.metrics_text())
        stats = engine.stats()
    assert values["tinyvllm_request_success_total", "length"] == 6
    assert values["tinyvllm_request_success_total", "abort"] == 1
    assert values["tinyvllm_request_success_total", "error"] == 0
    assert values["tinyvllm_num_requests_running", ""] == 0
    assert values["tinyvllm_kv_cache_usage_perc", ""] == 0
    assert values["tinyvllm_prompt_tokens_total", ""] == stats.num_prompt_tokens
    assert values["tinyvllm_generation_tokens_total", ""] == stats.num_output_tokens
    assert values["tinyvllm_prefix_cache_queries_total", ""] == stats.prefix_cache_queries
    first = values["tinyvllm_time_to_first_token_seconds_count", ""]
    gaps = values["tinyvllm_inter_token_latency_seconds_count", ""]
    assert first == 7
    # Every token but the first has a gap; one may have been drawn for the aborted stream too late.
    delivered = 5 * 12 + left.usage.completion_tokens + 1
    assert 0 <= gaps - (delivered - first) <= 1
    assert values["tinyvllm_e2e_request_latency_seconds_count", ""] == 7
    assert values["tinyvllm_request_queue_time_seconds_count", ""] == 7
    total = sum(stream.timings.total or 0 for stream in [*streams, left])
    assert values["tinyvllm_e2e_request_latency_seconds_sum", ""] >= total * 0.99


@pytest.mark.anyio
async def test_prometheus_client_collects_the_same(make_engine: MakeEngine, prompts: Any) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    engine = make_engine()
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine))
    with pytest.raises(EngineClosedError):
        engine.metrics_text()
    async with engine:
        await engine.generate(prompts[5], GREEDY).text()
        await settled(engine)
        text = prometheus_client.generate_latest(registry).decode()
        assert parse(text) == parse(engine.metrics_text())
    assert parse(engine.metrics_text())["tinyvllm_request_success_total", "length"] == 2


@pytest.mark.anyio
async def test_off_until_asked_for(make_engine: MakeEngine, prompts: Any) -> None:
    async with make_engine() as engine:
        await engine.generate(prompts[5], GREEDY).text()
        core = engine._engine
        assert core is not None
        assert core._recorder is None
        values = parse(engine.metrics_text())
        assert values["tinyvllm_request_success_total", "length"] == 1
        assert values["tinyvllm_time_to_first_token_seconds_count", ""] == 0
        await engine.generate(prompts[5], GREEDY).text()
        values = parse(engine.metrics_text())
        assert values["tinyvllm_time_to_first_token_seconds_count", ""] == 1
