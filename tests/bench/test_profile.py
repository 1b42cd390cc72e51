"""From what a profiler saw to a table: names, steps, gaps that may be negative, sums that agree."""

from __future__ import annotations

import pytest
import torch

from tinyvllm.bench import profile_table
from tinyvllm.bench.contenders import UnavailableError
from tinyvllm.bench.profile_table import (
    Event,
    rows_by_name,
    rows_of_a_layer,
    short_name,
    split_steps,
    trace_events,
    usual_steps,
    with_gaps,
)

STEP, LAYER_OPS = "advance_decode_kernel", ("qkv", "rope", "attend", "out", "down")


def step_events(start: float, num_layers: int = 4, extra: tuple[str, ...] = ()) -> list[Event]:
    """A step of kernels that take 2 us each, 0.5 us apart; from `down` to the next one -0.25."""
    events = [Event(STEP, start, 2.0)]
    for _ in range(num_layers):
        for name in LAYER_OPS:
            gap = -0.25 if events[-1].name == "down" else 0.5
            events.append(Event(name, events[-1].end + gap, 2.0))
    for name in (*extra, "sample", "Memcpy DtoH (Device -> Pinned)"):
        events.append(Event(name, events[-1].end + 0.5, 2.0))
    return events


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void tinyvllm::cuda::(anonymous namespace)::linear_kernel<16, (tinyvllm::cuda::"
            "(anonymous namespace)::Mode)1, false>(tinyvllm::cuda::LinearParams)",
            "linear_kernel<16, (Mode)1, false>",
        ),
        (
            "tinyvllm::cuda::advance_decode_kernel(int*, int const*, long)",
            "advance_decode_kernel",
        ),
        (
            "void at::native::elementwise_kernel<4, at::native::CopyFunctor<float>()::{lambda(int)"
            "#1}>(int, at::native::CopyFunctor<float>)",
            "elementwise_kernel<4, CopyFunctor<float>()::{lambda(int)#1}>",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("Memset (Device)", "Memset (Device)"),
        ("_Z4plainv", "_Z4plainv"),
        ("", ""),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_trace_gives_what_the_device_did_in_order() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "void b(int)", "ts": 5.5, "dur": 1.25},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1, "dur": 9},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device)", "ts": 3, "dur": 1},
            {"ph": "f", "cat": "kernel", "name": "flow", "ts": 2},
            {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 4, "dur": 0.5},
        ]
    }
    assert trace_events(trace) == [
        Event("Memcpy DtoH (Device)", 3.0, 1.0),
        Event("Memset", 4.0, 0.5),
        Event("b", 5.5, 1.25),
    ]
    assert trace_events({}) == []


def test_overlap_is_a_negative_gap_and_counts_once() -> None:
    events = [
        Event("first", 10.0, 5.0),  # 10 .. 15
        Event("early", 13.0, 4.0),  # 13 .. 17: let in 2 us before its predecessor's end
        Event("within", 14.0, 2.0),  # 14 .. 16: all of it inside
        Event("later", 18.5, 1.0),  # 18.5 .. 19.5
    ]
    timed = with_gaps(events, last_end=9.0)
    assert [each.gap for each in timed] == [1.0, -2.0, -2.0, 1.5]
    assert sum(each.duration + each.gap for each in timed) == 19.5 - 9.0


def test_a_step_goes_from_the_last_ones_end_to_its_own() -> None:
    # The first begins before the profiler does, the last is cut off.
    events = [Event("sample", -4.0, 1.0)]
    for idx in range(5):
        events += step_events(100.0 * idx)
    steps = split_steps(events[:-3])
    assert len(steps) == 3
    length = step_events(0.0)[-1].end
    for step in steps:
        assert step[0].name == STEP and step[0].gap == pytest.approx(100 - length)
        assert sum(each.duration + each.gap for each in step) == pytest.approx(100)
    assert split_steps(step_events(0.0)) == split_steps([]) == []


def test_unusual_steps_are_left_out() -> None:
    events = []
    for idx in range(6):
        events += step_events(100.0 * idx, extra=("index_copy",) if idx == 3 else ())
    steps = split_steps(events)
    assert len(steps) == 4 and len(usual_steps(steps)) == 3
    assert "index_copy" not in {row.name for row in rows_by_name(usual_steps(steps))}


def test_rows_add_up() -> None:
    events = []
    for idx in range(5):
        events += step_events(100.0 * idx)
    rows = rows_by_name(split_steps(events))
    by_name = {row.name: row for row in rows}
    assert by_name["attend"].calls == 4 and by_name["attend"].per_call == 2.0
    assert by_name["attend"].per_step == 8.0 and by_name["attend"].gaps == pytest.approx(4 * 0.5)
    assert by_name["qkv"].gaps == pytest.approx(0.5 - 3 * 0.25)
    assert rows[0].per_step == max(row.per_step for row in rows)
    assert sum(row.per_step + row.gaps for row in rows) == pytest.approx(100)


def test_a_layer_in_order() -> None:
    events = []
    for idx in range(5):
        events += step_events(100.0 * idx, num_layers=6)
    layer = rows_of_a_layer(split_steps(events), 6)
    assert [row.name for row in layer] == list(LAYER_OPS)
    assert all(row.per_call == pytest.approx(2.0) and row.calls == 1 for row in layer)
    assert [row.gaps for row in layer] == pytest.approx([-0.25, 0.5, 0.5, 0.5, 0.5])


def test_the_same_kernel_twice_in_a_layer_has_two_places() -> None:
    events = []
    for idx in range(4):
        for event in step_events(100.0 * idx, num_layers=5):
            name = {"out": "linear", "down": "linear", "qkv": "linear"}.get(event.name, event.name)
            events.append(Event(name, event.start, event.duration))
    layer = rows_of_a_layer(split_steps(events), 5)
    # It begins at the first kernel that a layer has once.
    assert [row.name for row in layer] == ["rope", "attend", "linear", "linear", "linear"]


@pytest.mark.parametrize("num_layers", [0, 2, 7])
def test_no_layer_where_none_can_be_told(num_layers: int) -> None:
    events = []
    for idx in range(4):
        events += step_events(100.0 * idx)
    assert rows_of_a_layer(split_steps(events), num_layers) == []
    assert rows_of_a_layer([], 4) == []


def test_a_torch_without_kineto_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    with pytest.raises(UnavailableError, match="needs a torch with kineto and CUPTI"):
        profile_table._warm_up()


def test_signs() -> None:
    assert [profile_table._signed(x) for x in (-1.5, -0.001, 0.0, 0.25, 120.0)] == [
        *("-1.50", "0.00", "0.00", "0.25", "120"),
    ]
