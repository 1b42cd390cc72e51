"""Metrics: what an engine has done, under vLLM's names, as Prometheus text or for its client.

The counters and gauges are the engine's own statistics. Only the histograms cost anything, and only
once recording is on: a `Recorder` gets one call a step and a few a request. The engine thread
writes it; whoever scrapes reads copies, at most one step apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PREFIX = "tinyvllm_"

# Upper bounds in seconds, as in vLLM.
_MINUTES = (1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_REQUEST = (0.3, 0.5, 0.8, *_MINUTES, 960.0, 1920.0, 7680.0)
_SECONDS = (0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, *_SECONDS)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_SECONDS[1:-3])

_last_token_time = attrgetter("seq.owner.time_last_token")


class Sample(NamedTuple):
    """One line of a family: `name + suffix{labels} value`."""

    suffix: str
    labels: dict[str, str]
    value: float


class Family(NamedTuple):
    """One metric with its samples. `kind`: gauge, counter or histogram."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


class Histogram:
    """Counts of values per bucket. `bounds`: upper ones, ascending, the infinite one left out."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def samples(self) -> list[Sample]:
        bounds = [*map(str, self.bounds), "+Inf"]
        cumulative = list(accumulate(self.counts))
        buckets = [
            Sample("_bucket", {"le": bound}, count)
            for bound, count in zip(bounds, cumulative, strict=True)
        ]
        return [*buckets, Sample("_sum", {}, self.total), Sample("_count", {}, cumulative[-1])]


class Recorder:
    """The histograms of one engine."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_FIRST)
        self.inter_token_latency = Histogram(_GAP)
        self.e2e_request_latency = Histogram(_REQUEST)
        self.request_queue_time = Histogram(_REQUEST)
        self._last_entries: list[Any] = []
        self._last_time = 0.0

    def step(self, entries: list[Any], now: float) -> None:
        """The gaps before the tokens of one step, whose sequences' owners still have the time of
        their last one. The same entries as in the step before share one gap."""
        if entries == self._last_entries:
            self.inter_token_latency.observe(now - self._last_time, len(entries))
        else:
            for last, count in Counter(map(_last_token_time, entries)).items():
                if last is not None:
                    self.inter_token_latency.observe(now - last, count)
            self._last_entries = entries
        self._last_time = now


class Source(Protocol):
    """What has metrics: an `AsyncEngine`."""

    def metrics_families(self) -> list[Family]: ...


def families(stats: Any, finished: Mapping[Any, int], recorder: Recorder) -> list[Family]:
    """Everything there is. `stats`: an EngineStats; `finished`: requests by finish reason."""
    used = 1 - stats.num_free_blocks / stats.num_blocks
    return [
        _one("num_requests_running", "gauge", "Sequences that hold a slot.", stats.num_running),
        _one("num_requests_waiting", "gauge", "Sequences that wait.", stats.num_waiting),
        _one("kv_cache_usage_perc", "gauge", "KV blocks in use, 1 is all.", used),
        _one("prompt_tokens", "counter", "Prompt tokens of requests.", stats.num_prompt_tokens),
        _one("generation_tokens", "counter", "Tokens generated.", stats.num_output_tokens),
        _one("num_preemptions", "counter", "Preempted sequences.", stats.num_preemptions),
        _one(
            "prefix_cache_queries",
            "counter",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        ),
        _one(
            "prefix_cache_hits",
            "counter",
            "Prompt tokens found in the prefix cache.",
            stats.prefix_cache_hits,
        ),
        Family(
            PREFIX + "request_success",
            "counter",
            "Requests that ended, by reason.",
            [
                Sample("_total", {"finished_reason": reason}, count)
                for reason, count in finished.items()
            ],
        ),
        *(
            Family(PREFIX + name, "histogram", text, histogram.samples())
            for name, text, histogram in (
                (
                    "time_to_first_token_seconds",
                    "From the request to its first token.",
                    recorder.time_to_first_token,
                ),
                (
                    "inter_token_latency_seconds",
                    "Between tokens of a request.",
                    recorder.inter_token_latency,
                ),
                (
                    "e2e_request_latency_seconds",
                    "From the request to its end.",
                    recorder.e2e_request_latency,
                ),
                (
                    "request_queue_time_seconds",
                    "From the request to its first step.",
                    recorder.request_queue_time,
                ),
            )
        ),
    ]


def render(found: Iterable[Family]) -> str:
    """Prometheus's text format, version 0.0.4."""
    lines: list[str] = []
    for family in found:
        name = family.name + ("_total" if family.kind == "counter" else "")
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            braces = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}{sample.suffix}{braces} {sample.value!r}")
    return "\n".join(lines) + "\n"


class EngineCollector:
    """An engine's metrics for prometheus_client (`pip install prometheus_client`):

        registry.register(EngineCollector(engine))

    Several engines need a registry each: their metrics have the same names.
    """

    def __init__(self, engine: Source) -> None:
        self._engine = engine

    def describe(self) -> list[Any]:
        """Nothing: so that an engine can be registered before it is started."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import Metric

        for family in self._engine.metrics_families():
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(family.name + sample.suffix, sample.labels, sample.value)
            yield metric


def _one(name: str, kind: str, text: str, value: float) -> Family:
    suffix = "_total" if kind == "counter" else ""
    return Family(PREFIX + name, kind, text, [Sample(suffix, {}, value)])
